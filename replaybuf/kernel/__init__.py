"""Decisions, pure: no I/O, no clock, no event loop.

The rooms, from the lowest floor up: `rows`, `figures`, `state`, `strategy`, `decide`.
"""
