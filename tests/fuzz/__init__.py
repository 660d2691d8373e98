"""Fuzzing of everything that decodes bytes from outside; `python -m tests.fuzz` runs it, tests replay the corpus."""
