"""The servers that share a Redis, and how they share the runs."""
