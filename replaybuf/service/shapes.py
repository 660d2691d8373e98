"""The shapes of answers, as `/openapi.json` tells them. A test holds every answer against them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec

from replaybuf.config import RunConfig
from replaybuf.group import RolloutJson
from replaybuf.ledger import AdapterStep, AnyRecord
from replaybuf.service.answers import AdapterState, Histograms, WaitingAnswer
from replaybuf.service.evaluations import Evaluation
from replaybuf.tallies import Coverage

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
