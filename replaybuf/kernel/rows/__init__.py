"""Rows of the groups of a run: the index, with its columns and sums."""
