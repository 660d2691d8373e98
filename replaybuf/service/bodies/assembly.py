"""Fetch and check the frames of a batch, and pack them.

The bytes are a pure function of the batch record, the frames and the trainer's layout (ranks, seq_len, padding), so
every server writes the same.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from replaybuf.errors import BrokenFrame, Gone
from replaybuf.kernel.decide.records import BatchDraft, GroupLabel
from replaybuf.kernel.rows.column_table import ColumnTable
from replaybuf.kernel.state.history import AttachedTrainer
from replaybuf.packing.batches import PackedGroups
from replaybuf.service.bodies.release import release
from replaybuf.service.turns import call_beside
from replaybuf.store import IndexEntry, Store
from replaybuf.store.keys import late_column
from replaybuf.version import __version__
from replaybuf.wire.column.token_versions import count_stale
from replaybuf.wire.drop_reasons import broken_payload
from replaybuf.wire.frame import stored_checksum
from replaybuf.wire.group import Group, hash_name
from replaybuf.wire.ledger import BatchRecord, encode_record
from replaybuf.wire.names import LONGEST_NAME_BYTES
from replaybuf.wire.plan import PlannedColumn, PlannedGroup, decode_late, decode_payload

Coding = Literal["identity", "zstd"]
LARGEST_STRINGS_BYTES = 4 * LONGEST_NAME_BYTES
"""Ids, adapter and payload key of a group. A direct writer may exceed it, and Redis refuses a record of many such."""
Form = Coding | Literal["plan"]
"""What a rank can request: the body in one of its codings, or its plan."""


FETCHED_AT_ONCE = 2_000
"""More groups at once hold the event loop: 100,000 held it for 0.3 s."""


@dataclasses.dataclass(frozen=True, slots=True)
class FetchedGroups:
    """Groups fetched for a batch; `broken` maps the number of an unusable group to the reason.

    `late`: the late columns of the groups that have any, by number; they are part of `groups`.
    """

    entries: list[IndexEntry]
    groups: dict[int, Group]
    broken: dict[int, str]
    late: dict[int, list[PlannedColumn]] = dataclasses.field(default_factory=dict)

    @property
    def frame_bytes(self) -> int:
        """Bytes of the frames."""
        own = sum(int(entry.values["frame_bytes"]) for entry in self.entries)
        return own + sum(column.frame_bytes for columns in self.late.values() for column in columns)


def size_of(groups: int, frame_bytes: int) -> int:
    """Return the size of work on groups in the items of `call_beside`: 8 groups of 1 MiB are written in 0.7 ms."""
    return 16 * groups + frame_bytes // 1024


def join_fetched(numbers: Sequence[int], first: FetchedGroups, second: FetchedGroups) -> FetchedGroups:
    """Return the groups of both that have one of these numbers, in their order."""
    entries = {entry.number: entry for entry in (*first.entries, *second.entries)}
    ordered = [entries[number] for number in numbers if number in entries]
    return FetchedGroups(ordered, first.groups | second.groups, first.broken | second.broken, first.late | second.late)


async def fetch_groups(store: Store, run: str, numbers: Sequence[int], columns: ColumnTable) -> FetchedGroups:
    """Fetch index entries and frames of these groups, `FETCHED_AT_ONCE` at once; check many or large ones in a thread.

    `columns`: which late columns the groups have, whose frames are fetched too.
    """
    fetched = FetchedGroups([], {}, {})
    for start in range(0, len(numbers), FETCHED_AT_ONCE):
        wanted = numbers[start : start + FETCHED_AT_ONCE]
        piece = await _fetch_piece(store, run, wanted, columns.late_of(wanted))
        fetched.entries.extend(piece.entries)
        fetched.groups.update(piece.groups)
        fetched.broken.update(piece.broken)
        fetched.late.update(piece.late)
    return fetched


async def _fetch_piece(store: Store, run: str, numbers: Sequence[int], late: Mapping[int, list[str]]) -> FetchedGroups:
    entries = await store.groups.read_entries(run, numbers)
    frames = await read_frames(store, run, entries, late)
    size = size_of(len(frames), sum(len(frame or b"") for frame in frames.values()))
    return await call_beside(size, _open_frames, numbers, entries, frames, late)


async def read_frames(
    store: Store, run: str, entries: Sequence[IndexEntry], late: Mapping[int, list[str]]
) -> dict[str, bytes | None]:
    """Read the frames of groups and of their late columns, by key; None = missing. `late`: columns by number."""
    sizes: dict[str, int] = {}
    for entry in entries:
        own, size = entry.strings.payload_key, int(entry.values["frame_bytes"])
        # A column is smaller than the frame, which has several columns of its length.
        sizes |= {own: size} | {late_column(own, name): size for name in late.get(entry.number, ())}
    return dict(zip(sizes, await store.groups.read_frames(run, sizes), strict=True))


def _open_frames(
    numbers: Sequence[int],
    entries: list[IndexEntry],
    frames: Mapping[str, bytes | None],
    late: Mapping[int, list[str]],
) -> FetchedGroups:
    fetched = FetchedGroups(entries, {}, {})
    fetched.broken.update(dict.fromkeys(set(numbers) - {entry.number for entry in entries}, "missing_index_entry"))
    for entry in entries:
        own, names = entry.strings.payload_key, late.get(entry.number, ())
        added = {name: frames[late_column(own, name)] for name in names}
        try:
            fetched.groups[entry.number] = decode_late(_decode_payload(entry, frames[own]), added, own)
        except BrokenFrame as error:
            fetched.broken[entry.number] = error.name or "broken_frame"
            continue
        if added:
            fetched.late[entry.number] = [
                PlannedColumn(name, late_column(own, name), stored_checksum(frame), len(frame))
                for name, frame in added.items()
                if frame is not None
            ]
    return fetched


def _decode_payload(entry: IndexEntry, frame: bytes | None) -> Group:
    if frame is None and not entry.strings.payload_key:
        raise broken_payload("bad_index_entry", f"index entry {entry.number} has no payload key")
    label = entry.strings
    size = sum(len(name.encode()) for name in (label.group_id, label.prompt_id, label.adapter, label.payload_key))
    if size > LARGEST_STRINGS_BYTES:
        detail = f"index entry {entry.number} has ids of {size} bytes; the maximum is {LARGEST_STRINGS_BYTES}"
        raise broken_payload("bad_index_entry", detail)
    group = decode_payload(entry.strings.payload_key, frame, int(entry.values["crc32c"]))
    if group.lengths.astype("<i4").tobytes() != entry.strings.lengths:
        raise broken_payload("length_mismatch", "the lengths of the frame differ from its index entry")
    codes = int(entry.values["adapter"]), hash_name(entry.strings.adapter), hash_name(group.adapter)
    if len({*codes}) > 1:
        raise broken_payload("adapter_mismatch", "the adapter of the frame differs from its index entry")
    return group


def complete_record(draft: BatchDraft, fetched: FetchedGroups) -> BatchRecord:
    """Return the record of a batch with the strings and the digest of its groups, and with their masked tokens."""
    strings = (entry.strings for entry in fetched.entries)
    labels = [GroupLabel(s.group_id, s.prompt_id, s.adapter, s.payload_key) for s in strings]
    record = draft.complete(labels, _digest_of(fetched, draft.record.step, draft.record.generation))
    if fetched.late:
        names = {column.name for columns in fetched.late.values() for column in columns}
        record = msgspec.structs.replace(record, late_columns=sorted(names))
    if record.stale_token_mask is None:
        return record
    least = record.least_versions
    masked = (count_stale(fetched.groups[entry.number], least[entry.adapter]) for entry in record.groups)
    return msgspec.structs.replace(record, masked_tokens=sum(masked))


def _digest_of(fetched: FetchedGroups, step: int, generation: int) -> str:
    """Return the digest of a batch: its groups, in order, with the checksums of their frames and late columns."""
    state = hashlib.blake2b(f"{generation}/{step}".encode(), digest_size=16)
    for entry in fetched.entries:
        state.update(f"/{entry.strings.group_id}:{int(entry.values['crc32c']):08x}".encode())
        for column in fetched.late.get(entry.number, ()):
            state.update(f"+{column.name}:{column.crc32c:08x}".encode())
    return state.hexdigest()


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class PackedBatch(PackedGroups):
    """A packed batch with its bodies that are written or being written.

    - `content`: hash of all that the bodies are made from
    - `nbytes`: bytes of frames and written bodies
    """

    content: bytes
    nbytes: int
    bodies: dict[tuple[int, Coding], asyncio.Task[memoryview]] = dataclasses.field(default_factory=dict)

    def __del__(self) -> None:
        release(self.planned, self.groups, self.owners, self.grid, self.row_tokens, self.bodies)

    def etag(self, rank: int, form: Form) -> str:
        """Return the ETag of one rank's answer, a hash of all inputs: equal tags, equal bytes."""
        name = hashlib.blake2b(self.content + f"{rank}/{form}".encode(), digest_size=16)
        return f'"{name.hexdigest()}"'


def hash_content(record: BatchRecord, layout: AttachedTrainer) -> bytes:
    """Return a hash of what bodies are made from, besides frames: no byte of a body depends on the rest."""
    inputs = (__version__, layout.dp_world_size, layout.seq_len, layout.pad_to_multiple_of, layout.cost, layout.extras)
    timeless = encode_record(msgspec.structs.replace(record, at_s=0.0, index_end=0))
    return hashlib.blake2b(msgspec.msgpack.encode(inputs) + timeless).digest()


async def pack_beside(record: BatchRecord, fetched: FetchedGroups, layout: AttachedTrainer) -> PackedBatch:
    """Pack as `pack_batch`, many or large groups in a thread."""
    return await call_beside(size_of(len(fetched.groups), fetched.frame_bytes), pack_batch, record, fetched, layout)


def pack_batch(record: BatchRecord, fetched: FetchedGroups, layout: AttachedTrainer) -> PackedBatch:
    """Pack the groups of a record for a layout. Raises `Gone` where a group can no longer be read."""
    frames = {entry.number: entry for entry in fetched.entries}
    planned: list[PlannedGroup] = []
    groups: list[Group] = []
    for entry in record.groups:
        if entry.number not in fetched.groups:
            detail = (
                f"batch {record.batch_id} needs group {entry.group_id!r}, whose bytes are gone: "
                f"{fetched.broken[entry.number]}; attach with on_resume = resample at step {record.step} or an earlier "
                "one to assemble it again without the group"
            )
            raise Gone(detail, name="group_id", value=entry.group_id)
        groups.append(fetched.groups[entry.number])
        values = frames[entry.number].values
        planned.append(
            PlannedGroup(
                group_id=entry.group_id,
                payload_key=entry.payload_key,
                crc32c=int(values["crc32c"]),
                frame_bytes=int(values["frame_bytes"]),
                staleness=entry.staleness,
                times_sampled=entry.times_sampled,
                sampling_weight=entry.weight,
                late_columns=fetched.late.get(entry.number, msgspec.UNSET),
            )
        )
    return PackedBatch.pack(
        record, planned, groups, layout, content=hash_content(record, layout), nbytes=fetched.frame_bytes
    )
