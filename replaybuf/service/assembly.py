"""From a selection to bytes: fetch and check the frames of a batch, pack them, write the body of each rank.

What is built is a pure function of the batch record, the frames and the trainer's layout (ranks, seq_len, padding), so
any server builds the same bytes again.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from replaybuf.batch import BatchGroup, BatchMeta, Segment, encode_batch, padded_length
from replaybuf.errors import BrokenFrame, Gone
from replaybuf.frame import decode_frame, stored_checksum
from replaybuf.group import Group, truncate
from replaybuf.ledger import BatchEntry, BatchRecord
from replaybuf.packing import Row, pack
from replaybuf.state import BAD_INDEX_ENTRY, Attached
from replaybuf.store import IndexEntry, Store


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """Groups fetched for a batch; `broken` names, by number, the ones that cannot be used and why."""

    entries: list[IndexEntry]
    groups: dict[int, Group]
    broken: dict[int, str]


async def load(store: Store, run: str, numbers: Sequence[int]) -> Loaded:
    """Fetch index entries and frames of these groups and check each one."""
    entries = await store.entries(run, numbers)
    sizes = {entry.strings.payload_key: int(entry.values["frame_bytes"]) for entry in entries}
    frames = dict(zip(sizes, await store.frames(sizes), strict=True))
    groups: dict[int, Group] = {}
    broken = dict.fromkeys(set(numbers) - {entry.number for entry in entries}, "missing_index_entry")
    for entry in entries:
        try:
            groups[entry.number] = _open_frame(entry, frames[entry.strings.payload_key])
        except BrokenFrame as error:
            broken[entry.number] = error.name or "broken_frame"
    return Loaded(entries, groups, broken)


def _open_frame(entry: IndexEntry, frame: bytes | None) -> Group:
    if frame is None and not entry.strings.payload_key:
        raise BrokenFrame(f"index entry {entry.number} names no payload", name=BAD_INDEX_ENTRY)
    if frame is None:
        raise BrokenFrame(f"payload {entry.strings.payload_key} is missing", name="missing_payload")
    try:
        group = decode_frame(frame)
    except BrokenFrame as error:
        reason = "bad_checksum" if error.name == "crc32c" else "broken_frame"
        raise BrokenFrame(error.detail, name=reason) from error
    if stored_checksum(frame) != int(entry.values["crc32c"]):
        raise BrokenFrame("the frame is not the one of its index entry", name="bad_checksum")
    if group.lengths.astype("<i4").tobytes() != entry.strings.lengths:
        raise BrokenFrame("the frame's lengths are not those of its index entry", name="length_mismatch")
    return group


def digest_of(entries: Sequence[IndexEntry], step: int, generation: int) -> str:
    """Name a batch by its content: groups with their checksums, in order."""
    state = hashlib.blake2b(f"{generation}/{step}".encode(), digest_size=16)
    for entry in entries:
        state.update(f"/{entry.strings.group_id}:{int(entry.values['crc32c']):08x}".encode())
    return state.hexdigest()


@dataclasses.dataclass(slots=True)
class Assembled:
    """A batch ready to be served: groups in order, the grid of its ranks, bodies written so far."""

    record: BatchRecord
    groups: list[BatchGroup]
    owners: list[tuple[int, int]]
    grid: list[list[Row]]
    row_tokens: list[list[int]]
    layout: Attached
    bodies: dict[int, bytes] = dataclasses.field(default_factory=dict)

    @property
    def micro_batches(self) -> int:
        """Micro-batches per rank."""
        return len(self.grid[0])

    @property
    def tokens(self) -> int:
        """Tokens of all ranks, without padding."""
        return sum(sum(rank) for rank in self.row_tokens)

    def padded_rows(self) -> list[int]:
        """Tokens of every row with its padding."""
        multiple = self.layout.pad_to_multiple_of
        return [padded_length(tokens, multiple) for rank in self.row_tokens for tokens in rank]


def assemble(record: BatchRecord, groups: dict[int, Group], layout: Attached) -> Assembled:
    """Pack the groups of a record for a layout. Raises `Gone` where a group is no longer there."""
    chosen: list[BatchGroup] = []
    for position, entry in enumerate(record.groups):
        if entry.number not in groups:
            raise Gone(
                f"batch {record.batch_id} needs group {entry.group_id!r}, whose bytes are gone",
                name="group_id",
                value=entry.group_id,
            )
        group = truncate(groups[entry.number], layout.seq_len)
        chosen.append(
            BatchGroup(
                group=group,
                index=position,
                staleness=entry.staleness,
                times_sampled=entry.times_sampled,
                sampling_weight=entry.weight,
            )
        )
    lengths = np.concatenate([entry.group.lengths for entry in chosen]).astype(np.int32)
    owners = [(position, k) for position, entry in enumerate(chosen) for k in range(entry.group.rollouts)]
    grid = pack(lengths, layout.seq_len, layout.dp_world_size)
    row_tokens = [[int(lengths[row].sum()) for row in rank] for rank in grid]
    return Assembled(record, chosen, owners, grid, row_tokens, layout)


def write_body(run: str, batch: Assembled, rank: int) -> bytes:
    """Write the body of one rank; written once, then remembered."""
    if rank in batch.bodies:
        return batch.bodies[rank]
    record, layout = batch.record, batch.layout
    # Groups are numbered per rank, in the order in which the batch holds them.
    present = sorted({batch.owners[item][0] for row in batch.grid[rank] for item in row})
    local = {
        position: dataclasses.replace(batch.groups[position], index=index) for index, position in enumerate(present)
    }
    rows = [[Segment(local[batch.owners[item][0]], batch.owners[item][1]) for item in row] for row in batch.grid[rank]]
    tokens = sum(batch.row_tokens[rank])
    meta = BatchMeta(
        run=run,
        step=record.step,
        generation=record.generation,
        batch_id=record.batch_id,
        digest=record.digest,
        dp_rank=rank,
        dp_world_size=layout.dp_world_size,
        version=record.version,
        strategy=record.strategy,
        options=record.options,
        micro_batches=len(rows),
        adapters=[rows[n][0].group.group.adapter if rows[n] else "" for n in range(len(rows))],
        group_ids=[record.groups[position].group_id for position in present],
        tokens=tokens,
        padding=sum(padded_length(t, layout.pad_to_multiple_of) for t in batch.row_tokens[rank]) - tokens,
        loss_tokens=sum(_loss_tokens(segment) for row in rows for segment in row),
        rollouts=sum(len(row) for row in rows),
        batch_tokens=batch.tokens,
        batch_loss_tokens=sum(int(entry.group.completion_mask.sum()) for entry in batch.groups),
        batch_rollouts=len(batch.owners),
        batch_groups=len(batch.groups),
    )
    body = bytes(encode_batch(meta, rows, pad_to_multiple_of=layout.pad_to_multiple_of))
    batch.bodies[rank] = body
    return body


def entry_in_batch(entry: IndexEntry, version: int, times_sampled: int, weight: float | None) -> BatchEntry:
    """Write down one use of a group."""
    values, strings = entry.values, entry.strings
    index = int(values["prompt_index"])
    return BatchEntry(
        number=entry.number,
        group_id=strings.group_id,
        prompt_id=strings.prompt_id,
        prompt_index=None if index < 0 else index,
        adapter=strings.adapter,
        policy_version=int(values["policy_version"]),
        staleness=version - int(values["policy_version"]),
        times_sampled=times_sampled,
        tokens=int(values["tokens"]),
        payload_key=strings.payload_key,
        weight=weight,
    )


def _loss_tokens(segment: Segment) -> int:
    group, k = segment.group.group, segment.rollout
    start = int(group.completion_lengths[:k].sum())
    return int(group.completion_mask[start : start + int(group.completion_lengths[k])].sum())
