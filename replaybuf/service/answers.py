"""What the service answers: state, waiting, records, as JSON-ready objects. Pure views of a run's state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from replaybuf.config import RunConfig
from replaybuf.flow import TicketBook
from replaybuf.group import name_code
from replaybuf.index import EVICTED, IN_BATCHES, LIVE
from replaybuf.ledger import BatchRecord
from replaybuf.service.assembly import Assembled, completed
from replaybuf.state import RunState
from replaybuf.strategy import REASONS
from replaybuf.tallies import KINDS, Coverage, Histogram, Tallies
from replaybuf.turns import Progress

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
    adapter: str | msgspec.UnsetType = msgspec.UNSET
    """Whose part this is about; of a run with adapters only."""
    detail: str | msgspec.UnsetType = msgspec.UNSET
    """What else there is to know, for people."""


def own_waiting(reason: str, have: Amount, adapter: str, lacking: int) -> WaitingAnswer:
    """Build the answer for an adapter whose own batch lacks so many groups."""
    return WaitingAnswer(
        reason=reason, have=have, need=Amount(lacking, 0), blocked_on=BLOCKED_ON[reason], adapter=adapter
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
    detail: str | msgspec.UnsetType = msgspec.UNSET,
) -> WaitingAnswer:
    """Build the answer for a batch (or ticket) that has to wait."""
    groups = config.batch.groups_per_batch
    need = Amount(groups, 0) if groups is not None else Amount(0, config.batch.tokens_per_batch or 0)
    return WaitingAnswer(
        reason=reason, have=have, need=need, blocked_on=blocked_on or BLOCKED_ON[reason], detail=detail
    )


class Buckets(msgspec.Struct, frozen=True):
    """A histogram: how many, their sum, and pairs of a bucket's upper edge (null = above all) and how many are in it.

    Buckets without any are left out.
    """

    count: int
    sum: float
    buckets: list[tuple[float | None, int]]


class DropAges(msgspec.Struct, frozen=True):
    """Dropped groups of one reason by age: policy versions at the step of the drop, seconds since they arrived."""

    age_versions: Buckets
    age_s: Buckets


class Histograms(msgspec.Struct, frozen=True):
    """What became of groups: uses by `times_sampled` and age; lengths of groups stored, used, dropped; drops by reason.

    Lengths are tokens: of the mean rollout of a group, rounded down, and of its longest one.
    """

    times_sampled: dict[str, int]
    age_at_use_s: Buckets
    rollout_tokens: dict[str, Buckets]
    longest_rollout_tokens: dict[str, Buckets]
    dropped: dict[str, DropAges]


class Counted(msgspec.Struct, frozen=True):
    """The part of a run's state that counts what became of groups and prompts."""

    histograms: Histograms
    coverage: Coverage


def histograms(tallies: Tallies) -> Histograms:
    """Tell the tallies of a run, or of one adapter."""
    return Histograms(
        times_sampled={str(times): uses for times, uses in sorted(tallies.reuse.items())},
        age_at_use_s=_buckets(tallies.age_at_use, 1000),
        rollout_tokens={kind: _buckets(tallies.lengths[kind].mean) for kind in KINDS},
        longest_rollout_tokens={kind: _buckets(tallies.lengths[kind].longest) for kind in KINDS},
        dropped={
            reason: DropAges(_buckets(ages.versions), _buckets(ages.ms, 1000))
            for reason, ages in sorted(tallies.drop_ages.items())
            if ages.versions.count
        },
    )


def coverage(state: RunState, book: TicketBook) -> Coverage:
    """Tell what became of a run's prompts, of all adapters together."""
    return state.tallies.coverage(sum(book.next_index.values()), len(state.failed_prompts))


def _buckets(histogram: Histogram, unit: int = 1) -> Buckets:
    edges = [edge / unit if unit > 1 else edge for edge in histogram.edges]
    pairs = zip([*edges, None], histogram.counts, strict=True)
    total = histogram.sum / unit if unit > 1 else histogram.sum
    return Buckets(histogram.count, total, [(edge, count) for edge, count in pairs if count])


class AdapterHeld(msgspec.Struct, frozen=True):
    """What the index has of one adapter: groups by state, tokens of the live ones, what became of all."""

    groups: dict[str, Any]
    tokens_live: int
    histograms: Histograms


class Held(msgspec.Struct, frozen=True):
    """What the index of a run adds up to: groups by state, bytes of the live ones, histograms, all of each adapter."""

    groups: dict[str, Any]
    live_bytes: int
    histograms: Histograms
    adapters: dict[str, AdapterHeld]


def held(state: RunState) -> Held:
    """Add up the index of a run: the one part of its state that takes longer the more groups there are."""
    names = sorted(state.config.adapters) if state.config else []
    adapters = {name: adapter_held(name, state) for name in names}
    return Held(group_counts(state), state.live_bytes(), histograms(state.tallies), adapters)


def run_state(
    run: str,
    state: RunState,
    book: TicketBook,
    config: dict[str, Any],
    holds: Held,
    *,
    durability: str,
    rejected: dict[str, int],
    waits: WaitingAnswer | None,
    adapters_wait: Mapping[str, WaitingAnswer | None],
) -> dict[str, Any]:
    """Render `GET /v1/runs/{run}`."""
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
        "groups": holds.groups | {"rejected": rejected},
        "tokens": {"live": state.live_totals().tokens},
        "bytes": {"live": holds.live_bytes},
        "tickets": {
            "issued": book.counts["issued"],
            "out": book.out,
            "expired": book.counts["expired"],
            "returned": book.counts["returned"],
            "failed": len(state.failed_prompts),
        },
        "staleness": {str(age): number for age, number in sorted(state.used_staleness.items())},
        "histograms": holds.histograms,
        "coverage": coverage(state, book),
        "waiting": waits,
        "adapters": {
            name: adapter_state(name, state, book, one, adapters_wait[name]) for name, one in holds.adapters.items()
        },
        "checkpoints": state.checkpoints,
        "oldest_step": state.oldest_step,
        "config": config,
    }


def group_counts(state: RunState, adapter: str = "") -> dict[str, Any]:
    """Count groups, of an adapter, by where they stand.

    stored = live + in_batches + retired + sum(evicted) + dead_lettered
    """
    index, counted = state.index, state.standing(adapter) if adapter else state
    states = index["state"][index["adapter"] == name_code(adapter)] if adapter else index["state"]
    by_state = np.bincount(states, minlength=EVICTED + 1)
    return {
        "stored": counted.stored,
        "live": int(by_state[LIVE]),
        "in_batches": int(by_state[IN_BATCHES]),
        "retired": counted.retired,
        "evicted": {reason: number for reason, number in sorted(counted.evicted.items()) if number},
        "dead_lettered": sum(counted.dead_lettered.values()),
    }


class AdapterState(msgspec.Struct, frozen=True, kw_only=True):
    """What a run has of one adapter; `step` is its own next unacked one, `progress` that of its next batch.

    `tokens_used`, `staleness`, `histograms`: of its uses so far, as the run's.
    """

    step: int
    published_version: int
    weights_uri: str | None
    groups: dict[str, Any]
    tokens_live: int
    tokens_used: int
    tickets_out: int
    staleness: dict[str, int]
    histograms: Histograms
    progress: Progress
    waiting: WaitingAnswer | None


def adapter_held(name: str, state: RunState) -> AdapterHeld:
    """Add up what the index has of one adapter."""
    live = (state.index["adapter"] == name_code(name)) & (state.index["state"] == LIVE)
    tokens_live = int(state.index["tokens"][live].sum(dtype=np.int64))
    return AdapterHeld(group_counts(state, name), tokens_live, histograms(state.standing(name).tallies))


def adapter_state(
    name: str, state: RunState, book: TicketBook, holds: AdapterHeld, waits: WaitingAnswer | None
) -> AdapterState:
    """Render what a run has of one adapter."""
    standing = state.standing(name)
    return AdapterState(
        step=state.own_step(state.step, name),
        published_version=state.published[name],
        weights_uri=state.weights_uri[name],
        groups=holds.groups,
        tokens_live=holds.tokens_live,
        tokens_used=standing.tokens_used,
        staleness={str(age): number for age, number in sorted(standing.used_staleness.items())},
        histograms=holds.histograms,
        tickets_out=book.out_of(name),
        progress=state.progress_at(state.next_step, name),
        waiting=waits,
    )


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
        "filler_micro_batches": packed.fillers if packed else None,
        "dp_world_size": packed.layout.dp_world_size if packed else None,
        "adapter_tokens": _adapter_tokens(record),
        **({"adapters": record.adapters, "adapters_completed": completed(record)} if record.adapters else {}),
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


def _adapter_tokens(record: BatchRecord) -> dict[str, int]:
    tokens: dict[str, int] = {}
    for entry in record.groups:
        tokens[entry.adapter] = tokens.get(entry.adapter, 0) + entry.tokens
    return tokens
