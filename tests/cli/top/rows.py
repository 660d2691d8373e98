"""Rows and flows of runs, as the service reports them."""

from __future__ import annotations

from typing import Any

from replaybuf.cli.top.poller import Frame
from replaybuf.wire.answer.overview import Flow, Overview, RunRow, VersionCounts


def row(run: str, **fields: Any) -> RunRow:
    """Build the row of a run that works well."""
    values: dict[str, Any] = {
        "run": run,
        "state": "running",
        "paused_reason": None,
        "strategy": "on-policy",
        "step": 12,
        "max_steps": 100,
        "published_version": 11,
        "tokens_per_s": 12_345.0,
        "groups_per_s": 3.0,
        "steps_per_s": 0.5,
        "groups_live": 120,
        "tokens_live": 61_000,
        "dead_lettered": 0,
        "rewards": [0.1, 0.5, 0.6],
        "staleness": 0.5,
        "waiting": None,
        "idle_s": 2.0,
        "trainer_last_seen_s": 1.0,
        "producers_last_seen_s": 0.4,
        "producers_known": 8,
        "producers_gone": 0,
        "alarm": None,
    }
    return RunRow(**values | fields)


def overview(*rows: RunRow, **fields: Any) -> Frame:
    """Build a frame with these runs, answered at second 100."""
    answer = Overview(now_s=0.0, version="0", durability="strict", runs=[*rows], unreadable={})
    return Frame(overview=answer, at_s=100.0, **fields)


def flow(of: RunRow, **fields: Any) -> Frame:
    """Build a frame with the flow of a run, answered at second 100."""
    versions = [VersionCounts(11, 100, 0), VersionCounts(10, 20, 64)]
    answer = Flow(
        now_s=0.0,
        row=of,
        tickets_out=24,
        group_s=4.0,
        step_s=1.5,
        versions=versions,
        waited_s={"no_groups": 12.0},
        stored_s=0.3,
        batch_s=2.0,
        ack_s=None,
        ledger_entries=7,
    )
    return Frame(run=of.run, flow=answer, at_s=100.0, **fields)
