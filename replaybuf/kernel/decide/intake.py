"""Decide what may come in: tickets for producers, and room for groups.

The strategy says how many groups producers may start; the limits on live groups bound them. The groups that the next
batch lacks may come in spite of the limits. Pure: time comes in as `now_s`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from replaybuf.errors import NoRoom
from replaybuf.kernel.decide.config import config_of
from replaybuf.kernel.decide.prompts import may_reissue
from replaybuf.kernel.state.limits import Load
from replaybuf.kernel.state.run_state import RunState
from replaybuf.kernel.state.tickets import TicketBook, TicketChange
from replaybuf.kernel.strategy.answer_checks import check_rules
from replaybuf.kernel.strategy.inputs import SAMPLED_GROUPS
from replaybuf.kernel.strategy.selection import Selector
from replaybuf.kernel.strategy.waiting_answer import waiting, waits_for_groups
from replaybuf.wire.config import LARGEST_INTEGER, Limits
from replaybuf.wire.contract import TICKETS_AT_ONCE, Amount, WaitingAnswer

NO_LOAD = Load()


def decide_tickets(
    state: RunState, book: TicketBook, selector: Selector, adapter: str, count: int, now_s: float
) -> TicketChange | WaitingAnswer:
    """Issue up to `count` tickets from the book, or answer why there are none. Raises `StrategyFault`."""
    if state.phase != "running":
        return waiting(state.phase, count_held(state, selector, adapter), state)
    if (phase := selector.config.phase_of(adapter)) != "running":
        detail = f"adapter {adapter} {'is paused' if phase == 'paused' else 'was removed'}"
        return waiting(phase, count_held(state, selector, adapter), state, detail=detail)
    if book.prompts_exhausted(adapter):
        # No prompt is left, but a ticket that is out may come back, and a live group may become too stale.
        blocked_on = "producers" if book.out_of(adapter) else "nothing"
        if blocked_on == "nothing" and may_reissue(selector.config) and state.pool.live.totals(adapter).fresh:
            blocked_on = "trainer"
        return waiting("finished", count_held(state, selector, adapter), state, blocked_on=blocked_on)
    capacity = _capacity(state, book, selector, adapter)
    if capacity < 1:
        return _rate_limited(state, book, selector, adapter, now_s)
    return book.issue(adapter, min(count, capacity, TICKETS_AT_ONCE), state.generation, now_s)


def count_held(state: RunState, selector: Selector, adapter: str) -> Amount:
    """Count live groups plus tickets out, and live tokens, of an adapter."""
    view = selector.inputs.view(state.next_step, adapter=adapter)
    return Amount(view.groups_live + view.tickets_out, view.tokens_live)


def has_limits(limits: Limits) -> bool:
    """Return whether a run bounds its live groups, or their bytes in memory."""
    return (limits.max_tokens_live, limits.max_bytes_live, limits.max_bytes_in_memory) != (None, None, None)


def decide_room(
    state: RunState, selector: Selector, coming: Sequence[Load], entering: Load = NO_LOAD, in_memory: int = 0
) -> tuple[int, NoRoom | None]:
    """Return how many of the first groups fit under the limits, and the `NoRoom` that stops the next one or None.

    `entering`: groups that were let in and are not in the index yet. `in_memory`: bytes of frames in Redis.
    """
    limits = config_of(state).limits
    if not has_limits(limits):
        return len(coming), None
    totals = state.pool.live.totals()
    live = Load(0, totals.tokens, totals.frame_bytes, in_memory) + entering

    def lacking() -> int:
        return sum(_lacking(selector, name) for name in selector.config.adapter_names) - entering.groups

    return count_fitting(live, coming, limits, lacking)


def count_fitting(
    held: Load, coming: Sequence[Load], limits: Limits, lacking: Callable[[], int]
) -> tuple[int, NoRoom | None]:
    """Return how many of the first groups of `coming` fit beside `held`, and the error for the next one.

    An empty load always fits. `lacking` returns how many groups the next batch waits for; called once, at a bound.
    """
    wanted: int | None = None
    entered = 0
    for position, load in enumerate(coming):
        if not load.groups:
            continue
        held += load
        if refusal := held.over(limits):
            wanted = lacking() if wanted is None else wanted
            if entered >= wanted:
                return position, refusal
        entered += 1
    return len(coming), None


def _capacity(state: RunState, book: TicketBook, selector: Selector, adapter: str) -> int:
    """Return how many more groups of an adapter producers may start now."""
    flow, strategy = selector.inputs.flow(), selector.strategy

    def checked() -> int:
        admitted = strategy.admit(selector.inputs.view(state.next_step, adapter=adapter), flow)
        whole = isinstance(admitted, int | np.integer) and admitted >= 0
        rule = "admits a whole number of groups, 0 or more"
        check_rules(selector.config.strategy.name, state.next_step, [(rule, whole, repr(admitted))])
        return int(admitted)

    capacity = selector.ask("admit", checked)
    granted = min(capacity, _room(state, book, selector))
    if granted < 1 <= capacity:  # the next batch can be filled in spite of the limits
        granted = min(capacity, _lacking(selector, adapter) - book.out_of(adapter))
    return max(0, granted)


def _room(state: RunState, book: TicketBook, selector: Selector) -> int:
    """Return how many more groups of mean size fit below the limits on live groups, besides the tickets out."""
    limits, live = selector.config.limits, state.pool.live.totals()
    room = float(LARGEST_INTEGER)
    if limits.max_tokens_live is not None:
        room = (limits.max_tokens_live - live.tokens) / selector.inputs.tokens_per_group()
    if limits.max_bytes_live is not None:
        recent = state.index["frame_bytes"][-SAMPLED_GROUPS:]
        mean = max(1.0, float(recent.mean())) if len(recent) else limits.max_group_bytes
        room = min(room, (limits.max_bytes_live - live.frame_bytes) / mean)
    return math.floor(room) - book.out


def _lacking(selector: Selector, adapter: str) -> int:
    """Return how many groups of an adapter the next batch waits for, at least 1; 0 if it waits for none of them."""
    waits = selector.why_waiting()
    if waits and adapter and waits_for_groups(waits):  # the nearest does; this one may not
        waits = selector.why_adapter_waits(adapter)
    if waits is None or not waits_for_groups(waits):
        return 0
    # With a cooldown or a rate limit, the missing number is unknown: admit one group at a time.
    have = selector.usable_amount(adapter) if waits.reason in ("rate_limited", "reuse_exhausted") else waits.have
    groups = waits.need.groups - have.groups
    tokens = (waits.need.tokens - have.tokens) / selector.inputs.tokens_per_group()
    return max(1, groups, math.ceil(tokens))


def _rate_limited(state: RunState, book: TicketBook, selector: Selector, adapter: str, now_s: float) -> WaitingAnswer:
    """Explain a lack of capacity: `blocked_on` is `producers` if the trainer waits for groups, else `trainer`.

    In the first case tickets out, or groups without their columns, use the capacity, else those for the trainer.
    """
    have, oldest_s, waits = count_held(state, selector, adapter), book.oldest_deadline_s(adapter), None
    if oldest_s is not None or selector.inputs.plugins.all_required:
        waits = selector.why_adapter_waits(adapter) if adapter else selector.why_waiting()
    if waits and waits.reason == "awaiting_columns":
        return waiting("rate_limited", have, state, blocked_on="producers", detail=waits.detail)
    if oldest_s is None or waits is None or not waits_for_groups(waits):
        return waiting("rate_limited", have, state, blocked_on="trainer")
    left_s = max(0.0, oldest_s - now_s)
    detail = f"tickets out: {book.out_of(adapter)}; the oldest expires in {left_s:.0f} s"
    return waiting("rate_limited", have, state, blocked_on="producers", detail=detail)
