"""Copies of a run: from a live run to a file or to another Redis, and from a file back to a Redis."""
