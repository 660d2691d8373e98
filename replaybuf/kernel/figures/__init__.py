"""Counts, histograms and times for people, folded with the state.

No decision reads them, but two numbers reach one: PATCH compares `changes.revision`, and admission gets the waits of
the trainer and the counts of evicted groups as rates.
"""
