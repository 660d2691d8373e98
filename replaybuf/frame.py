"""The binary form of a group: one frame with a small header and 64-byte aligned columns.

::

    offset  size  field
         0     4  magic b"RBF1"
         4     4  crc32c of everything after this field
         8     8  length of the whole frame in bytes
        16     4  format version (1)
        20     4  length of the header in bytes
        24     h  header, msgpack: the fields of the group and, per column, dtype, offset, length, codec
       ...        columns, each starting at a multiple of 64 bytes

Numbers are little-endian. Producers convert once; the service slices; readers get views into the buffer they passed.
Frames may stand one after another (`application/vnd.replaybuf.frames`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import crc32c
import msgspec
import numpy as np
import numpy.typing as npt

from replaybuf.errors import BrokenFrame
from replaybuf.group import Group

MEDIA_TYPE = "application/vnd.replaybuf.frames"
MAGIC = b"RBF1"
FORMAT_VERSION = 1
ALIGNMENT_BYTES = 64

_PREFIX = struct.Struct("<4sIQII")
_CHECKED_FROM = 8
_MAX_ROLLOUTS = 1 << 20

_DTYPES: dict[str, str] = {
    "prompt_ids": "<i4",
    "prompt_lengths": "<i4",
    "completion_ids": "<i4",
    "completion_lengths": "<i4",
    "completion_mask": "|b1",
    "inference_logprobs": "<f4",
    "ref_logprobs": "<f4",
    "teacher_logprobs": "<f4",
    "rewards": "<f8",
    "advantages": "<f8",
    "version_spans": "<i4",
    "temperatures": "<f4",
}
_OPTIONAL = frozenset({"ref_logprobs", "teacher_logprobs", "advantages"})
_PART_PREFIX = "rewards."

_PART_DTYPE = "<f8"


class Column(msgspec.Struct, frozen=True, array_like=True):
    """Where a column lies: numpy dtype, offset and length in bytes from the start of the frame, codec."""

    dtype: str
    offset: int
    length: int
    codec: str = "raw"


class FrameHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a frame says besides its columns."""

    group_id: str | None
    prompt_id: str
    policy_version: int
    ticket: str | None
    prompt_index: int | None
    adapter: str
    finish_reasons: list[str | None]
    metadata: dict[str, Any]
    columns: dict[str, Column]


_header_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(FrameHeader)


def encode_frame(group: Group) -> bytes:
    """Encode one group. The same group gives the same bytes."""
    arrays = _columns_of(group)
    header = b""
    columns: dict[str, Column] = {}
    # Offsets depend on the header's length and its length on the offsets: reserve more until it fits.
    start = ALIGNMENT_BYTES
    while True:
        columns = _lay_out(arrays, start)
        header = _header_encoder.encode(_header_of(group, columns))
        needed = _aligned(_PREFIX.size + len(header))
        if needed <= start:
            break
        start = needed
    last = list(columns.values())[-1]
    total = last.offset + last.length
    frame = bytearray(total)
    _PREFIX.pack_into(frame, 0, MAGIC, 0, total, FORMAT_VERSION, len(header))
    frame[_PREFIX.size : _PREFIX.size + len(header)] = header
    for name, column in columns.items():
        frame[column.offset : column.offset + column.length] = arrays[name].view(np.uint8).data
    struct.pack_into("<I", frame, 4, checksum(frame))
    return bytes(frame)


def decode_frame(frame: bytes | bytearray | memoryview, *, verify: bool = True) -> Group:
    """Decode one frame into read-only views of `frame`.

    Raises `BrokenFrame` where magic, length, checksum or a column is wrong. `verify=False` skips the checksum alone.
    """
    buffer = memoryview(frame).toreadonly()
    header_length = _check_prefix(buffer)
    stored = struct.unpack_from("<I", buffer, 4)[0]
    if verify and stored != checksum(buffer):
        raise BrokenFrame(
            f"frame checksum is {stored:#010x}; its bytes give {checksum(buffer):#010x}",
            name="crc32c",
            value=stored,
            bound=checksum(buffer),
        )
    try:
        header = _header_decoder.decode(buffer[_PREFIX.size : _PREFIX.size + header_length])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BrokenFrame(f"frame header does not decode: {error}", name="header", value=str(error)) from error
    arrays = {name: _view(buffer, name, column) for name, column in header.columns.items()}
    missing = _DTYPES.keys() - _OPTIONAL - arrays.keys()
    if missing:
        raise BrokenFrame(f"frame lacks the columns {sorted(missing)}", name="columns", value=sorted(arrays))
    _check_shapes(header, arrays)
    return Group(
        group_id=header.group_id,
        prompt_id=header.prompt_id,
        policy_version=header.policy_version,
        ticket=header.ticket,
        prompt_index=header.prompt_index,
        adapter=header.adapter,
        finish_reasons=tuple(header.finish_reasons),
        metadata=header.metadata,
        reward_parts={n.removeprefix(_PART_PREFIX): a for n, a in arrays.items() if n.startswith(_PART_PREFIX)},
        version_spans=arrays["version_spans"].reshape(-1, 4),
        **{name: arrays[name] for name in _DTYPES if name in arrays and name != "version_spans"},
    )


def split_frames(body: bytes | memoryview) -> Iterator[memoryview]:
    """Cut a body of frames standing one after another. Raises `BrokenFrame` at the first one whose length is wrong."""
    rest = memoryview(body)
    while rest:
        if len(rest) < _PREFIX.size:
            raise BrokenFrame(f"{len(rest)} bytes are left over; a frame has at least {_PREFIX.size}", name="length")
        length = struct.unpack_from("<Q", rest, 8)[0]
        if rest[:4] != MAGIC or not _PREFIX.size <= length <= len(rest):
            raise BrokenFrame(
                f"a frame of {length} bytes does not fit the {len(rest)} bytes left, or its magic is wrong",
                name="length",
                value=length,
                bound=len(rest),
            )
        yield rest[:length]
        rest = rest[length:]


def checksum(frame: bytes | bytearray | memoryview) -> int:
    """Compute the crc32c that belongs at offset 4 of `frame`."""
    return int(crc32c.crc32c(memoryview(frame)[_CHECKED_FROM:]))


def stored_checksum(frame: bytes) -> int:
    """Read the crc32c that a frame carries."""
    return int(struct.unpack_from("<I", frame, 4)[0])


def _columns_of(group: Group) -> dict[str, npt.NDArray[Any]]:
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, dtype in _DTYPES.items():
        values = getattr(group, name)
        if values is not None:
            arrays[name] = np.ascontiguousarray(values, dtype).reshape(-1)
    for name, values in sorted(group.reward_parts.items()):
        arrays[_PART_PREFIX + name] = np.ascontiguousarray(values, _PART_DTYPE)
    return arrays


def _header_of(group: Group, columns: dict[str, Column]) -> FrameHeader:
    return FrameHeader(
        group_id=group.group_id,
        prompt_id=group.prompt_id,
        policy_version=group.policy_version,
        ticket=group.ticket,
        prompt_index=group.prompt_index,
        adapter=group.adapter,
        finish_reasons=list(group.finish_reasons),
        metadata=group.metadata,
        columns=columns,
    )


def _lay_out(arrays: dict[str, npt.NDArray[Any]], start: int) -> dict[str, Column]:
    columns = {}
    offset = start
    for name, array in arrays.items():
        columns[name] = Column(array.dtype.str, offset, array.nbytes)
        offset = _aligned(offset + array.nbytes)
    return columns


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _check_prefix(buffer: memoryview) -> int:
    if len(buffer) < _PREFIX.size:
        raise BrokenFrame(f"frame has {len(buffer)} bytes; at least {_PREFIX.size} are needed", name="length")
    magic, _, total, version, header_length = _PREFIX.unpack_from(buffer)
    if magic != MAGIC:
        raise BrokenFrame(f"frame starts with {bytes(magic)!r}; expected {MAGIC!r}", name="magic")
    if version != FORMAT_VERSION:
        raise BrokenFrame(
            f"frame format version is {version}; this release reads {FORMAT_VERSION}",
            name="version",
            value=version,
            bound=FORMAT_VERSION,
        )
    if total != len(buffer) or header_length > len(buffer) - _PREFIX.size:
        raise BrokenFrame(
            f"frame says {total} bytes with a header of {header_length}; it has {len(buffer)}",
            name="length",
            value=total,
            bound=len(buffer),
        )
    return int(header_length)


def _view(buffer: memoryview, name: str, column: Column) -> npt.NDArray[Any]:
    expected = _PART_DTYPE if name.startswith(_PART_PREFIX) else _DTYPES.get(name)
    if column.dtype != expected:
        raise BrokenFrame(f"column {name} has dtype {column.dtype!r}; expected {expected!r}", name=name)
    if column.codec != "raw":
        raise BrokenFrame(f"column {name} has codec {column.codec!r}; this release reads 'raw'", name=name)
    dtype = np.dtype(column.dtype)
    inside = column.offset >= 0 and column.length >= 0 and column.offset + column.length <= len(buffer)
    if not inside or column.length % dtype.itemsize or column.offset % ALIGNMENT_BYTES:
        raise BrokenFrame(
            f"column {name} lies at {column.offset} with {column.length} bytes; the frame has {len(buffer)}, "
            f"columns start at multiples of {ALIGNMENT_BYTES}",
            name=name,
            value=column.length,
            bound=len(buffer),
        )
    return np.frombuffer(buffer, dtype, column.length // dtype.itemsize, column.offset)


def _check_shapes(header: FrameHeader, arrays: dict[str, npt.NDArray[Any]]) -> None:
    rollouts = len(arrays["prompt_lengths"])
    if rollouts > _MAX_ROLLOUTS:
        raise BrokenFrame(f"frame has {rollouts} rollouts; at most {_MAX_ROLLOUTS}", name="rollouts", value=rollouts)
    for lengths in ("prompt_lengths", "completion_lengths"):
        if len(arrays[lengths]) and int(arrays[lengths].min()) < 0:
            raise BrokenFrame(f"column {lengths} holds a negative length", name=lengths)
    completion_tokens = int(arrays["completion_lengths"].sum(dtype=np.int64))
    expected = dict.fromkeys(("completion_ids", "completion_mask", "inference_logprobs"), completion_tokens)
    expected |= {name: completion_tokens for name in ("ref_logprobs", "teacher_logprobs") if name in arrays}
    expected |= {"prompt_ids": int(arrays["prompt_lengths"].sum(dtype=np.int64))}
    expected |= dict.fromkeys(("completion_lengths", "rewards", "temperatures"), rollouts)
    expected |= {name: rollouts for name in arrays if name == "advantages" or name.startswith(_PART_PREFIX)}
    for name, length in expected.items():
        if len(arrays[name]) != length:
            raise BrokenFrame(
                f"column {name} has {len(arrays[name])} values; its rollouts need {length}",
                name=name,
                value=len(arrays[name]),
                bound=length,
            )
    if len(arrays["completion_mask"]) and int(arrays["completion_mask"].view(np.uint8).max()) > 1:
        raise BrokenFrame("column completion_mask holds a byte other than 0 and 1", name="completion_mask")
    if len(header.finish_reasons) != rollouts or len(arrays["version_spans"]) % 4:
        raise BrokenFrame("finish_reasons or version_spans do not match the number of rollouts", name="rollouts")
