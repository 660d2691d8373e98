"""Appends of one run: admission, group commit, storing, and settling what has arrived."""
