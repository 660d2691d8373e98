"""Every request and answer of the HTTP contract, once: the service encodes them, clients decode into them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec
from msgspec import Meta

from replaybuf.wire.config import MAX_RANKS, Cost, NonNegative, Positive, RowTokens, RunConfig
from replaybuf.wire.group import GroupJson, RolloutJson
from replaybuf.wire.ledger import AdapterStep, AnyRecord

# ---------------------------------------------------------------------- requests

TICKETS_AT_ONCE = 1000
"""Most tickets that one call issues. They are written in one go, which holds everything else up for some 30 ms."""


class TicketRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A producer asks for leave to generate `count` groups, waiting up to `wait_ms` for the first."""

    producer: str
    count: Annotated[
        Positive, msgspec.Meta(description=f"Tickets wanted; one call grants {TICKETS_AT_ONCE} at most.")
    ] = 1
    adapter: str = ""
    wait_ms: NonNegative = 0


class AckRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A trainer says that a step was trained; `feedback` goes to the strategy."""

    epoch: NonNegative
    feedback: dict[str, Any] | None = None


class PolicyRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A trainer announces a version that the engines have loaded."""

    epoch: NonNegative
    version: NonNegative
    weights_uri: str | None = None
    adapter: str = ""


class CheckpointRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A trainer can resume at `step`; the newest `keep` checkpoints stay resumable."""

    epoch: NonNegative
    step: NonNegative
    keep: Positive | None = None


class GroupsRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Several groups in one body."""

    groups: list[GroupJson]


class AttachRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a trainer attaches: its ranks, the step it resumes at (None = where the run stands), its row layout.

    `cost` of a rollout by its length, which ranks are balanced by (None = that of a typical model).
    """

    dp_world_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1
    resume_step: NonNegative | None = None
    on_resume: Literal["redeliver", "resample"] = "redeliver"
    seq_len: RowTokens | None = None
    pad_to_multiple_of: Positive | None = None
    cost: Cost | None = None


LONGEST_NAME = 200


class EvaluationRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an evaluation came to.

    `name`: of the held-out set; `versions` sampled the completions, `version` the oldest of them; `reward_mean` over
    `rollouts` completions, `standard_error` of it, None for one prompt; `parts`: means of the parts of the reward;
    `failed`: prompts that gave none; `samples` per prompt at `temperature`; `seconds` it took.
    """

    name: Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]
    adapter: str = ""
    version: NonNegative
    versions: list[NonNegative]
    reward_mean: float
    standard_error: float | None = None
    parts: dict[str, float] = {}
    rollouts: Positive
    failed: NonNegative = 0
    samples: NonNegative = 1
    temperature: float = 0.0
    max_tokens: NonNegative | None = None
    seconds: float | None = None
    producer: str = ""


class Evaluation(EvaluationRequest, frozen=True, kw_only=True):
    """A result as it is kept: when it came, in seconds since the epoch, and how often the run had been rewound."""

    at_s: float
    generation: int


# ---------------------------------------------------------------------- answers

REASONS = (
    "finished",
    "paused",
    "awaiting_ack",
    "awaiting_publication",
    "rate_limited",
    "all_stale",
    "reuse_exhausted",
    "no_producers",
    "no_groups",
    "too_few_groups",
    "too_few_tokens",
)
"""Why there is no batch, in the order in which they are told."""


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


class Progress(msgspec.Struct, frozen=True):
    """How far an adapter is: own `step`, `groups` given to its batch, `groups_per_batch` that complete it."""

    step: int
    groups: int
    groups_per_batch: int


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


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """What became of prompts: issued = trained + dropped + failed + pending.

    - `issued`: prompt indexes that had a ticket (or, without tickets, a group)
    - `stored`: with a stored group, whatever became of it
    - `trained`: in a batch of the surviving history; `dropped`: evicted or dead-lettered without ever being in one
    - `failed`: recorded as failed, no group came
    - `pending`: may still be trained: group live and unused, ticket out, or to be issued again
    - `share`: trained / (issued - pending), 0 where nothing has come to its end
    """

    issued: int
    stored: int
    trained: int
    dropped: int
    failed: int
    pending: int
    share: float


Place = Literal["live", "in_batches", "retired", "evicted", "dead_lettered"]


class GroupCounts(TypedDict):
    """stored = live + in_batches + retired + sum(evicted) + dead_lettered; what was `rejected` is not stored."""

    stored: int
    live: int
    in_batches: int
    retired: int
    evicted: dict[str, int]
    dead_lettered: int
    rejected: dict[str, int]


class TicketCounts(TypedDict):
    """Tickets since the run began; `out` are out now."""

    issued: int
    out: int
    expired: int
    returned: int
    failed: int


class StrategyShown(TypedDict):
    """A strategy with its options, defaults filled in."""

    name: str
    options: dict[str, Any]


class Live(TypedDict):
    """Tokens, or bytes, of live groups."""

    live: int


class RunShown(TypedDict):
    """State of a run."""

    run: str
    state: Literal["running", "paused", "finished"]
    paused_reason: str | None
    strategy: StrategyShown
    durability: str
    epoch: int
    generation: int
    step: int
    published_version: int
    groups: GroupCounts
    tokens: Live
    bytes: Live
    tickets: TicketCounts
    staleness: dict[str, int]
    histograms: Histograms
    coverage: Coverage
    waiting: WaitingAnswer | None
    adapters: dict[str, AdapterState]
    checkpoints: list[int]
    oldest_step: int
    config: RunConfig


class RunsShown(TypedDict):
    """Every run of this server, by name; `unreadable` says why others cannot be read."""

    runs: list[RunShown]
    unreadable: dict[str, str]


class TicketShown(TypedDict):
    """Leave to generate the group of one prompt within `expires_in_s` seconds."""

    ticket: str
    prompt_index: int
    attempt: int
    expires_in_s: float


class TicketsShown(TypedDict):
    """Tickets, or `waiting` where there are none."""

    tickets: list[TicketShown]
    published_version: int
    waiting: NotRequired[WaitingAnswer]


class TicketReturned(TypedDict):
    """A ticket that was given back."""

    ticket: str
    state: Literal["returned"]


class AppendedShown(TypedDict):
    """What became of one group; the rest of one that was rejected, as far as it has it."""

    group_id: str | None
    status: Literal["stored", "duplicate", "rejected"]
    reason: NotRequired[str]
    detail: NotRequired[str]
    name: NotRequired[str]
    value: NotRequired[Any]
    bound: NotRequired[Any]


class AppendShown(TypedDict):
    """One result per group, in order."""

    results: list[AppendedShown]


class GroupSummary(TypedDict):
    """A stored group, as the index knows it."""

    group_id: str
    number: int
    state: Place
    reason: str | None
    batches: list[int]
    prompt_id: str
    prompt_index: int | None
    adapter: str
    policy_version: int
    tokens: int
    group_size: int
    longest_tokens: int
    truncated: int
    source: int
    arrival_s: float
    reward_mean: float
    reward_std: float
    advantage_abs_mean: float
    times_sampled: int


class GroupsPage(TypedDict):
    """A page of groups; `next` is the `after` of the next one."""

    groups: list[GroupSummary]
    next: int | None


class RolloutShown(RolloutJson, forbid_unknown_fields=False, kw_only=True):
    """A rollout as it was appended; as text too where the service has a tokenizer."""

    prompt_text: str | msgspec.UnsetType = msgspec.UNSET
    completion_text: str | msgspec.UnsetType = msgspec.UNSET


class GroupShown(GroupSummary):
    """A group with what it holds, null once its bytes are freed; `detail` where its frame is broken."""

    rollouts: list[RolloutShown] | None
    metadata: dict[str, Any] | None
    detail: NotRequired[str]


class EvaluationsShown(TypedDict):
    """Results of evaluations, oldest first."""

    evaluations: list[Evaluation]


class PolicyShown(TypedDict):
    """The published version and where its weights lie; `adapters` by name."""

    version: int
    weights_uri: str | None
    adapters: dict[str, int]
    generation: int


class AttachShown(TypedDict):
    """What a trainer gets when it attaches."""

    epoch: int
    step: int
    generation: int
    published_version: int
    dp_world_size: int
    seq_len: int
    pad_to_multiple_of: int
    look_ahead: int


class AckShown(TypedDict):
    """A step that counts as trained."""

    step: int
    state: Literal["acked"]


class CheckpointsShown(TypedDict):
    """Checkpoints that can be resumed."""

    checkpoints: list[int]
    oldest_step: int


class RecordedGroup(TypedDict):
    """One use of a group."""

    group_id: str
    prompt_id: str
    prompt_index: int | None
    adapter: str
    policy_version: int
    staleness: int
    times_sampled: int
    tokens: int


class RecordShown(TypedDict):
    """What a step was trained on; the figures of its packing are null for a batch that is voided or freed."""

    run: str
    step: int
    generation: int
    batch_id: str
    digest: str
    state: Literal["assembled", "acked", "voided"]
    version: int
    strategy: str
    options: dict[str, Any]
    seed: list[int]
    tokens: int
    rollouts: int
    padding_fraction: float | None
    micro_batches: int | None
    filler_micro_batches: int | None
    dp_world_size: int | None
    adapter_tokens: dict[str, int]
    adapters: NotRequired[dict[str, AdapterStep]]
    adapters_completed: NotRequired[dict[str, int]]
    groups: list[RecordedGroup]


_NUMBERED = msgspec.Meta(extra_json_schema={"properties": {"entry": {"type": "integer"}}, "required": ["entry"]})


class LedgerPage(TypedDict):
    """A page of ledger records, each with its `entry`; `next` is the `after` of the next page."""

    records: list[Annotated[AnyRecord, _NUMBERED]]
    next: int | None


class FailedPrompt(TypedDict):
    """A prompt that came to its end without a group, and why."""

    at_s: float
    adapter: str
    prompt_index: int
    outcome: Literal["failed"]
    attempts: int
    reason: str


class FailedPromptsShown(TypedDict):
    """The newest prompts that failed, oldest first; `failed` counts all."""

    failed: int
    failed_prompts: list[FailedPrompt]


class DeadLettersShown(TypedDict):
    """Stored groups that turned out unusable."""

    dead_letters: list[GroupSummary]


class Purged(TypedDict):
    """How many dead letters were let go."""

    purged: int


class HealthShown(TypedDict):
    """The process answers."""

    status: Literal["ok"]


class ReadinessShown(TypedDict):
    """Whether Redis answers and has what it acknowledged; `waiting_for` says what is wrong where not."""

    status: Literal["ready", "not ready"]
    durability: str
    durability_wanted: str
    durability_met_by: str
    durability_reasons: list[str]
    replicas: int
    wait_replicas: int
    redis_version: str | None
    waiting_for: str | None
    runs: list[str]
    unreadable: dict[str, str]
    leaders: dict[str, str | None]
