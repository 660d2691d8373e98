"""Decisions on the state: one function per ledger record, and what may be done at once."""
