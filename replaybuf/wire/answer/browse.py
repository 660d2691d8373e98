"""Answers that show what a run holds and held: groups, batch records, ledger pages, failed prompts, dead letters."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from msgspec import UNSET, Meta, UnsetType, field

from replaybuf.wire.answer.samples import Sample, ShownRollout
from replaybuf.wire.contract import Answer
from replaybuf.wire.group import RolloutJson
from replaybuf.wire.ledger import AdapterStep, AnyRecord

GroupState = Literal["live", "in_batches", "retired", "evicted", "dead_lettered"]


class TextMatch(Answer, frozen=True):
    """The first place of a text in a group: in a part of the rollout at `place`, with the letters around it."""

    place: int
    part: Literal["prompt", "completion"]
    before: str
    text: str
    behind: str


class SearchedGroups(Answer, frozen=True, kw_only=True):
    """What a search looked at for one page: groups, and bytes of their frames."""

    groups: int
    bytes: int


class GroupSummary(Answer, frozen=True, kw_only=True):
    """The metadata of a stored group. `batches`: steps that used it; `reason` of its eviction or dead letter.

    `late_columns`: columns that a stage added after the group was stored. `ticket_s`: when its ticket was issued, None
    = not known. `preview`, if asked for: one rollout, None where no bytes are left or the page has too many. `match`:
    where a search found its text.
    """

    group_id: str
    number: int
    state: GroupState
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
    late_columns: list[str] = field(default_factory=list)
    ticket_s: float | None = None
    preview: ShownRollout | UnsetType | None = UNSET
    match: TextMatch | UnsetType = UNSET


class LifeMoment(Answer, frozen=True, kw_only=True, omit_defaults=True):
    """One moment of a group's life; `at_s` in seconds since the epoch, absent if the service does not know it.

    - `version`: of `sampled` the oldest of its tokens (`until_version` the newest), of `stored` the published one, of
      `batch` and `trained` the one that the step trains, of `evicted` the one of the policy then
    - `step` of `batch` and `trained`; `reason` of a drop
    """

    what: Literal["ticket", "sampled", "stored", "batch", "trained", "published", "evicted", "dead_lettered", "freed"]
    at_s: float | None = None
    step: int | None = None
    version: int | None = None
    until_version: int | None = None
    reason: str | None = None


class GroupPage(Answer, frozen=True, kw_only=True):
    """A page of groups. `next` is the `after` of the next page, None on the last one. `searched`: of a search."""

    groups: list[GroupSummary]
    next: int | None
    searched: SearchedGroups | UnsetType = UNSET


class StoredRollout(RolloutJson, forbid_unknown_fields=False, kw_only=True):
    """A rollout as it was appended; also as text if the service has a tokenizer, with `pieces` token by token."""

    prompt_text: str | UnsetType = UNSET
    completion_text: str | UnsetType = UNSET
    completion_pieces: list[str] | UnsetType = UNSET


class StoredGroup(GroupSummary, frozen=True, kw_only=True, omit_defaults=True):
    """A group with its life, and its content, None once its bytes are freed. `detail`: what is wrong with a frame.

    `samples`: rollouts of a freed group that stay readable.
    """

    rollouts: list[StoredRollout] | None
    metadata: dict[str, Any] | None
    detail: str | None = None
    life: list[LifeMoment] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


class UsedGroup(Answer, frozen=True, kw_only=True, gc=False):
    """One use of a group by a batch. `times_sampled` counts this use."""

    group_id: str
    prompt_id: str
    prompt_index: int | None
    adapter: str
    policy_version: int
    staleness: int
    times_sampled: int
    tokens: int


class StepRecord(Answer, frozen=True, kw_only=True, omit_defaults=True):
    """The batch of one step. The packing figures are None if the batch is voided or freed.

    `late_columns`: columns that came late for at least one of its groups.
    `short`: why the batch is not full; `fill`: its share of the budget. Both are absent for a full batch.
    `masked_tokens`: sampled tokens that are too old for the loss; absent without `stale_token_mask`.
    """

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
    adapters: dict[str, AdapterStep] | None = None
    adapters_completed: dict[str, int] | None = None
    short: Literal["tail", "timeout"] | None = None
    fill: float | None = None
    stale_token_mask: int | None = None
    masked_tokens: int | None = None
    late_columns: list[str] = field(default_factory=list)
    groups: list[UsedGroup]


_RECORD_SCHEMA = {
    "anyOf": [{"$ref": f"#/components/schemas/{record.__name__}"} for record in get_args(AnyRecord)],
    "properties": {"entry": {"type": "integer"}},
    "required": ["entry"],
}


class LedgerPage(Answer, frozen=True, kw_only=True):
    """A page of ledger records (see `replaybuf.wire.ledger`), each with its `entry`.

    `next` is the `after` of the next page, None on the last one.
    """

    records: list[Annotated[dict[str, Any], Meta(extra_json_schema=_RECORD_SCHEMA)]]
    next: int | None


class FailedPrompt(Answer, frozen=True, kw_only=True):
    """A prompt that failed `attempts` times and has no group."""

    at_s: float
    adapter: str
    prompt_index: int
    outcome: Literal["failed"]
    attempts: int
    reason: str


class FailedPrompts(Answer, frozen=True, kw_only=True):
    """The newest failed prompts, oldest first. `failed` counts all of them."""

    failed: int
    failed_prompts: list[FailedPrompt]


class DeadLetters(Answer, frozen=True, kw_only=True):
    """A page of stored groups that turned out unusable. `next`: the `after` of the next page, None on the last one."""

    dead_letters: list[GroupSummary]
    next: int | None = None


class PurgedDeadLetters(Answer, frozen=True, kw_only=True):
    """Number of dead letters whose bytes were deleted."""

    purged: int
