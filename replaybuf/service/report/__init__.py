"""Reported state of a run: what `GET /v1/runs/{run}` and the metrics show, its cache, and candidates of a batch."""
