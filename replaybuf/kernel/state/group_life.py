"""The life of a group as moments in order: ticket, stored, each batch, trained, published, dropped or freed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from replaybuf.kernel.figures.step_figures import StepRow
from replaybuf.kernel.rows.index import DEAD, EVICTED, Index
from replaybuf.kernel.state.lookups import find_group_state
from replaybuf.kernel.state.run_state import RunState
from replaybuf.wire.answer.browse import LifeMoment


def describe_life(
    state: RunState,
    number: int,
    adapter: str,
    steps: Sequence[int],
    *,
    versions: tuple[int, int, int],
    stored_s: float,
    ticket_s: float | None,
) -> list[LifeMoment]:
    """Describe the life of group `number`, which the batches of `steps` used.

    `versions`: oldest and newest of its tokens, and the published one when it was stored. A moment without a time is
    one that the service did not see or keeps no longer.
    """
    oldest, newest, published = versions
    moments = [LifeMoment(what="ticket", at_s=ticket_s)] if ticket_s else []
    moments.append(LifeMoment(what="sampled", version=oldest, until_version=newest if newest != oldest else None))
    moments.append(LifeMoment(what="stored", at_s=stored_s or None, version=published))
    for step in steps:
        moments += _use(state, step, adapter)
    place, reason = find_group_state(state, number)
    if place in ("evicted", "dead_lettered"):
        at_s, version = _dropped(state.index, number)
        moments.append(LifeMoment(what=place, at_s=at_s, version=version, reason=reason))
    if place == "retired":
        freed = state.figures.moments.freeing_of(number, max(steps)) if steps else None
        moments.append(LifeMoment(what="freed", at_s=freed.at_s if freed else None))
    return moments


def _use(state: RunState, step: int, adapter: str) -> Iterator[LifeMoment]:
    """Yield one use: the batch, its ack, and the publication that followed."""
    row = _row_of(state, step)
    version = _trained_version(state, step, adapter)
    yield LifeMoment(what="batch", at_s=row.at_s or None if row else None, step=step, version=version)
    if step >= state.step:
        return
    yield LifeMoment(what="trained", at_s=row.acked_s or None if row else None, step=step, version=version)
    published = state.figures.moments.publication_after(adapter, step, version)
    if published:
        yield LifeMoment(what="published", at_s=published.at_s, version=published.version)


def _row_of(state: RunState, step: int) -> StepRow | None:
    """Return the figures of one step; None if they are merged with those of others."""
    row = state.figures.row_of(step)
    return row if row and row.steps == 1 else None


def _trained_version(state: RunState, step: int, adapter: str) -> int | None:
    """Return the version that the step trains; None for a named adapter whose batch is freed."""
    if adapter or (state.config and state.config.adapters):
        return state.version_at(step, adapter) if step in state.batches else None
    return state.config.version_of(step) if state.config else None


def _dropped(index: Index, number: int) -> tuple[float | None, int | None]:
    """Return when a group was dropped and the version of the policy then, as far as the index has them."""
    rows = index.rows_of([number])
    if not len(rows) or index["state"][rows[0]] not in (EVICTED, DEAD) or index["evicted_age_ms"][rows[0]] < 0:
        return None, None
    at_s = float(index["arrival_s"][rows[0]]) + int(index["evicted_age_ms"][rows[0]]) / 1000
    return at_s, int(index["evicted_version"][rows[0]])
