"""Deterministic simulation: the real service on a virtual clock, a model of Redis, and faults at every await.

`python -m tests.simulation` runs schedules; docs/how-this-is-tested.md says what they can find.
"""
