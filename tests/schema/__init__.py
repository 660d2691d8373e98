"""Requests that Schemathesis derives from `/openapi.json`; `python -m tests.schema` (or `make schema`) sends them."""
