"""Decisions, pure: no I/O, no clock, no event loop. State of a run as a fold, tickets, strategies, selection."""
