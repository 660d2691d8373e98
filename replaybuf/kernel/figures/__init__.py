"""Histograms, moments and times for people: folded with the state, but for `waits`, which each server measures itself.

Decisions read two of them: PATCH compares `changes.revision`, and admission gets the waits of the trainer as a rate.
Counts that decisions and guarantees need are in `state.group_counts`.
"""
