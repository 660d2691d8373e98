"""What the service answers: state, waiting, records, as JSON-ready objects. Pure views of a run's state."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from replaybuf.batch import padded_length
from replaybuf.config import RunConfig
from replaybuf.flow import TicketBook
from replaybuf.index import EVICTED, IN_BATCHES, LIVE
from replaybuf.ledger import BatchRecord
from replaybuf.state import BatchState, RunState

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
    detail: str | None = None


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
        "dead_lettered": state.dead_lettered,
    }


def batch_record(
    run: str, record: BatchRecord, standing: str, rows_per_rank: int, lengths: list[int], ranks: int, seq_len: int
) -> dict[str, Any]:
    """Render a batch record. `lengths` are the padded tokens of every row, empty where the batch is not at hand."""
    placed = sum(lengths)
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
        "padding_fraction": 1.0 - record.tokens / placed if placed else 0.0,
        "bin_unused_fraction": 1.0 - record.tokens / (rows_per_rank * ranks * seq_len) if rows_per_rank else 0.0,
        "micro_batches": rows_per_rank,
        "dp_world_size": ranks,
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


def standing_of(batch: BatchState | None, generation: int, voided: bool, step: int, next_step: int) -> str:
    """Say `assembled`, `acked` or `voided`; a batch that a checkpoint freed was acked."""
    if voided:
        return "voided"
    return "assembled" if batch is not None and not batch.acked else "acked"


def row_lengths(tokens_per_row: list[int], pad_to_multiple_of: int) -> list[int]:
    """Pad the tokens of every row."""
    return [padded_length(tokens, pad_to_multiple_of) for tokens in tokens_per_row]
