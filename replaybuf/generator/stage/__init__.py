"""Stages between reward and append, in the generator or in a process of their own."""
