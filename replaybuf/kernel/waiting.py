"""Answers to a trainer or producer that has to wait: the reason, what is there, what is missing, who has to act."""

from __future__ import annotations

from collections.abc import Mapping

from replaybuf.wire.config import RunConfig
from replaybuf.wire.contract import REASONS, RETRY_AFTER_S, Amount, WaitingAnswer

BLOCKED_ON = {
    "finished": "nothing",
    "paused": "operator",
    "awaiting_ack": "trainer",
    "awaiting_publication": "trainer",
    "rate_limited": "producers",
    "all_stale": "producers",
    "reuse_exhausted": "producers",
    "no_producers": "producers",
    "no_groups": "producers",
    "too_few_groups": "producers",
    "too_few_tokens": "producers",
}


def own_waiting(reason: str, have: Amount, adapter: str, lacking: int) -> WaitingAnswer:
    """Build the answer for an adapter whose own batch lacks so many groups."""
    return WaitingAnswer(
        reason=reason,
        have=have,
        need=Amount(lacking, 0),
        blocked_on=BLOCKED_ON[reason],
        retry_after_s=RETRY_AFTER_S,
        adapter=adapter,
    )


def nearest(waits: Mapping[str, WaitingAnswer]) -> WaitingAnswer:
    """Choose the adapter that is nearest to a batch: by its reason, then by the share it has of what it needs."""
    return max(waits.values(), key=lambda one: (REASONS.index(one.reason), one.have.groups / max(1, one.need.groups)))


def waiting(
    reason: str,
    have: Amount,
    config: RunConfig,
    *,
    blocked_on: str | None = None,
    detail: str | None = None,
) -> WaitingAnswer:
    """Build the answer for a batch (or ticket) that has to wait."""
    groups = config.batch.groups_per_batch
    need = Amount(groups, 0) if groups is not None else Amount(0, config.batch.tokens_per_batch or 0)
    return WaitingAnswer(
        reason=reason,
        have=have,
        need=need,
        blocked_on=blocked_on or BLOCKED_ON[reason],
        retry_after_s=RETRY_AFTER_S,
        detail=detail,
    )
