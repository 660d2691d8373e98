"""Answers to a trainer or producer that has to wait: the reason, what is there, what is missing, who has to act.

`BatchTimeout`: after `batch.timeout_s` the next batch of a trainer that waits may be short.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from replaybuf.kernel.state.lookups import explain_failed_share
from replaybuf.kernel.state.run_state import RunState
from replaybuf.wire.contract import RETRY_AFTER_S, Amount, WaitingAnswer
from replaybuf.wire.wait_reasons import REASONS, WAIT_REASONS


def nearest(waits: Mapping[str, WaitingAnswer]) -> WaitingAnswer:
    """Return the answer of the adapter nearest to a batch: by its reason, then by the share of groups it has."""
    return max(
        waits.values(), key=lambda wait: (REASONS.index(wait.reason), wait.have.groups / max(1, wait.need.groups))
    )


def waits_for_groups(answer: WaitingAnswer) -> bool:
    """Return whether producers have to bring groups; groups that lack columns wait for a stage."""
    return answer.blocked_on == "producers" and answer.reason != "awaiting_columns"


def name_columns(answer: WaitingAnswer, lacking: Amount, required: Sequence[str]) -> WaitingAnswer:
    """Add to an answer how many groups lack columns, and which columns they need."""
    detail = f"groups that lack columns: {lacking.groups}; required: {', '.join(required)}"
    return msgspec.structs.replace(answer, detail=detail)


def waiting(
    reason: str,
    have: Amount,
    state: RunState,
    *,
    adapter: str = "",
    missing: int = 0,
    blocked_on: str | None = None,
    detail: str | None = None,
) -> WaitingAnswer:
    """Build the answer for a batch or ticket that has to wait; of an adapter whose batch needs `missing` groups."""
    blocked_on = blocked_on or WAIT_REASONS[reason].blocked_on
    if detail is None and reason == state.config_phase:
        detail = None if state.phase_reason in ("operator", "prompts") else state.phase_reason
    elif detail is None and blocked_on == "producers":
        detail = explain_failed_share(state)
    groups = missing if adapter or state.config is None else state.config.batch.groups_per_batch
    return WaitingAnswer(
        reason=reason,
        have=have,
        need=Amount(0, state.token_budget or 0) if groups is None else Amount(groups, 0),
        blocked_on=blocked_on,
        retry_after_s=RETRY_AFTER_S,
        adapter=adapter,
        detail=detail,
    )


class BatchTimeout:
    """The wait of the attached trainer for its next unacked step; the caller passes a time that does not jump.

    A request for a later step is a prefetch: the trainer is busy, so its time does not count. Nor does time in which
    the step waits for the trainer itself or for an operator.
    """

    def __init__(self) -> None:
        self._asked: tuple[int, int, int] | None = None
        self._since_s = 0.0

    def record(self, state: RunState, step: int, waits: WaitingAnswer, now_s: float) -> None:
        """Record that the answer to a request for `step` was to wait; the first such answer starts the time."""
        if step != state.step:
            return
        asked = (state.epoch, state.generation, step)
        if waits.blocked_on != "producers":
            self._asked = None
        elif self._asked != asked:
            self._asked, self._since_s = asked, now_s

    def left_s(self, state: RunState, step: int, now_s: float) -> float | None:
        """Return the seconds until the batch of `step` may be short, 0 = it may be; None = no time-out is coming."""
        timeout_s = state.config.batch.timeout_s if state.config else None
        if timeout_s is None or step != state.step or self._asked != (state.epoch, state.generation, step):
            return None
        return max(0.0, self._since_s + timeout_s - now_s)
