"""What the service answers: state, waiting, records, as JSON-ready objects. Pure views of a run's state."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from replaybuf.config import RunConfig
from replaybuf.flow import TicketBook
from replaybuf.index import EVICTED, IN_BATCHES, LIVE
from replaybuf.ledger import BatchRecord
from replaybuf.service.assembly import Assembled
from replaybuf.state import RunState

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
RETRY_AFTER_S = 0.5


class Amount(msgspec.Struct, frozen=True):
    """Groups and tokens; 0 where nothing of the kind is needed."""

    groups: int
    tokens: int


class WaitingAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Why there is no batch or no ticket, what is there, what is needed, who is waited for."""

    reason: str
    have: Amount
    need: Amount
    blocked_on: str
    status: str = "waiting"
    retry_after_s: float = RETRY_AFTER_S


def waiting(reason: str, have: Amount, config: RunConfig, *, blocked_on: str | None = None) -> WaitingAnswer:
    """Build the answer for a batch (or ticket) that has to wait."""
    groups = config.batch.groups_per_batch
    need = Amount(groups, 0) if groups is not None else Amount(0, config.batch.tokens_per_batch or 0)
    return WaitingAnswer(reason=reason, have=have, need=need, blocked_on=blocked_on or BLOCKED_ON[reason])


def run_state(
    run: str,
    state: RunState,
    book: TicketBook,
    config: dict[str, Any],
    *,
    durability: str,
    rejected: dict[str, int],
    waits: WaitingAnswer | None,
) -> dict[str, Any]:
    """Render `GET /v1/runs/{run}`."""
    counts = group_counts(state)
    return {
        "run": run,
        "state": state.state,
        "paused_reason": state.config_reason if state.config_state == "paused" else None,
        "strategy": config["strategy"],
        "durability": durability,
        "epoch": state.epoch,
        "generation": state.generation,
        "step": state.step,
        "published_version": state.published[""],
        "groups": counts | {"rejected": rejected},
        "tokens": {"live": state.live_tokens()},
        "tickets": {
            "issued": book.counts["issued"],
            "out": book.out,
            "expired": book.counts["expired"],
            "returned": book.counts["returned"],
            "failed": len(state.failed_prompts),
        },
        "staleness": {str(age): number for age, number in sorted(state.used_staleness.items())},
        "waiting": waits,
        "adapters": {},
        "checkpoints": state.checkpoints,
        "oldest_step": state.oldest_step,
        "config": config,
    }


def group_counts(state: RunState) -> dict[str, Any]:
    """Count groups by where they stand: stored = live + in_batches + retired + sum(evicted) + dead_lettered."""
    by_state = np.bincount(state.index["state"], minlength=EVICTED + 1)
    return {
        "stored": state.stored,
        "live": int(by_state[LIVE]),
        "in_batches": int(by_state[IN_BATCHES]),
        "retired": state.retired,
        "evicted": {reason: number for reason, number in sorted(state.evicted.items()) if number},
        "dead_lettered": state.dead_lettered.total(),
    }


def batch_record(run: str, record: BatchRecord, standing: str, packed: Assembled | None) -> dict[str, Any]:
    """Render a batch record. `packed` gives the packing figures; without it (voided or freed) they are null."""
    placed = sum(packed.padded_rows()) if packed else 0
    return {
        "run": run,
        "step": record.step,
        "generation": record.generation,
        "batch_id": record.batch_id,
        "digest": record.digest,
        "state": standing,
        "version": record.version,
        "strategy": record.strategy,
        "options": record.options,
        "seed": record.seed,
        "tokens": record.tokens,
        "rollouts": record.rollouts,
        "padding_fraction": 1.0 - packed.tokens / placed if packed else None,
        "micro_batches": packed.micro_batches if packed else None,
        "dp_world_size": packed.layout.dp_world_size if packed else None,
        "groups": [
            {
                "group_id": entry.group_id,
                "prompt_id": entry.prompt_id,
                "prompt_index": entry.prompt_index,
                "adapter": entry.adapter,
                "policy_version": entry.policy_version,
                "staleness": entry.staleness,
                "times_sampled": entry.times_sampled,
                "tokens": entry.tokens,
            }
            for entry in record.groups
        ],
    }
