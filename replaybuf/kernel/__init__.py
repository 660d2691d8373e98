"""Decisions, pure: no I/O, no clock, no event loop. Only calls of plug-ins are timed and logged (`Selector.ask`).

Read `state`, then `strategy` and `decide`. Below lie `rows`, the index of groups, and `figures`, which are only shown.
"""
