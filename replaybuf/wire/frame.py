"""The binary form of a group: one frame with a small header and 64-byte aligned columns (see `docs/frames.md`).

::

    offset  size  field
         0     4  magic b"RBF1"
         4     4  crc32c of everything after this field
         8     8  length of the whole frame in bytes
        16     4  format version (1)
        20     4  length of the header in bytes
        24     h  header, msgpack: the fields of the group and, per column, dtype, offset, length, codec
       ...        columns in the header's order, each at a multiple of 64 bytes, without overlap

Numbers are little-endian. `replaybuf.wire.column.columns` defines the columns and their compression. Producers convert
once, the service slices, and readers get views into their buffer. A body may hold several frames in a row
(`application/vnd.replaybuf.frames`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import crc32c
import msgspec

from replaybuf.errors import BrokenFrame, TooLarge, counted
from replaybuf.wire.column.columns import (
    ALIGNMENT_BYTES,
    KINDS,
    PART_PREFIX,
    PER_TOKEN,
    Column,
    columns_of,
    compressed,
    kind_of,
    read_columns,
)
from replaybuf.wire.decoding import collector_paused
from replaybuf.wire.group import Group, GroupJson, RolloutJson, group_from_json

T = TypeVar("T")

MEDIA_TYPE = "application/vnd.replaybuf.frames"
MAGIC = b"RBF1"
FORMAT_VERSION = 1
LARGEST_FRAME_BYTES = 1 << 30
"""Bound of a frame with all columns raw."""
LARGEST_HEADER_BYTES = 256 << 10
"""Bounds the time and the memory of metadata: 20 ms and 18 MB for empty lists, 72 bytes per byte of msgpack."""
_SMALL_HEADER_BYTES = 16 << 10

PREFIX = struct.Struct("<4sIQII")
"""Magic, crc32c, length of the frame, format version, length of the header."""
PREFIX_BYTES = PREFIX.size
_MAGIC_AND_CHECKSUM = struct.Struct("<4sI")
_LENGTHS = struct.Struct("<QII")
_CHECKED_FROM = _MAGIC_AND_CHECKSUM.size


def _entry_bound(name: str) -> int:
    """Return the most bytes a column takes in the header: name, dtype, two numbers below 2^32, codec."""
    return 5 + len(PART_PREFIX) + len(name.encode()) + 1 + 4 + 5 + 5 + 5


_LATER = frozenset({"old_logprobs", "prompt_mask", "prompt_logprobs", "proofs", "proof_lengths"})
"""Columns added after format 1. Only frames with them reserve header space, so that other frames keep their bytes."""
_COLUMNS_BOUND = 5 + sum(map(_entry_bound, KINDS.keys() - _LATER))
_PADDING = [bytes(size) for size in range(ALIGNMENT_BYTES)]


class FrameHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The header of a frame: the fields of the group, and where its columns are."""

    group_id: str | None
    prompt_id: str
    policy_version: int
    ticket: str | None
    prompt_index: int | None
    adapter: str
    finish_reasons: list[str | None]
    metadata: dict[str, Any]
    columns: dict[str, Column]


_encode = msgspec.msgpack.Encoder().encode
_decode_header = msgspec.msgpack.Decoder(FrameHeader).decode


def encode_frame(group: Group, *, compress: bool = False) -> bytes:
    """Encode one group. The same group gives the same bytes.

    `compress`: compress token ids and mask with zstd, if that saves at least a tenth; another zstd release may give
    other bytes. Raises `TooLarge` if metadata and finish reasons do not fit the header.
    """
    arrays = columns_of(group)
    fields = _encode(_header_of(group))[:-1]  # without the columns, which come last: an empty map is one byte
    further = (*group.reward_parts, *(_LATER & arrays.keys()))
    start = end = aligned(PREFIX.size + len(fields) + _COLUMNS_BOUND + sum(map(_entry_bound, further)))
    columns: dict[str, tuple[str, int, int, str]] = {}
    per_token: list[Any] = []  # these columns come first; the others are small
    rest: list[Any] = []
    saved = 0
    data: Any
    for name, array in arrays.items():
        data, codec, length = array, "raw", array.nbytes
        if compress and (packed := compressed(name, array)) is not None:
            saved += length - len(packed)
            data, codec, length = packed, "zstd", len(packed)
        gap = -end % ALIGNMENT_BYTES
        columns[name] = ((KINDS.get(name) or kind_of(name)).dtype, end + gap, length, codec)
        (per_token if name in PER_TOKEN else rest).extend((_PADDING[gap], data) if gap else (data,))
        end += gap + length
    header = fields + _encode(columns)
    if len(header) > LARGEST_HEADER_BYTES:
        raise _too_large("header", len(header), LARGEST_HEADER_BYTES)
    if end + saved > LARGEST_FRAME_BYTES:
        raise _too_large("frame", end + saved, LARGEST_FRAME_BYTES)
    filling = bytes(start - PREFIX.size - len(header))
    head = b"".join((_LENGTHS.pack(end, FORMAT_VERSION, len(header)), header, filling))
    pieces = (head, *per_token, b"".join(rest))
    crc = 0
    for piece in pieces:
        crc = crc32c.crc32c(piece, crc)
    return b"".join((_MAGIC_AND_CHECKSUM.pack(MAGIC, crc), *pieces))


def smallest_frame_bytes(rollouts: int) -> int:
    """Return the size of the smallest frame of this many rollouts with advantages; at most 64 bytes too small.

    Each rollout has one prompt and one completion token; no names, metadata or finish reasons.
    """
    shortest = RolloutJson(prompt_ids=[0], completion_ids=[0], inference_logprobs=[0.0], reward=0.0, advantage=0.0)
    group = group_from_json(GroupJson(prompt_id="", policy_version=0, rollouts=[shortest]))
    finish_reasons = rollouts - 1
    end = PREFIX.size + len(_encode(_header_of(group))) - 1 + _COLUMNS_BOUND + finish_reasons
    for column in columns_of(group).values():
        end = aligned(end) + column.nbytes * rollouts
    return end


def decode_frame(frame: bytes | bytearray | memoryview, *, max_bytes: int = LARGEST_FRAME_BYTES) -> Group:
    """Decode one frame into read-only views of `frame`; compressed columns become arrays of their own.

    Raises `BrokenFrame` if magic, length, checksum or a column is wrong. Raises it with the name `max_bytes`, before it
    decompresses anything, if the frame with all columns raw is larger.
    """
    buffer = memoryview(frame).toreadonly()
    header, header_end = open_frame(buffer, _decode_header)
    arrays, parts = read_columns(buffer, header_end, header.columns, len(header.finish_reasons), max_bytes)
    return Group(
        group_id=header.group_id,
        prompt_id=header.prompt_id,
        policy_version=header.policy_version,
        ticket=header.ticket,
        prompt_index=header.prompt_index,
        adapter=header.adapter,
        finish_reasons=tuple(header.finish_reasons),
        metadata=header.metadata,
        reward_parts=parts,
        **arrays,
    )


def is_compressed(frame: bytes | memoryview) -> bool:
    """Check whether a valid frame has compressed columns."""
    buffer = memoryview(frame)
    header = _read_header(buffer[PREFIX.size : _check_prefix(buffer, MAGIC)[0]], _decode_header)
    return any(column.codec != "raw" for column in header.columns.values())


def split_frames(body: bytes | memoryview) -> Iterator[memoryview]:
    """Split a body into its frames. Raises `BrokenFrame` at the first frame with a wrong length."""
    rest = memoryview(body)
    while rest:
        if len(rest) < PREFIX.size:
            detail = f"{counted(len(rest), 'byte')} left; the minimum of a frame is {PREFIX.size}"
            raise BrokenFrame(detail, name="length")
        length = struct.unpack_from("<Q", rest, 8)[0]
        if rest[:4] != MAGIC or not PREFIX.size <= length <= len(rest):
            detail = (
                f"a frame of {counted(length, 'byte')} does not fit the {counted(len(rest), 'byte')} left, or its "
                "magic is wrong"
            )
            raise BrokenFrame(detail, name="length", value=length, bound=len(rest))
        yield rest[:length]
        rest = rest[length:]


def read_length(prefix: bytes | memoryview) -> int:
    """Read the length of a frame from its first `PREFIX_BYTES`. Raises `BrokenFrame` if they start no frame."""
    magic, _, length, _, _ = PREFIX.unpack_from(prefix)
    if magic != MAGIC or length < PREFIX_BYTES:
        detail = (
            f"a frame starts with {magic!r} and a length of {length}; expected {MAGIC!r} and at least {PREFIX_BYTES}"
        )
        raise BrokenFrame(detail, name="length", value=length, bound=PREFIX_BYTES)
    return int(length)


def checksum(frame: bytes | bytearray | memoryview) -> int:
    """Compute the crc32c of `frame`, which belongs at offset 4."""
    return int(crc32c.crc32c(memoryview(frame)[_CHECKED_FROM:]))


def stored_checksum(frame: bytes | memoryview) -> int:
    """Read the crc32c in a frame."""
    return int(struct.unpack_from("<I", frame, 4)[0])


# ---------------------------------------------------------------------- writing


def _header_of(group: Group) -> FrameHeader:
    return FrameHeader(
        group_id=group.group_id,
        prompt_id=group.prompt_id,
        policy_version=group.policy_version,
        ticket=group.ticket,
        prompt_index=group.prompt_index,
        adapter=group.adapter,
        finish_reasons=list(group.finish_reasons),
        metadata=group.metadata,
        columns={},
    )


def _too_large(name: str, value: int, bound: int) -> TooLarge:
    detail = f"the {name} of the group has {value} bytes; the maximum is {bound}"
    return TooLarge(detail, name=name, value=value, bound=bound)


def aligned(offset: int) -> int:
    """Return the next place of a column from an offset on."""
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


# ---------------------------------------------------------------------- reading


def _check_prefix(buffer: memoryview, expected: bytes) -> tuple[int, int]:
    """Return the offset of the header's end, and the checksum of the frame.

    Raises `BrokenFrame`; `expected`: the magic of the kind of frame.
    """
    if len(buffer) < PREFIX.size:
        raise BrokenFrame(f"frame has {counted(len(buffer), 'byte')}; the minimum is {PREFIX.size}", name="length")
    magic, stored, total, version, header_length = PREFIX.unpack_from(buffer)
    if magic != expected:
        raise BrokenFrame(f"frame starts with {bytes(magic)!r}; expected {expected!r}", name="magic")
    if version != FORMAT_VERSION:
        detail = f"frame format version is {version}; this release reads {FORMAT_VERSION}"
        raise BrokenFrame(detail, name="version", value=version, bound=FORMAT_VERSION)
    if total != len(buffer) or header_length > len(buffer) - PREFIX.size:
        detail = f"frame says {counted(total, 'byte')} with a header of {header_length}; it has {len(buffer)}"
        raise BrokenFrame(detail, name="length", value=total, bound=len(buffer))
    if header_length > LARGEST_HEADER_BYTES:
        detail = f"frame header has {header_length} bytes; the maximum is {LARGEST_HEADER_BYTES}"
        raise BrokenFrame(detail, name="header", value=header_length, bound=LARGEST_HEADER_BYTES)
    return PREFIX_BYTES + int(header_length), int(stored)


def open_frame(buffer: memoryview, decode: Callable[[memoryview], T], expected: bytes = MAGIC) -> tuple[T, int]:
    """Check prefix and checksum of a frame; return its header and where that ends. Raises `BrokenFrame`."""
    header_end, stored = _check_prefix(buffer, expected)
    computed = crc32c.crc32c(buffer[_CHECKED_FROM:])
    if stored != computed:
        detail = f"frame checksum is {stored:#010x}; its bytes give {computed:#010x}"
        raise BrokenFrame(detail, name="crc32c", value=stored, bound=computed)
    return _read_header(buffer[PREFIX.size : header_end], decode), header_end


def _read_header(raw: memoryview, decode: Callable[[memoryview], T]) -> T:
    try:
        if len(raw) <= _SMALL_HEADER_BYTES:
            return decode(raw)
        with collector_paused():
            return decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BrokenFrame(f"frame header does not decode: {error}", name="header", value=str(error)) from error
