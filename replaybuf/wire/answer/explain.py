"""Why a batch has these groups: what it was chosen from, the order of the choice, and how it is packed."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import field

from replaybuf.wire.config import Cost
from replaybuf.wire.contract import Amount, Answer, WaitingAnswer

MOST_ROWS = 4096
"""Rows that one answer lists; larger batches have the sums of each rank only."""


class AdapterCandidates(msgspec.Struct, frozen=True, omit_defaults=True):
    """Groups of one adapter when the strategy chose: live = sum(left_out) + usable.

    - `live` groups with `live_tokens`; `left_out`: groups by the first rule of the core that they broke
    - `usable`: groups that the strategy could choose from; `budget` of the batch (0 = no bound)
    """

    live: int
    live_tokens: int
    usable: int
    budget: Amount
    left_out: dict[str, int] = {}


class ShownLayout(msgspec.Struct, frozen=True, omit_defaults=True):
    """Layout of the attached trainer: ranks, tokens per row, alignment, and the cost that balances ranks."""

    dp_world_size: int
    seq_len: int
    pad_to_multiple_of: int = 1
    cost: Cost | None = None


class Candidates(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a batch was chosen from, kept beside its ledger record.

    `stored`, `dropped` (evicted and dead by reason) and `rejected` (appends by reason) count from the start of the run,
    so the counts of two batches give what happened between them. `filters` in force, by name.
    """

    stored: int
    dropped: dict[str, int]
    rejected: dict[str, int]
    adapters: dict[str, AdapterCandidates]
    filters: list[str] = []
    layout: ShownLayout | None = None


class Arrivals(Answer, frozen=True, kw_only=True):
    """Groups since the batch before: stored ones, and by reason those dropped or rejected."""

    stored: int
    dropped: dict[str, int]
    rejected: dict[str, int]


class ChosenGroup(Answer, frozen=True, kw_only=True, omit_defaults=True):
    """A group of the batch, in the order of the strategy. Rewards are absent once its index entry is trimmed.

    `times_sampled` counts this use; `age_s` from its arrival to the batch; `weight` of the strategy.
    """

    group_id: str
    prompt_id: str
    adapter: str = ""
    policy_version: int
    staleness: int
    times_sampled: int
    tokens: int
    weight: float | None = None
    reward_mean: float | None = None
    reward_std: float | None = None
    advantage_abs_mean: float | None = None
    age_s: float | None = None


class Choice(Answer, frozen=True, kw_only=True):
    """The chosen groups: sums, groups by staleness, by use and by adapter, and the first ones in order."""

    groups: int
    rollouts: int
    tokens: int
    staleness: dict[str, int]
    times_sampled: dict[str, int]
    adapters: dict[str, int]
    first: list[ChosenGroup]


class PackedRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One micro-batch: its rollouts and their tokens, all of one adapter."""

    rollouts: int
    tokens: int
    adapter: str = ""


class PackedRank(Answer, frozen=True, kw_only=True):
    """Rows of one rank. `fill`: tokens as a share of all places in its rows."""

    dp_rank: int
    rollouts: int
    tokens: int
    fill: float
    rows: list[PackedRow]


class Packing(Answer, frozen=True, kw_only=True):
    """The batch in rows of `seq_len` tokens, the same number of rows for each rank.

    `layout`: of the trainer when the batch was assembled, or of the one attached now. `rows` are empty above 4,096.
    """

    layout: Literal["assembled", "attached"]
    dp_world_size: int
    seq_len: int
    pad_to_multiple_of: int
    micro_batches: int
    fill: float
    ranks: list[PackedRank]


class BatchExplanation(Answer, frozen=True, kw_only=True, omit_defaults=True):
    """Why the batch of a step has these groups, or why there is no batch yet.

    - `state` is that of the record, or for the next step `waiting` with the reason, or `ready` to be requested
    - `candidates` by adapter; `since_last_batch`: what came in and was dropped before; `choice`; `packing`
    - `unknown`: what is missing here, with the cause
    """

    run: str
    step: int
    generation: int
    state: Literal["waiting", "ready", "assembled", "acked", "voided"]
    waiting: WaitingAnswer | None = None
    version: int | None = None
    strategy: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    filters: list[str] = field(default_factory=list)
    seed: list[int] = field(default_factory=list)
    short: Literal["", "tail", "timeout"] = ""
    candidates: dict[str, AdapterCandidates] = field(default_factory=dict)
    since_last_batch: Arrivals | None = None
    choice: Choice | None = None
    packing: Packing | None = None
    unknown: list[str] = field(default_factory=list)
