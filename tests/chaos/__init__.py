"""Chaos: real processes under load, killed and stopped at random, and a checker that judges what everybody saw.

`python -m tests.chaos --kills 20 --seed 0` (or `make chaos`). What happens is in `chaos.py`, what is true in
`checker.py`; between them stands nothing but the recorded history (`history.py`).
"""
