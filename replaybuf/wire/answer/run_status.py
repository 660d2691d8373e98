"""Status of a run: the answer of `GET /v1/runs/{run}`, and the part of its configuration that clients use."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from replaybuf.errors import Malformed, counted
from replaybuf.wire.config import NonNegative, TokensPerRank
from replaybuf.wire.contract import Answer, Request, WaitingAnswer
from replaybuf.wire.decoding import prepared
from replaybuf.wire.group_check import GroupLimits


class Buckets(Struct, frozen=True):
    """A histogram: count, sum, and pairs of a bucket's upper edge (null = unbounded) and its count.

    Empty buckets are left out.
    """

    count: int
    sum: float
    buckets: list[tuple[float | None, int]]


class DropAges(Struct, frozen=True):
    """Ages of the groups dropped for one reason: policy versions at the step of the drop, seconds since arrival."""

    age_versions: Buckets
    age_s: Buckets


class Histograms(Struct, frozen=True):
    """Uses by `times_sampled` and age; lengths of groups stored, used, dropped; drops by reason.

    Lengths in tokens: of the mean rollout of a group, rounded down, and of its longest one.
    """

    times_sampled: dict[str, int]
    age_at_use_s: Buckets
    rollout_tokens: dict[str, Buckets]
    longest_rollout_tokens: dict[str, Buckets]
    dropped: dict[str, DropAges]


class PromptCounts(Struct, frozen=True, kw_only=True):
    """Prompts of one source: with a stored group, trained, dropped; `share`: trained / (trained + dropped)."""

    stored: int
    trained: int
    dropped: int
    share: float


class LengthBias(Struct, frozen=True):
    """Mean tokens per rollout of groups at their uses, and of stored groups.

    `biased`: the two differ by over a tenth, and over a twentieth of at least 100 stored groups was dropped.
    """

    used: float
    stored: float
    biased: bool


class Reuse(Struct, frozen=True, kw_only=True):
    """How often groups are trained: groups by their uses so far, and uses per used group.

    `generated_share`: groups stored per use, the cost of a step in generation; both are null before the first use.
    """

    groups_by_uses: dict[str, int] = {}
    uses_per_group: float | None = None
    generated_share: float | None = None


class Coverage(Struct, frozen=True, kw_only=True):
    """Outcomes of prompts: issued = trained + dropped + failed + pending.

    - `issued`: prompt indexes that had a ticket (or, without tickets, a group)
    - `stored`: prompts with a stored group, in any state
    - `trained`: in a batch of the surviving history; `dropped`: evicted or dead-lettered before any use
    - `failed`: recorded as failed, without a group
    - `pending`: may still be trained: group live and unused, ticket out, or to be issued again
    - `share`: trained / (issued - pending), 0 if no prompt is done
    - `sources`: by source, if groups have one; `"*"`: prompts without a source, and of sources beyond the first 64
    - `lengths`: null before the first use
    """

    issued: int
    stored: int
    trained: int
    dropped: int
    failed: int
    pending: int
    share: float
    sources: dict[str, PromptCounts] = {}
    lengths: LengthBias | None = None


class StoredCounts(Answer, frozen=True, kw_only=True):
    """Stored groups by state: stored = live + in_batches + retired + sum(evicted) + dead_lettered.

    `partial`: those stored with fewer rollouts than `group_size`, in any state.
    """

    stored: int
    live: int
    in_batches: int
    retired: int
    evicted: dict[str, int]
    dead_lettered: int
    partial: int = 0


class GroupCounts(StoredCounts, frozen=True, kw_only=True):
    """Stored groups by state, and `rejected` appends by reason, which are not stored."""

    rejected: dict[str, int]


class TicketCounts(Answer, frozen=True, kw_only=True, omit_defaults=True):
    """Tickets since the run began; `out` counts those that are out now.

    `reissued`: prompts issued again because their group was too stale; `awaiting_reissue`: those without a new group.
    Both are absent while they are 0.
    """

    issued: int
    out: int
    expired: int
    returned: int
    failed: int
    reissued: int = 0
    awaiting_reissue: int = 0


class FailedRule(Answer, frozen=True, kw_only=True):
    """Rule for failed prompts: `failed` of the `ended` newest prompts, at most 200, and the share that is allowed.

    `alarm`: why the share is exceeded; null while it is not.
    """

    failed: int
    ended: int
    share: float
    max_share: float
    alarm: str | None = None


class TrainerPresence(Answer, frozen=True, kw_only=True):
    """Seconds since the attached trainer last called this server, or since the server opened the run; its epoch."""

    last_seen_s: float
    epoch: int


class ProducersPresence(Answer, frozen=True, kw_only=True):
    """Seconds since a producer last called this server (null = never), and producers `known` by name for an hour.

    `known` is at most 1,000; `gone` of them sent heartbeats and stopped.
    """

    last_seen_s: float | None = None
    known: int = 0
    gone: int = 0


class LiveTotal(Answer, frozen=True, kw_only=True):
    """Tokens, or bytes, of live groups."""

    live: int


class SpillStatus(Answer, frozen=True, kw_only=True):
    """Bytes of frames in Redis; spilled groups and the bytes of their files; why the folder cannot be used, or null."""

    bytes_in_memory: int
    groups: int
    bytes: int
    failing: str | None


class Progress(Struct, frozen=True):
    """Progress of an adapter: its own `step`, `groups` given to the batch of it, `groups_per_batch` complete it."""

    step: int
    groups: int
    groups_per_batch: int


class AdapterStatus(Answer, frozen=True, kw_only=True):
    """Status of one adapter; `step` is its own next unacked one, `progress` that of its next batch.

    `tokens_used`, `staleness`, `histograms` count its uses so far.
    """

    step: int
    published_version: int
    weights_uri: str | None
    groups: StoredCounts
    tokens_live: int
    tokens_used: int
    tickets_out: int
    staleness: dict[str, int]
    histograms: Histograms
    progress: Progress
    waiting: WaitingAnswer | None


class ChosenStrategy(Struct, frozen=True):
    """A strategy by name, with its options, defaults filled in."""

    name: str = ""
    options: dict[str, Any] = {}


class BatchFacts(Struct, frozen=True):
    """Bounds of a run's batches: tokens of one micro-batch and of a batch, and the rule for longer rollouts."""

    seq_len: int | None = None
    tokens_per_batch: int | TokensPerRank | None = None
    overlong: str = "reject"

    @property
    def token_budget(self) -> int | None:
        """Tokens of a batch; None = no bound, or one that only the service knows because it follows the trainer."""
        return None if isinstance(self.tokens_per_batch, TokensPerRank) else self.tokens_per_batch


class RunFacts(Struct, frozen=True):
    """The part of a run's configuration that a client uses.

    Unlike `RunConfig` it ignores the fields of a newer service.
    """

    batch: BatchFacts = BatchFacts()
    strategy: ChosenStrategy = ChosenStrategy()
    group_size: int | None = None
    min_group_size: int | None = None
    steps_per_publish: int = 1
    vocab_size: int | None = None
    max_steps: int | None = None
    seed: int = 0
    advantage: str = "grpo"
    adapters: dict[str, Any] = {}
    on_stale: str | dict[str, str] = "drop"

    def group_limits(self) -> GroupLimits:
        """Return the bounds of a group of this run."""
        truncates = self.batch.overlong == "truncate"
        return GroupLimits(
            adapters=frozenset(self.adapters),
            group_size=self.group_size,
            min_group_size=self.min_group_size,
            vocab_size=self.vocab_size,
            seq_len=None if truncates else self.batch.seq_len,
            tokens_per_batch=None if truncates else self.batch.token_budget,
        )


class RunStatus(Answer, frozen=True, kw_only=True):
    """Status of a run. `config` is its configuration with defaults filled in; `oldest_step` can still be resumed.

    `revision`: number of the ledger entry with this configuration, for `if_revision` of a change.

    `trainer` is null before the first attach, `failed_prompts` without `tickets.max_failed_share`, `spill` without a
    spill folder and on a follower. `waiting_s`: seconds since `waiting` has this reason; after a restart at least.
    """

    run: str
    state: Literal["running", "paused", "finished"]
    paused_reason: str | None
    strategy: ChosenStrategy
    durability: str
    epoch: int
    generation: int
    step: int
    published_version: int
    groups: GroupCounts
    tokens: LiveTotal
    bytes: LiveTotal
    tickets: TicketCounts
    staleness: dict[str, int]
    histograms: Histograms
    coverage: Coverage
    reuse: Reuse = Reuse()
    waiting: WaitingAnswer | None
    adapters: dict[str, AdapterStatus]
    checkpoints: list[int]
    oldest_step: int
    trainer: TrainerPresence | None = None
    producers: ProducersPresence = ProducersPresence()
    failed_prompts: FailedRule | None = None
    spill: SpillStatus | None = None
    waiting_s: float | None = None
    revision: int = 0
    config: Annotated[dict[str, Any], Meta(extra_json_schema={"$ref": "#/components/schemas/RunConfig"})]

    def __repr__(self) -> str:
        waiting = self.waiting.reason if self.waiting else "ready"
        return f"<run {self.run}: {self.state}, step {self.step}, {counted(self.groups.live, 'live group')}, {waiting}>"

    def facts(self) -> RunFacts:
        """Read the facts of the configuration. Raises `Malformed` for another contract."""
        try:
            return msgspec.convert(self.config, prepared(RunFacts))
        except msgspec.ValidationError as error:
            raise Malformed(f"config of run {self.run} does not fit the contract: {error}", name="config") from error


class RunList(Answer, frozen=True, kw_only=True):
    """Every run of this server, by name; `unreadable`: runs that cannot be read, with the error."""

    runs: list[RunStatus]
    unreadable: dict[str, str]


class LossRequest(Request, frozen=True, kw_only=True):
    """Let a run go on without what Redis lost: `entries` of its ledger and `groups`, as its error shows them."""

    entries: NonNegative
    groups: NonNegative


class AcceptedLoss(Answer, frozen=True, kw_only=True):
    """What a run goes on without, and what is left: the last entry of its ledger and its last group."""

    run: str
    entries: int
    groups: int
    last_entry: int
    last_group: int
