"""Decisions, pure: no I/O, no clock, no event loop. Only calls of plug-ins are timed and logged (`Selector.ask`).

The rooms, from the lowest floor up: `rows`, `figures`, `state`, `strategy`, `decide`.
"""
