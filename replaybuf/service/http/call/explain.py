"""The call that explains a batch: what it was chosen from, in which order, and how it is packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from replaybuf.errors import NotFound
from replaybuf.kernel.state.lookups import entry_of_batch, find_batch_status
from replaybuf.service.bodies.explanation import explain_record
from replaybuf.service.http.body.requests import GENERATION, STEP, Number, number, optional_number
from replaybuf.service.http.call.handlers import json_response, run_of
from replaybuf.service.report.candidates import arrivals_between, count_candidates, layout_of
from replaybuf.service.run.served_run import Run
from replaybuf.service.turns import call_beside
from replaybuf.wire.answer.explain import Arrivals, BatchExplanation, Candidates, Choice, Packing, ShownLayout
from replaybuf.wire.ledger import BatchRecord

SHOWN = Number("limit", 20, 0, 1000)
"""Groups that the answer lists, in the order of the strategy."""

_NOT_COUNTED = "candidates: the counts of this batch are not kept; a backup does not hold them"
_NOT_COMPARED = "since_last_batch: the counts of the batch before are trimmed, or were never taken"
_NO_TRAINER = "packing: no trainer is attached, and the layout of then was not recorded"
_NO_PACKING = "packing: the index entries of {} of {} groups are trimmed"


async def get_explanation(request: Request) -> Response:
    """Explain why a batch has these groups."""
    run = await run_of(request)
    step, generation = number(request, STEP), optional_number(request, GENERATION)
    return json_response(await explain_batch(run, step, generation, number(request, SHOWN)))


async def explain_batch(run: Run, step: int, generation: int | None, shown: int) -> BatchExplanation:
    """Explain the batch of `step`, or why the next one is not assembled. Raises `NotFound`, and `Gone` once trimmed."""
    if generation is None and step == run.state.next_step:
        return await _explain_next(run)
    try:
        entry = entry_of_batch(run.state, step, generation)
    except NotFound as error:
        if generation is not None or step < run.state.next_step:
            raise
        detail = f"step {step} is not assembled, and step {run.state.next_step} comes first; explain that one"
        raise NotFound(detail, name="step", value=step, bound=run.state.next_step) from error
    record = await run.journal.batch_record(entry)
    status = find_batch_status(run.state, step, entry)
    candidates = await run.journal.store.ledger.read_candidates(run.name, entry, 2)
    own = candidates.pop(0)[1] if candidates and candidates[0][0] == entry else None
    unknown: list[str] = [] if own else [_NOT_COUNTED]
    since = _since_last(run, entry, own, candidates)
    if own and since is None:
        unknown.append(_NOT_COMPARED)
    layout, when = _layout(run, own, retained=status == "assembled")
    choice, packing = await _describe(run, record, shown, layout, when, unknown)
    return BatchExplanation(
        run=run.name,
        step=step,
        generation=record.generation,
        state=status,
        version=record.version,
        strategy=record.strategy,
        options=record.options,
        filters=own.filters if own else [],
        seed=record.seed,
        short=record.short,
        candidates=own.adapters if own else {},
        since_last_batch=since,
        choice=choice,
        packing=packing,
        unknown=unknown,
    )


async def _explain_next(run: Run) -> BatchExplanation:
    state, selector, step = run.state, run.selector, run.state.next_step
    config = run.journal.config
    before = await run.journal.store.ledger.read_candidates(run.name, None, 1)
    waits = run.state_cache.waits().run
    if waits:
        waits = run.journal.presence.name_missing(waits, attached=state.epoch > 0)
    now = count_candidates(state, selector, run.side_state.rejected)
    since = _since_last(run, state.entries + 1, now, before)
    return BatchExplanation(
        run=run.name,
        step=step,
        generation=state.generation,
        state="waiting" if waits else "ready",
        waiting=waits,
        version=0 if config.adapters else config.version_of(step),
        strategy=config.strategy.name,
        options=config.strategy.options,
        filters=now.filters,
        seed=selector.inputs.seed(step),
        candidates=now.adapters,
        since_last_batch=since,
        unknown=[] if since else [_NOT_COMPARED],
    )


def _since_last(
    run: Run, entry: int, own: Candidates | None, earlier: Sequence[tuple[int, Candidates]]
) -> Arrivals | None:
    """Return what happened between the batch before ledger entry `entry` and this one; None = unknown.

    `earlier`: the counts before, if there are any. They may be of an older batch than the last one.
    """
    last = max((batch.entry for batch in run.state.records.values() if batch.entry < entry), default=0)
    if own is None or (not earlier and (last or run.state.trimmed_entries)) or (earlier and earlier[0][0] < last):
        return None
    return arrivals_between(earlier[0][1] if earlier else None, own)


def _layout(
    run: Run, own: Candidates | None, *, retained: bool
) -> tuple[ShownLayout | None, Literal["assembled", "attached"]]:
    """Return the layout to show, and whose it is: an unacked batch is packed for the trainer that is attached now."""
    if own and own.layout and not retained:
        return own.layout, "assembled"
    return layout_of(run.state.attachment), "attached"


async def _describe(
    run: Run,
    record: BatchRecord,
    shown: int,
    layout: ShownLayout | None,
    when: Literal["assembled", "attached"],
    unknown: list[str],
) -> tuple[Choice, Packing | None]:
    numbers = record.numbers.tolist()
    entries = await run.journal.store.groups.read_entries(run.name, numbers)
    if layout is None or len(entries) < len(numbers):
        gone = len(numbers) - len(entries)
        unknown.append(_NO_PACKING.format(gone, len(numbers)) if layout else _NO_TRAINER)
        layout = None
    return await call_beside(len(numbers), explain_record, record, entries, shown, layout, when)
