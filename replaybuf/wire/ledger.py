"""The ledger: the append-only record of every decision, and the only truth about a run.

A record is one entry of the ledger stream, msgpack with its type in the field `type`. Together with the index stream
(which groups were stored) the ledger determines the state of a run; `replaybuf.kernel.state.run_state` is the fold.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from replaybuf.wire.batch import BodyExtra
from replaybuf.wire.config import Cost

T = TypeVar("T")

EPOCHS_OF_RESTORE = 1_000_000
"""Most attaches of one restored run: its epochs follow a multiple of this number."""


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """Base of all records.

    `at_s`: seconds since the epoch when it was written, for histograms of ages and for people; no decision reads it.
    """

    at_s: float = 0.0


class ConfigRecord(Record, frozen=True, kw_only=True, tag="CONFIG"):
    """The run was created or changed: the whole configuration from here on.

    `max_uses` is what the strategy promises with these options; `state` what an operator or the end of the supply set.
    `by`: name of the token that changed it, "" without tokens and for changes of the service.
    """

    config: dict[str, Any]
    max_uses: int | None
    state: Literal["running", "paused", "finished"] = "running"
    reason: str | None = None
    by: str = ""


class AttachRecord(Record, frozen=True, kw_only=True, tag="ATTACH"):
    """A trainer attached and fenced every older epoch. `cost` of a rollout by its length; None = `TYPICAL`.

    `extras`: what its bodies hold in addition. `fixed`: it needs equal batches. `rewinds`: a REWIND follows, and the
    batches before it are not for this epoch.
    """

    epoch: int
    step: int
    dp_world_size: int
    seq_len: int
    pad_to_multiple_of: int
    cost: Cost | None = None
    extras: tuple[BodyExtra, ...] = ()
    fixed: bool = False
    rewinds: bool = False


class RewindRecord(Record, frozen=True, kw_only=True, tag="REWIND"):
    """A trainer resumed at `step`, before the newest step; a new `generation` begins.

    `redeliver`: the batches from `step` on are served again; `resample`: they are voided, and their groups may be
    sampled again. `version` = version(step) becomes the published version, `versions` those of named adapters.
    Groups up to number `until` with tokens of a later, lost version are evicted as `lost_lineage`; a batch that is
    served again keeps its own.
    """

    step: int
    generation: int
    on_resume: Literal["redeliver", "resample"]
    version: int
    until: int
    versions: dict[str, int] = {}


class BatchEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One group of a batch: enough to rebuild the body and to answer what a step was trained on."""

    number: int
    group_id: str
    prompt_id: str
    prompt_index: int | None
    adapter: str
    policy_version: int
    staleness: int
    times_sampled: int
    tokens: int
    payload_key: str
    weight: float | None = None


class AdapterStep(msgspec.Struct, frozen=True):
    """Part of an adapter in a batch: own `step` and `version` it trains, groups given, whether it ends that step."""

    step: int
    version: int
    groups: int
    completed: bool


class BatchRecord(Record, frozen=True, kw_only=True, tag="BATCH"):
    """One batch: the groups of one step. `seed` is what the strategy's generator was seeded with.

    In a run with named adapters: `adapters` with a part in it, `turn` the one with the next turn; `version` is 0.
    `short`: why the batch is not full, "" if it is full; `fill`: share of the budget of a short batch, 0..1.
    `stale_token_mask`: of the configuration; `masked_tokens`: sampled tokens of the stored groups that it leaves out of
    the loss.
    `late_columns`: columns that came late for at least one group; `digest` covers their content.
    `index_end`: number of the newest group stored before it, for figures.
    """

    step: int
    generation: int
    batch_id: str
    digest: str
    version: int
    strategy: str
    options: dict[str, Any]
    seed: list[int]
    tokens: int
    rollouts: int
    groups: list[BatchEntry]
    adapters: dict[str, AdapterStep] = {}
    turn: str = ""
    short: Literal["", "tail", "timeout"] = ""
    fill: float | None = None
    stale_token_mask: int | None = None
    masked_tokens: int = 0
    late_columns: list[str] = []
    index_end: int = 0

    @property
    def numbers(self) -> npt.NDArray[np.int64]:
        """Numbers of the groups, in order."""
        return np.fromiter(map(operator.attrgetter("number"), self.groups), np.int64, len(self.groups))

    @property
    def parts(self) -> dict[str, AdapterStep]:
        """Part of each adapter in the batch; without adapters, every batch completes a step of the adapter `""`."""
        return self.adapters or {"": AdapterStep(self.step, self.version, len(self.groups), True)}

    @property
    def least_versions(self) -> dict[str, int]:
        """Oldest version of each adapter whose tokens stay in the loss mask; empty if all stay."""
        mask = self.stale_token_mask
        return {} if mask is None else {name: max(0, part.version - mask) for name, part in self.parts.items()}


class AckRecord(Record, frozen=True, kw_only=True, tag="ACK"):
    """A step was trained. `priorities`: what the learner gave its groups, by number, for strategies that go by it.

    `waited_s`: seconds that the trainer waited since the ack before, by reason, as its leader counted them.
    `metrics`: numbers that the trainer reports for people, by name; None = it had no number.
    """

    step: int
    epoch: int
    feedback: dict[str, Any] | None = None
    priorities: dict[int, float] = {}
    waited_s: dict[str, float] = {}
    metrics: dict[str, float | None] = {}


class EvictRecord(Record, frozen=True, kw_only=True, tag="EVICT"):
    """Groups that no batch from `step` on may use, by reason. `reissued`: those whose prompts are issued again."""

    step: int
    numbers: dict[str, list[int]]
    reissued: list[int] = []


class DeadLetterRecord(Record, frozen=True, kw_only=True, tag="DEAD_LETTER"):
    """Stored groups that turned out unusable, by reason."""

    numbers: dict[str, list[int]]


class PurgeRecord(Record, frozen=True, kw_only=True, tag="PURGE"):
    """An operator deleted the bytes of dead letters. `by`: name of the token, "" without tokens."""

    numbers: list[int]
    by: str = ""


class CheckpointRecord(Record, frozen=True, kw_only=True, tag="CHECKPOINT"):
    """The trainer can resume at `step`; the newest `keep` checkpoints stay resumable.

    Cursors keep the bytes of groups with numbers above `kept_after`, and of those used at step `kept_from` or later.
    """

    step: int
    keep: int
    kept_after: int | None = None
    kept_from: int | None = None


class PolicyRecord(Record, frozen=True, kw_only=True, tag="POLICY"):
    """The trainer announced a version as loaded by the engines."""

    version: int
    weights_uri: str | None
    adapter: str
    epoch: int


class FailedPromptRecord(Record, frozen=True, kw_only=True, tag="TICKET"):
    """A prompt that failed: it ends without a group, for this reason.

    `stored`: groups stored before, if the run has a rule for failed prompts.
    """

    adapter: str
    prompt_index: int
    outcome: Literal["failed"]
    attempts: int
    reason: str
    stored: int | None = None


class AddedColumns(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Late columns of one group: the checksum of each, and the bytes of their frames.

    `reward_mean`, `reward_std`, `advantage_abs_mean`: of the group with these columns.
    """

    number: int
    crc32c: dict[str, int]
    frame_bytes: int
    reward_mean: float
    reward_std: float
    advantage_abs_mean: float


class ColumnsRecord(Record, frozen=True, kw_only=True, tag="COLUMNS"):
    """Stages added columns to stored groups that no batch had drawn."""

    groups: list[AddedColumns]


class TrimRecord(Record, frozen=True, kw_only=True, tag="TRIM"):
    """History was trimmed: freed groups up to number `groups`, ledger entries up to `entries`."""

    groups: int
    entries: int


class LossRecord(Record, frozen=True, kw_only=True, tag="LOSS"):
    """An operator let the run go on without `entries` of its ledger and `groups`, which Redis had lost.

    Every epoch that a lost record may have given is fenced, and a new generation begins: what was sampled with versions
    that the run does not know any more has a lost lineage. `by`: name of the token, "" without tokens.
    """

    entries: int
    groups: int
    by: str = ""


AnyRecord = (
    ConfigRecord
    | AttachRecord
    | RewindRecord
    | BatchRecord
    | AckRecord
    | EvictRecord
    | DeadLetterRecord
    | PurgeRecord
    | CheckpointRecord
    | PolicyRecord
    | FailedPromptRecord
    | ColumnsRecord
    | TrimRecord
    | LossRecord
)


def newest_group(record: AnyRecord) -> int:
    """Return the highest group number in a record, 0 if it has none. These groups were stored before it."""
    match record:
        case BatchRecord():
            return int(record.numbers.max(initial=0))
        case EvictRecord() | DeadLetterRecord():
            return max(map(max, filter(None, record.numbers.values())), default=0)
        case PurgeRecord():
            return max(record.numbers, default=0)
        case ColumnsRecord():
            return max((group.number for group in record.groups), default=0)
        case RewindRecord():
            return record.until
        case TrimRecord():
            return record.groups
    return 0


PIECE = 1_000
"""Groups of a batch that are encoded or decoded at once: msgspec keeps Python's lock meanwhile, about 1 ms."""
_FEW_BYTES = 128 << 10
"""A shorter record is decoded at once."""
_encode = msgspec.msgpack.Encoder().encode
_decode: Callable[[bytes], AnyRecord] = msgspec.msgpack.Decoder(AnyRecord).decode
_decode_fields = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode
_decode_items = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_decode_entries = msgspec.msgpack.Decoder(list[BatchEntry]).decode


def encode_record(record: AnyRecord) -> bytes:
    """Encode a record. A thread can encode a large batch: other threads run between its pieces."""
    if not isinstance(record, BatchRecord) or len(record.groups) <= PIECE:
        return _encode(record)
    # Each piece is encoded as an array of its own: keep its items, without the header.
    items = (_encode(piece)[len(_array_header(len(piece))) :] for piece in pieces_of(record.groups))
    groups = msgspec.Raw(b"".join((_array_header(len(record.groups)), *items)))
    return _encode(msgspec.structs.replace(record, groups=groups))


def decode_record(raw: bytes) -> AnyRecord:
    """Decode a record, a large batch in pieces. Raises `msgspec.DecodeError`, `UnicodeDecodeError`."""
    if len(raw) <= _FEW_BYTES:
        return _decode(raw)
    fields = _decode_fields(raw)
    record = _decode(_encode(fields | {"groups": []})) if _is_batch(fields) else _decode(raw)
    if not isinstance(record, BatchRecord):
        return record
    groups: list[BatchEntry] = []
    for piece in pieces_of(_decode_items(fields["groups"])):
        groups += _decode_entries(_array_header(len(piece)) + b"".join(map(bytes, piece)))
    return msgspec.structs.replace(record, groups=groups)


def _is_batch(fields: dict[str, msgspec.Raw]) -> bool:
    return "groups" in fields and bytes(fields["type"]) == _encode("BATCH")


def pieces_of(items: list[T]) -> Iterator[list[T]]:
    """Cut a list into pieces that a call may work on while it keeps Python's lock."""
    return (items[start : start + PIECE] for start in range(0, len(items), PIECE))


def _array_header(size: int) -> bytes:
    """Return the bytes before the items of an array in msgpack."""
    if size < 16:
        return bytes((0x90 | size,))
    return b"\xdc" + size.to_bytes(2, "big") if size < 1 << 16 else b"\xdd" + size.to_bytes(4, "big")
