"""Lookups in the state of a run: where a group is, which steps used it, its ledger entries, its failed prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from replaybuf.errors import Gone, NotFound
from replaybuf.kernel.rows.index import DEAD, EVICTED
from replaybuf.kernel.state.failed_prompts import FAILED_SHARE, FailedShare
from replaybuf.kernel.state.pool import PURGED, RETIRED
from replaybuf.kernel.state.run_state import RunState

GroupState = Literal["live", "in_batches", "evicted", "dead_lettered", "retired"]
GROUP_STATES: tuple[GroupState, ...] = get_args(GroupState)
"""State of a group by the state of its index row; a freed row was retired, or evicted before."""


def find_group_state(state: RunState, number: int) -> tuple[GroupState, str | None]:
    """Return the state of group `number`, one of `GROUP_STATES`, and the reason of a drop.

    Raises `Gone` for a freed group whose history is trimmed.
    """
    if number > state.stored:
        return "live", None  # stored, but not folded yet
    rows = state.index.rows_of([number])
    if len(rows):
        row_state = int(state.index["state"][rows[0]])
        reason = state.pool.reasons[state.index["reason"][rows[0]]] if row_state in (EVICTED, DEAD) else None
        return GROUP_STATES[row_state], reason
    if number <= state.trimmed:
        detail = f"group number {number} was freed; history is trimmed up to number {state.trimmed}"
        raise Gone(detail, name="number", value=number, bound=state.trimmed)
    code = state.pool.freed_as[number - state.trimmed]
    reason = state.pool.reasons[code & ~PURGED]
    if reason == RETIRED:
        return RETIRED, None
    return ("dead_lettered" if code & PURGED else "evicted"), reason


def list_dead_letters(state: RunState, after: int, limit: int) -> list[int]:
    """List up to `limit` numbers above `after` of dead letters that were not purged, ascending."""
    index = state.index
    numbers: list[int] = index["number"][(index["state"] == DEAD) & (index["number"] > after)][:limit].tolist()
    return numbers


def list_purgeable(state: RunState, limit: int | None = None) -> list[int]:
    """List the first dead letters whose bytes no batch needs that a trainer may ask for again."""
    index = state.index
    purgeable = (index["state"] == DEAD) & (index["last_step"] < state.oldest_step)
    numbers: list[int] = index["number"][purgeable][:limit].tolist()
    return numbers


def steps_by_group(state: RunState, numbers: Sequence[int]) -> dict[int, list[int]]:
    """Return the steps of the current history that used each group, as far back as ledger records are kept.

    Each call reads all kept uses, so ask for a page of groups at once.
    """
    steps: dict[int, list[int]] = {number: [] for number in numbers}
    records = sorted(state.records.items())
    if not records:
        return steps
    used = np.concatenate([record.numbers for _, record in records])
    step_of_use = np.repeat([step for step, _ in records], [len(record.numbers) for _, record in records])
    places = np.isin(used, np.asarray(numbers, np.int64))
    for number, step in zip(used[places].tolist(), step_of_use[places].tolist(), strict=True):
        steps[number].append(step)
    return steps


def find_batch_entry(state: RunState, step: int, generation: int | None = None) -> int | None:
    """Find the ledger entry of the batch of `step`, in the current history or as `generation` had it."""
    record = state.records.get(step)
    if generation is None:
        return record.entry if record else None
    for voided in state.voided.get(step, []):
        if voided.generation <= generation < voided.until_generation:
            return voided.entry
    return record.entry if record and record.generation <= generation <= state.generation else None


def entry_of_batch(state: RunState, step: int, generation: int | None = None) -> int:
    """Return what `find_batch_entry` finds. Raises `NotFound` if that history has no such step, `Gone` once trimmed."""
    entry = find_batch_entry(state, step, generation)
    if entry is None:
        check_record_kept(state, step)
        where = "the current history" if generation is None else f"generation {generation}"
        raise NotFound(f"{where} has no batch of step {step}", name="step", value=step, bound=state.next_step)
    return entry


def find_batch_status(state: RunState, step: int, entry: int) -> Literal["assembled", "acked", "voided"]:
    """Return the status of the batch of `step` at this ledger entry."""
    if find_batch_entry(state, step) != entry:
        return "voided"
    return "assembled" if step in state.batches and not state.batches[step].acked else "acked"


def check_record_kept(state: RunState, step: int) -> None:
    """Raise `Gone` if the record of `step` in the current history is trimmed."""
    oldest = min(state.records, default=state.next_step)
    if 0 <= step < min(oldest, state.next_step):
        detail = f"the record of step {step} is trimmed; the oldest record kept is that of step {oldest}"
        raise Gone(detail, name="step", value=step, bound=oldest)


def read_failed_share(state: RunState) -> FailedShare | None:
    """Return the failed share of the newest prompts; None = the run has no such rule."""
    return None if max_failed_share(state) is None else state.failed.window.read(state.stored)


def explain_failed_share(state: RunState) -> str | None:
    """Describe an exceeded share; None = it is not exceeded, or the run has no such rule."""
    share, most = read_failed_share(state), max_failed_share(state)
    if share is None or most is None or not share.exceeds(most):
        return None
    last = next(reversed(state.failed.newest.values()), None)
    return (
        f"{FAILED_SHARE}: {share.failed} of the last {share.ended} prompts failed; tickets.max_failed_share is "
        f"{most:g}; the last one failed for: {last.reason if last and last.reason else 'no reason given'}"
    )


def max_failed_share(state: RunState) -> float | None:
    """Return the bound of the share; None = the run has no such rule."""
    return state.config.tickets.max_failed_share if state.config else None
