"""Reported state of a run: what `GET /v1/runs/{run}` and the metrics show, and its cache."""
