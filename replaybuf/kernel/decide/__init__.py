"""Decisions on the state: a function per ledger record, admission of groups and tickets, choices without a record."""
