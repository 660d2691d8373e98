"""Calls that show runs at a glance: the overview of all runs, the flow of one run, figures over its steps."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.responses import Response

from replaybuf import report
from replaybuf.kernel.figures.step_figures import StepRow, stands_still
from replaybuf.kernel.rows.index import IN_BATCHES, LIVE
from replaybuf.kernel.state.lookups import explain_failed_share
from replaybuf.service.http.body.requests import Number, number, optional_number
from replaybuf.service.http.call.handlers import json_response, run_of, service_of
from replaybuf.service.http.call.visible_runs import list_runs, list_unreadable
from replaybuf.service.report.status import coverage
from replaybuf.service.run.served_run import Run
from replaybuf.service.turns import in_turns
from replaybuf.version import __version__
from replaybuf.wire.answer.evaluations import MOST_LISTED
from replaybuf.wire.answer.overview import Flow, History, Overview, RunRow, ShownChange, VersionCounts

REWARDS = 40
"""Newest rows whose rewards a sparkline shows."""
RATE_ROWS = 16
"""Newest acked rows that the rate of trained tokens covers."""
VERSIONS = 12
"""Newest versions that are counted each; older ones are counted together."""
FROM_STEP = Number("from_step")
TO_STEP = Number("to_step")
POINTS = Number("points", 500, 1, 4096)
HISTORY_PARAMETERS = (FROM_STEP, TO_STEP, POINTS)
_PLAIN = tuple(name for name in StepRow.__struct_fields__ if name not in ("dropped", "waited", "metrics"))


async def get_overview(request: Request) -> Response:
    """Show every run in one row."""
    service = service_of(request)
    answer = Overview(
        now_s=service.clock.wall(),
        version=__version__,
        durability=service.report.durability if service.report else "unknown",
        runs=[describe_row(run) async for _, run in in_turns(list_runs(request))],
        unreadable=list_unreadable(request),
    )
    return json_response(answer)


async def get_flow(request: Request) -> Response:
    """Show the flow of a run with live numbers."""
    run = await run_of(request)
    return json_response(describe_flow(run))


async def get_history(request: Request) -> Response:
    """Show figures of a run over its steps."""
    run = await run_of(request)
    first, last = optional_number(request, FROM_STEP), optional_number(request, TO_STEP)
    rows = run.state.figures.between(first, last, number(request, POINTS))
    return json_response(describe_history(run, rows))


async def get_report(request: Request) -> Response:
    """Return the report of a run as one HTML file."""
    run = await run_of(request)
    history = describe_history(run, run.state.figures.between(None, None, report.POINTS))
    listed = await run.evaluations.list_newest(MOST_LISTED)
    page = await asyncio.to_thread(report.render, run.describe(), history, listed.evaluations)
    # A saved file shows no more than it does here: no script of it runs, and it asks for nothing.
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return Response(page, headers={"Content-Security-Policy": policy}, media_type="text/html; charset=utf-8")


def describe_row(run: Run) -> RunRow:
    """Describe a run in one row."""
    state, presence, measured = run.state, run.journal.presence, run.measured
    waits = run.state_cache.waits().run
    live, rows = state.pool.live.totals(), state.figures.rows
    idle_s = _age(run, max(rows[-1].at_s, rows[-1].acked_s)) if rows else None
    still = state.phase == "running" and stands_still(idle_s, rows[-RATE_ROWS:])
    trains = state.phase == "running" and not still and measured.steps_per_s > 0
    return RunRow(
        run=run.name,
        state=state.phase,
        paused_reason=state.phase_reason if state.config_phase == "paused" else None,
        strategy=run.journal.config.strategy.name,
        step=state.step,
        max_steps=run.journal.config.max_steps,
        published_version=state.published[""],
        tokens_per_s=_trained_tokens_per_s(rows[-RATE_ROWS:]) if trains else 0.0,
        groups_per_s=measured.groups_per_s,
        steps_per_s=measured.steps_per_s,
        groups_live=live.groups,
        tokens_live=live.tokens,
        dead_lettered=state.totals.dead_lettered.total(),
        rewards=[round(row.reward_mean, 5) for row in rows[-REWARDS:]],
        staleness=rows[-1].staleness if rows else None,
        waiting=waits and presence.explain(waits),
        waiting_s=run.state_cache.waiting_s(),
        idle_s=idle_s,
        trainer_last_seen_s=presence.trainer_s if state.epoch else None,
        producers_last_seen_s=presence.producers_s,
        producers_known=presence.producers_known,
        producers_gone=len(presence.producers.list_gone()),
        producers_without_engine=presence.producers.count_without_engine(),
        alarm=explain_failed_share(state),
        stands_still=still,
        leader=run.journal.leader_url,
    )


def describe_flow(run: Run) -> Flow:
    """Describe where the groups of a run are, and how fast they move."""
    state, measured = run.state, run.measured
    arrivals, rows = state.index["arrival_s"], state.figures.rows
    versions = count_versions(state.index["policy_version"], state.index["state"])
    return Flow(
        now_s=run.journal.clock.wall(),
        row=describe_row(run),
        tickets_out=run.book.out,
        group_s=measured.group_s,
        step_s=measured.step_s,
        versions=versions,
        ledger_entries=state.entries,
        waited_s={
            reason: round(seconds, 3) for reason, seconds in sorted(run.batches.waits.total_s.items()) if seconds
        },
        step_waited_s=run.batches.waits.of_step_s(),
        step_dropped=state.figures.pending,
        coverage=coverage(state, run.book, run.journal.presence.sources),
        reuse=state.totals.histograms.reuse_figures(),
        stored_s=_age(run, float(arrivals[-1])) if len(arrivals) else None,
        batch_s=_age(run, rows[-1].at_s) if rows else None,
        ack_s=_age(run, max(row.acked_s for row in rows[-RATE_ROWS:])) if rows else None,
    )


def count_versions(oldest: npt.NDArray[np.int32], states: npt.NDArray[np.uint8]) -> list[VersionCounts]:
    """Count the groups of the buffer by version of their `oldest` token, newest first; [rows] each."""
    versions = [oldest[states == code] for code in (LIVE, IN_BATCHES)]
    newest = max((int(each.max()) for each in versions if len(each)), default=0)
    # Not `np.unique`, which sorts: it takes 60 ms for a million groups, this takes 10.
    counts = [np.bincount(np.minimum(newest - each, VERSIONS), minlength=VERSIONS + 1).tolist() for each in versions]
    listed = [VersionCounts(newest - age, *pair) for age, pair in enumerate(zip(*counts, strict=True)) if any(pair)]
    if listed and any(count[VERSIONS] for count in counts):
        listed[-1] = VersionCounts(None, listed[-1].live, listed[-1].in_batches)
    return listed


def describe_history(run: Run, rows: Sequence[StepRow]) -> History:
    """Turn rows into columns, with rates between neighbours."""
    columns = {name: [getattr(row, name) for row in rows] for name in _PLAIN}
    columns["acked_s"] = [row.acked_s or None for row in rows]
    columns["length"] = [row.tokens / row.rollouts if row.rollouts else None for row in rows]
    columns["tokens_out_per_s"], columns["tokens_in_per_s"], columns["step_s"] = _rates(rows)
    all_rows, metrics = run.state.figures.rows, run.state.figures.metrics
    return History(
        now_s=run.journal.clock.wall(),
        first_step=all_rows[0].step if all_rows else None,
        last_step=all_rows[-1].last if all_rows else None,
        columns=columns,
        dropped=_by_reason([row.dropped for row in rows]),
        waited=_by_reason([row.waited for row in rows]),
        metrics=metrics.columns([row.metrics for row in rows]),
        metrics_missing=metrics.missing,
        metrics_left_out=metrics.left_out,
        changes=[ShownChange(*msgspec.structs.astuple(change)) for change in run.state.figures.changes.newest],
    )


def _by_reason(counted: Sequence[Mapping[str, float]]) -> dict[str, list[Any]]:
    """Turn numbers by reason of each row into one column per reason."""
    reasons = sorted({reason for counts in counted for reason in counts})
    return {reason: [round(counts.get(reason, 0), 3) for counts in counted] for reason in reasons}


def _rates(rows: Sequence[StepRow]) -> tuple[list[float | None], list[float | None], list[float | None]]:
    """Return tokens trained and stored per second, and seconds per step, [rows] each; the first row has none."""
    trained: list[float | None] = [None] * len(rows)
    stored, step_s = list(trained), list(trained)
    for place, (before, row) in enumerate(itertools.pairwise(rows), 1):
        made_s, acked_s = row.at_s - before.at_s, row.acked_s - before.acked_s
        if made_s > 0:
            stored[place] = row.tokens_in * row.steps / made_s
        if before.acked_s and row.acked_s and acked_s > 0:
            trained[place], step_s[place] = row.tokens * row.steps / acked_s, acked_s / row.steps
    return trained, stored, step_s


def _trained_tokens_per_s(rows: Sequence[StepRow]) -> float:
    acked = [row for row in rows if row.acked_s]
    seconds = acked[-1].acked_s - acked[0].acked_s if len(acked) > 1 else 0.0
    return sum(row.tokens * row.steps for row in acked[1:]) / seconds if seconds > 0 else 0.0


def _age(run: Run, at_s: float) -> float | None:
    """Return the seconds since a time of this server's clock; None = never."""
    return round(max(0.0, run.journal.clock.wall() - at_s), 3) if at_s else None
