"""Requests and answers of the HTTP API. The service encodes these structs and clients decode into them.

What a run holds and held is in `browse`, its status in `run_status`; `cursors` and `evaluations` have their own.
Answers may grow: a client ignores fields that it does not know, and a field that is added later gets a default.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypedDict

from msgspec import UNSET, Meta, Struct, field

from replaybuf.wire.batch import BODY_EXTRAS, BodyExtra
from replaybuf.wire.config import MAX_RANKS, Cost, NonNegative, Positive, RowMultiple, RowTokens
from replaybuf.wire.group import GroupJson
from replaybuf.wire.names import MetricName, Name, Uri, lines

# ---------------------------------------------------------------------- requests

TICKETS_AT_ONCE = 1000
"""Most tickets that one call issues. They are written in one transaction, which blocks other calls for about 30 ms."""


class Request(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all request bodies. Unknown fields are errors."""


class TicketRequest(Request, frozen=True, kw_only=True):
    """Ask for tickets for `count` groups. Wait up to `wait_ms` for the first one.

    `max_tokens`: most tokens that the producer samples per rollout; estimates the size of a group before the first one.
    """

    producer: Name
    count: Annotated[Positive, Meta(description=f"Tickets wanted; one call issues at most {TICKETS_AT_ONCE}.")] = 1
    adapter: Name = ""
    wait_ms: NonNegative = 0
    max_tokens: Positive | None = None


TRACEBACK_BYTES = 4096
"""Longest traceback of a failure; the client leaves out the middle of a longer one."""


SUMMARY_CHARS = 500


class ProducerFailure(Request, frozen=True, kw_only=True):
    """A group, or the producer itself, that failed: the reason as of a returned ticket, and the traceback.

    `client.producers.describe_failure` makes it, without values of environment variables.
    """

    reason: Name
    prompt_index: NonNegative | None = None
    traceback: Annotated[str, lines(TRACEBACK_BYTES)]


class HeartbeatRequest(Request, frozen=True, kw_only=True):
    """Report that a producer is at work.

    `in_flight`: groups from their ticket to their append; `slots`: the most of them at a time; `engines`: engines that
    take requests; `held_back_by`: why the producer does less than it could; `failure`: the newest one since the last
    heartbeat.
    """

    in_flight: NonNegative | None = None
    slots: NonNegative | None = None
    engines: NonNegative | None = None
    held_back_by: Name | None = None
    failure: ProducerFailure | None = None


MOST_METRICS = 64
"""Metrics of one ack."""


class AckRequest(Request, frozen=True, kw_only=True):
    """Report that a step was trained. The strategy receives `feedback`; people see `metrics`, null = no number."""

    epoch: NonNegative
    feedback: dict[str, Any] | None = None
    metrics: Annotated[dict[MetricName, float | None], Meta(max_length=MOST_METRICS)] | None = None


class PolicyRequest(Request, frozen=True, kw_only=True):
    """Announce a version that the engines have loaded."""

    epoch: NonNegative
    version: NonNegative
    weights_uri: Uri | None = None
    adapter: Name = ""


class CheckpointRequest(Request, frozen=True, kw_only=True):
    """Record that training can resume at `step`. The newest `keep` checkpoints stay resumable."""

    epoch: NonNegative
    step: NonNegative
    keep: Positive | None = None


class GroupsRequest(Request, frozen=True, kw_only=True):
    """Append several groups with one body."""

    groups: list[GroupJson]


class BodyOptions(TypedDict, total=False):
    """What the bodies of a trainer hold in addition, as fields of an attach.

    `per_token_versions`: the policy version of each token; `lengths`: those of prompts and completions;
    `reward_parts`: the mean reward of all ranks, and of its parts; `metadata`: that of each group, as it was appended.
    """

    per_token_versions: bool
    lengths: bool
    reward_parts: bool
    metadata: bool


class ColumnsRequest(Request, frozen=True, kw_only=True):
    """Add columns to a stored group.

    A column with a value per completion token has one list per rollout, any other column one number per rollout.
    """

    columns: dict[Name, list[list[float] | float]]


class AttachRequest(Request, frozen=True, kw_only=True):
    """Attach a trainer: its number of ranks, the step to resume at (None = the next unacked one), its row layout.

    `cost`: estimated cost of a rollout by its length, for the balance of ranks (None = that of a typical model).
    `fixed`: the trainer needs equal batches, so PATCH may not change `batch` until the next attach without it.
    The last four fields are `BodyOptions`.
    """

    dp_world_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1
    resume_step: NonNegative | None = None
    on_resume: Literal["redeliver", "resample"] = "redeliver"
    seq_len: RowTokens | None = None
    pad_to_multiple_of: RowMultiple | None = None
    cost: Cost | None = None
    fixed: bool = False
    per_token_versions: bool = False
    lengths: bool = False
    reward_parts: bool = False
    metadata: bool = False

    @property
    def extras(self) -> tuple[BodyExtra, ...]:
        """Return what the bodies hold in addition, in a fixed order."""
        wanted = {
            "token_versions": self.per_token_versions,
            "lengths": self.lengths,
            "reward_parts": self.reward_parts,
            "metadata": self.metadata,
        }
        return tuple(extra for extra in BODY_EXTRAS if wanted[extra])


# ---------------------------------------------------------------------- waiting

RETRY_AFTER_S = 0.5


class Amount(Struct, frozen=True):
    """Groups and tokens; as a need, 0 = no requirement."""

    groups: int = 0
    tokens: int = 0


class MissingClient(Struct, frozen=True, kw_only=True):
    """A client that is waited for: `trainer` or the name of a producer, and the seconds since its last call."""

    name: str
    last_seen_s: float


class WaitingAnswer(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="status", tag="waiting"):
    """Why there is no batch or no ticket, what is there, what is needed, and who must act.

    `blocked_on`: `producers`, `trainer`, `operator` or `nothing`. Ask again after `retry_after_s` seconds. `adapter`:
    the one that is closest to a batch, in a run with adapters. `detail`: an explanation for people. `timeout_in_s`:
    seconds until the batch may be short. `missing`: the trainer if it is waited for; if producers are, those gone.
    """

    reason: str
    have: Amount
    need: Amount
    blocked_on: str
    retry_after_s: float
    adapter: str = ""
    detail: str | None = None
    timeout_in_s: float | None = None
    missing: list[MissingClient] = []


# ---------------------------------------------------------------------- answers


class Answer(Struct, frozen=True, kw_only=True):
    """Base of all answers."""


class Ticket(Answer, frozen=True, kw_only=True):
    """Permission to generate the group of one prompt within `expires_in_s` seconds; `attempt` counts from 1.

    `reissue`: how often the prompt was issued again because its group was too stale.
    """

    ticket: str
    prompt_index: int
    attempt: int = 1
    reissue: int = 0
    expires_in_s: float = 600.0


class Tickets(Answer, frozen=True, kw_only=True, omit_defaults=True):
    """Tickets, or `waiting` if there are none. `published_version` is the version to generate with."""

    tickets: list[Ticket]
    published_version: int
    waiting: WaitingAnswer | None = None


class Heartbeat(Answer, frozen=True, kw_only=True):
    """What a producer has to know between its tickets; it is gone after `heartbeat_s` without a call."""

    published_version: int
    state: Literal["running", "paused", "finished"]
    heartbeat_s: float = 15.0


class ReportedFailure(Answer, frozen=True, kw_only=True):
    """The newest failure that a producer reported, `age_s` seconds ago.

    `lasts`: since then no group of the producer was stored.
    """

    reason: str
    prompt_index: int | None
    traceback: str
    age_s: float
    lasts: bool


def summarize_failure(failure: ProducerFailure | ReportedFailure) -> str:
    """Describe a failure in one line: reason, prompt, and the last line of the traceback."""
    where = "" if failure.prompt_index is None else f" at prompt {failure.prompt_index}"
    last = failure.traceback.rstrip().rpartition("\n")[2].strip()
    return f"{failure.reason}{where}: {last}"[:SUMMARY_CHARS]


class ProducerStatus(Answer, frozen=True, kw_only=True):
    """A producer that called within the last hour.

    - `tickets_out`: tickets that it has; `groups_per_min`: its tickets whose groups were stored in the last minute
    - `faults`: its tickets that expired or were returned for a failure, since this server leads the run
    - `heartbeats`: it sends them; `gone`: it has been silent for `tickets.heartbeat_s` and lost its tickets
    - `in_flight`, `slots`, `engines`, `held_back_by`: from its last heartbeat
    - `failure`: the newest that it reported; of at most 20 producers, in the memory of the server that leads
    """

    name: str
    last_seen_s: float
    tickets_out: int
    groups_per_min: float
    faults: int
    heartbeats: bool = False
    gone: bool = False
    in_flight: int | None = None
    slots: int | None = None
    engines: int | None = None
    held_back_by: str | None = None
    failure: ReportedFailure | None = None


class ProducerList(Answer, frozen=True, kw_only=True):
    """The producers of a run by name, at most 1,000."""

    producers: list[ProducerStatus]


class ReturnedTicket(Answer, frozen=True, kw_only=True):
    """A ticket that its producer returned."""

    ticket: str
    state: Literal["returned"] = "returned"


class AppendResult(Answer, frozen=True, kw_only=True, omit_defaults=True):
    """The result for one group; if it is `rejected`, with the reason and the field at fault."""

    group_id: str | None
    status: Literal["stored", "duplicate", "rejected"]
    reason: str | None = None
    detail: str | None = None
    name: str | None = None
    value: Any = UNSET
    bound: Any = UNSET


class AppendResults(Answer, frozen=True, kw_only=True):
    """One result per group, in order."""

    results: list[AppendResult]


class StoredColumns(Answer, frozen=True, kw_only=True):
    """The columns of a group are durable. `added`: how many of them it did not have."""

    group_id: str
    added: int


class Policy(Answer, frozen=True, kw_only=True):
    """The published version, the place of its weights, and the version of each adapter."""

    version: int
    weights_uri: str | None = None
    adapters: dict[str, int] = field(default_factory=dict)
    generation: int = 0


class Attachment(Answer, frozen=True, kw_only=True):
    """The `epoch` of a trainer that attached, for its later calls, and the `step` that it trains next.

    `seq_len` and `pad_to_multiple_of` in tokens per micro-batch. `generation` counts rewinds. `look_ahead`: how many
    steps after `step` can be fetched before `step` is acked.
    """

    epoch: int
    step: int
    generation: int = 0
    published_version: int = 0
    dp_world_size: int = 1
    seq_len: int = 0
    pad_to_multiple_of: int = 1
    look_ahead: int = 0


class AckedStep(Answer, frozen=True, kw_only=True):
    """A step that counts as trained."""

    step: int
    state: Literal["acked"] = "acked"


class Checkpoints(Answer, frozen=True, kw_only=True):
    """Checkpoints that a trainer can resume, and the oldest step that it can resume."""

    checkpoints: list[int]
    oldest_step: int


class Health(Answer, frozen=True, kw_only=True):
    """The process answers."""

    status: Literal["ok"] = "ok"


class Readiness(Answer, frozen=True, kw_only=True):
    """Whether Redis answers and holds every acknowledged write. If not, `waiting_for` names the cause.

    `redis_version`: of Valkey the one that it is compatible with; `server`: program and own version.
    `unreadable`: runs that cannot be read, with the error. `leaders`: address of the server that leads each run.
    """

    status: Literal["ready", "not ready"]
    durability: str
    durability_wanted: str
    durability_met_by: str
    durability_reasons: list[str]
    replicas: int
    wait_replicas: int
    redis_version: str | None
    server: str | None = None
    waiting_for: str | None
    runs: list[str]
    unreadable: dict[str, str]
    leaders: dict[str, str | None]
