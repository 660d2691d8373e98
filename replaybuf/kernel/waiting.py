"""Answers to a trainer or producer that has to wait: the reason, what is there, what is missing, who has to act."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from replaybuf.kernel.failed_rule import explain_exceeded
from replaybuf.kernel.state import RunState
from replaybuf.wire.contract import REASONS, RETRY_AFTER_S, Amount, WaitingAnswer

BLOCKED_ON = dict.fromkeys(REASONS, "producers") | {
    "finished": "nothing",
    "paused": "operator",
    "awaiting_ack": "trainer",
    "awaiting_publication": "trainer",
}


def nearest(waits: Mapping[str, WaitingAnswer]) -> WaitingAnswer:
    """Return the answer of the adapter nearest to a batch: by its reason, then by the share of groups it has."""
    return max(waits.values(), key=lambda one: (REASONS.index(one.reason), one.have.groups / max(1, one.need.groups)))


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
    blocked_on = blocked_on or BLOCKED_ON[reason]
    if detail is None and reason == state.config_state:
        detail = None if state.config_reason in ("operator", "prompts") else state.config_reason
    elif detail is None and blocked_on == "producers":
        detail = explain_exceeded(state)
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
