"""Chaos test: real processes under load, hurt at random, and a checker of what all clients saw.

`python -m tests.chaos --kills 20 --seed 0` (or `make chaos`). `chaos.py` drives the processes, `checker.py` checks the
guarantees. The recorded history (`history.py`) is the only link between the two.
"""
