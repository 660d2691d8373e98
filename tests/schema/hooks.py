"""Hooks of Schemathesis: they fill in names that exist, so that requests get further than 404. Runs in its environment.

Two requests in three get a run, an epoch, a step, a ticket and a group that exist. All waits are short.
"""

from __future__ import annotations

import itertools
import json
import os
import random
from typing import Any

import schemathesis

RUNS = os.environ["REPLAYBUF_SCHEMA_RUNS"].split(",")
CALLS_PER_RUN = 150
"""Then the next run: a request may have finished or deleted the last one."""
SHORT_WAIT_MS = 20
GENERATED = 0.33
"""Share of requests that keep what Schemathesis generated."""

_rng = random.Random(0)
_calls = itertools.count()
_known: dict[str, dict[str, Any]] = {run: {"epoch": 1, "step": 0, "ticket": "t0-0-1", "group_id": "p0"} for run in RUNS}
"""By run: the newest value of each name."""


def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Put existing names into the request, and bound its wait."""
    run = RUNS[next(_calls) // CALLS_PER_RUN % len(RUNS)]
    existing = {"run": run} | _known[run]
    for parameters in (case.path_parameters, case.query, case.body):
        if not isinstance(parameters, dict):
            continue
        if isinstance(parameters.get("wait_ms"), int):
            parameters["wait_ms"] = min(parameters["wait_ms"], SHORT_WAIT_MS)
        if _rng.random() < GENERATED:
            continue
        parameters |= {name: value for name, value in existing.items() if name in parameters}


def after_call(context: Any, case: Any, response: Any) -> None:
    """Remember names from the answers."""
    known = _known.get(str((case.path_parameters or {}).get("run")))
    if known is None or response.status_code != 200 or "json" not in response.headers.get("content-type", [""])[0]:
        return
    answer = json.loads(response.content)
    parts = [answer.get(name) for name in ("tickets", "results", "groups")]
    for part in [answer, *(part for group in parts if isinstance(group, list) for part in group)]:
        known |= {name: part[name] for name in known if part.get(name) is not None}


for hook in (before_call, after_call):
    schemathesis.hook(hook)
