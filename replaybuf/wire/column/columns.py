"""The columns of a frame: their types, compression, views and checks.

A column with codec "raw" holds its numbers, with codec "zstd" a zstd frame of them. Only columns with a value per token
may be compressed: the raw columns of lengths then give the decompressed size before memory is allocated.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from replaybuf.errors import BrokenFrame, counted
from replaybuf.wire.group import LARGEST_REWARD_PARTS, LARGEST_ROLLOUTS, OPTIONAL_PER_TOKEN, Group

ALIGNMENT_BYTES = 64
COMPRESSION_LEVEL = 1
COMPRESSED_FROM_BYTES = 1024
"""Smaller columns stay raw."""
WORTH_IT = 0.9
"""A column stays raw unless zstd reduces it to this share."""

Columns: TypeAlias = dict[str, npt.NDArray[Any]]
_Per: TypeAlias = Literal["prompt token", "completion token", "rollout", "span", "proof byte"]


class Kind(NamedTuple):
    """The type of a column: numpy dtype, bytes per value, and its unit (`per`)."""

    dtype: str
    numpy: np.dtype[Any]
    value_bytes: int
    per: _Per


def _kind(dtype: str, per: _Per, numbers: int = 1) -> Kind:
    item = np.dtype(dtype)
    return Kind(dtype, item, item.itemsize * numbers, per)


KINDS = {
    "prompt_ids": _kind("<i4", "prompt token"),
    "completion_ids": _kind("<i4", "completion token"),
    "completion_mask": _kind("|b1", "completion token"),
    "inference_logprobs": _kind("<f4", "completion token"),
    **{name: _kind("<f4", "completion token") for name in OPTIONAL_PER_TOKEN},
    "prompt_mask": _kind("|b1", "prompt token"),
    "prompt_logprobs": _kind("<f4", "prompt token"),
    "prompt_lengths": _kind("<i4", "rollout"),
    "completion_lengths": _kind("<i4", "rollout"),
    "rewards": _kind("<f8", "rollout"),
    "advantages": _kind("<f8", "rollout"),
    "temperatures": _kind("<f4", "rollout"),
    "version_spans": _kind("<i4", "span", 4),
    "proof_lengths": _kind("<i4", "rollout"),
    "proofs": _kind("|u1", "proof byte"),
}
"""Columns by name, those with a value per token first. A frame also has reward parts, `rewards.<name>`."""
_BYTE = np.dtype(np.uint8)
_MASKS = frozenset({"completion_mask", "prompt_mask"})
PART_PREFIX = "rewards."
PER_TOKEN = frozenset(name for name, kind in KINDS.items() if kind.per.endswith("token"))
OPTIONAL = frozenset({*OPTIONAL_PER_TOKEN, "prompt_mask", "prompt_logprobs", "advantages", "proofs", "proof_lengths"})
_REQUIRED = KINDS.keys() - OPTIONAL
_LENGTH_BYTES, _SPAN_BYTES = KINDS["prompt_lengths"].value_bytes, KINDS["version_spans"].value_bytes
_COMPRESSED = frozenset({"prompt_ids", "completion_ids", "completion_mask", "prompt_mask"})
"""Columns that producers compress: zstd cannot compress logprobs."""
_LARGEST_WINDOW_BYTES = 8 << 20


class Column(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Place of a column: numpy dtype, offset and length in bytes from the start of the frame, codec."""

    dtype: Literal["<i4", "<f4", "<f8", "|b1", "|u1"]
    offset: Annotated[int, msgspec.Meta(ge=0)]
    length: Annotated[int, msgspec.Meta(ge=0)]
    codec: Literal["raw", "zstd"] = "raw"


def kind_of(name: str) -> Kind:
    """Look up the type of a column. Raises `BrokenFrame` for an unknown name."""
    if name in KINDS:
        return KINDS[name]
    if not name.startswith(PART_PREFIX):
        raise BrokenFrame(f"frame has an unknown column {name!r}", name="columns", value=name)
    return KINDS["rewards"]


def columns_of(group: Group) -> Columns:
    """List the columns of a group in the order of a frame."""
    arrays: Columns = {}
    for name, kind in KINDS.items():
        values = getattr(group, name)
        if values is not None:
            arrays[name] = np.ascontiguousarray(values, kind.numpy)
    for name, values in sorted(group.reward_parts.items()):
        arrays[PART_PREFIX + name] = np.ascontiguousarray(values, KINDS["rewards"].numpy)
    return arrays


def compressed(name: str, array: npt.NDArray[Any]) -> bytes | None:
    """Compress a column; None = it stays raw."""
    if name not in _COMPRESSED or array.nbytes < COMPRESSED_FROM_BYTES:
        return None
    packed = zstandard.ZstdCompressor(level=COMPRESSION_LEVEL).compress(array.view(np.uint8).data)
    return packed if len(packed) <= WORTH_IT * array.nbytes else None


def read_columns(
    buffer: memoryview, start: int, columns: dict[str, Column], finish_reasons: int, max_bytes: int
) -> tuple[Columns, Columns]:
    """View the columns of a frame after offset `start`; compressed columns become arrays of their own.

    Returns the columns of `KINDS`, with the names and shapes of a group's fields, and the reward parts. Raises
    `BrokenFrame` if a column is missing, misplaced or not as long as the columns of lengths require, or if the frame
    with all columns raw has more than `max_bytes`.
    """
    if not columns.keys() >= _REQUIRED:
        missing = sorted(_REQUIRED - columns.keys())
        raise BrokenFrame(f"frame lacks the columns {missing}", name="columns", value=sorted(columns))
    if len(columns) > len(KINDS) + LARGEST_REWARD_PARTS:
        detail = f"frame has {counted(len(columns), 'column')}; the maximum is {len(KINDS) + LARGEST_REWARD_PARTS}"
        raise BrokenFrame(detail, name="columns", value=len(columns), bound=len(KINDS) + LARGEST_REWARD_PARTS)
    values = _count_values(buffer, columns, finish_reasons)
    arrays, parts, packed = _view_raw(buffer, start, columns, values)
    if packed or len(buffer) > max_bytes:
        _check_size(len(buffer), packed, values, max_bytes)
    for name, column in packed.items():
        arrays[name] = _decompressed(buffer, name, column, values[KINDS[name].per])
    for name in _MASKS & arrays.keys():
        mask = arrays[name].view(_BYTE)
        if len(mask) and mask.item(mask.argmax()) > 1:
            raise BrokenFrame(f"column {name} holds a byte other than 0 and 1", name=name)
    arrays["version_spans"] = arrays["version_spans"].reshape(-1, 4)
    return arrays, parts


def _count_values(buffer: memoryview, columns: dict[str, Column], finish_reasons: int) -> dict[str, int]:
    """Count rollouts and tokens, from the columns of lengths."""
    prompt_lengths = _lengths(buffer, "prompt_lengths", columns)
    completion_lengths = _lengths(buffer, "completion_lengths", columns)
    rollouts = len(prompt_lengths)
    if not finish_reasons == len(completion_lengths) == rollouts:
        detail = (
            f"frame has {rollouts} prompt_lengths, {len(completion_lengths)} completion_lengths and {finish_reasons} "
            "finish_reasons; it needs one of each per rollout"
        )
        raise BrokenFrame(detail, name="rollouts", value=rollouts)
    values = {"rollout": rollouts, "prompt token": sum(prompt_lengths), "completion token": sum(completion_lengths)}
    if "proofs" in columns or "proof_lengths" in columns:
        if not columns.keys() >= {"proofs", "proof_lengths"}:
            raise BrokenFrame("frame has only one of the columns proofs and proof_lengths", name="proofs")
        values["proof byte"] = sum(_lengths(buffer, "proof_lengths", columns))
    return values


def _lengths(buffer: memoryview, name: str, columns: dict[str, Column]) -> tuple[int, ...]:
    column = columns[name]
    count = column.length // _LENGTH_BYTES
    if count > LARGEST_ROLLOUTS:
        detail = f"frame has {counted(count, 'rollout')}; the maximum is {LARGEST_ROLLOUTS}"
        raise BrokenFrame(detail, name="rollouts", value=count)
    if column.offset + column.length > len(buffer) or column.length % _LENGTH_BYTES:
        raise _misplaced(name, column, 0, len(buffer))
    lengths = struct.unpack_from(f"<{count}i", buffer, column.offset)
    if lengths and min(lengths) < 0:
        raise BrokenFrame(f"column {name} holds a negative length", name=name, value=min(lengths), bound=0)
    return lengths


def _view_raw(
    buffer: memoryview, end: int, columns: dict[str, Column], values: dict[str, int]
) -> tuple[Columns, Columns, dict[str, Column]]:
    """View the raw columns and list the compressed ones. Each starts after the one before, the first after `end`."""
    arrays: Columns = {}
    parts: Columns = {}
    packed = {}
    size = len(buffer)
    # One view for all columns: a memoryview per column would be ten objects per group for the garbage collector.
    owner = buffer.obj
    whole = np.frombuffer(owner if isinstance(owner, bytes) and len(owner) == size else buffer, np.uint8)
    for name, column in columns.items():
        dtype, numpy_dtype, value_bytes, per = KINDS[name] if name in KINDS else kind_of(name)
        offset, length = column.offset, column.length
        if column.dtype != dtype:
            raise BrokenFrame(f"column {name} has dtype {column.dtype!r}; expected {dtype!r}", name=name)
        if offset < end or offset + length > size or offset % ALIGNMENT_BYTES:
            raise _misplaced(name, column, end, size)
        end = offset + length
        if column.codec != "raw":
            packed[name] = column
            continue
        needed = (values[per] if per in values else length // _SPAN_BYTES) * value_bytes
        if length != needed:
            detail = f"column {name} has {counted(length, 'byte')}; its rollouts need {needed}"
            raise BrokenFrame(detail, name=name, value=length, bound=needed)
        view = whole[offset:end].view(numpy_dtype)
        if name in KINDS:
            arrays[name] = view
        else:
            parts[name.removeprefix(PART_PREFIX)] = view
    for name in packed:
        if name not in PER_TOKEN:
            raise BrokenFrame(f"column {name} has codec 'zstd'; it must be 'raw'", name=name, value="zstd")
    return arrays, parts, packed


def _misplaced(name: str, column: Column, start: int, size: int) -> BrokenFrame:
    detail = (
        f"column {name} has {counted(column.length, 'byte')} at offset {column.offset}; the part before it ends at "
        f"{start}, the frame at {size}; columns hold whole values and start at multiples of {ALIGNMENT_BYTES}"
    )
    return BrokenFrame(detail, name=name, value=column.offset, bound=size)


def _check_size(size: int, packed: dict[str, Column], values: dict[str, int], max_bytes: int) -> None:
    for name, column in packed.items():
        size += values[KINDS[name].per] * KINDS[name].value_bytes - column.length
    if size > max_bytes:
        detail = f"frame has {counted(size, 'byte')} with all columns raw; the maximum is {max_bytes}"
        raise BrokenFrame(detail, name="max_bytes", value=size, bound=max_bytes)


def _decompressed(buffer: memoryview, name: str, column: Column, values: int) -> npt.NDArray[Any]:
    """Decompress a column of `values` values; check its size before memory is allocated."""
    size = values * KINDS[name].value_bytes
    raw = buffer[column.offset : column.offset + column.length]
    try:
        header = zstandard.get_frame_parameters(raw)
        if header.content_size != size or header.window_size > max(size, _LARGEST_WINDOW_BYTES):
            detail = (
                f"column {name} decompresses to {counted(header.content_size, 'byte')} with a window of "
                f"{header.window_size}; its "
                f"rollouts need {counted(size, 'byte')}, and the maximum window is {_LARGEST_WINDOW_BYTES}"
            )
            raise BrokenFrame(detail, name=name, value=header.content_size, bound=size)
        unpacked = zstandard.ZstdDecompressor().decompress(raw, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BrokenFrame(f"column {name} does not decompress: {error}", name=name) from error
    return np.frombuffer(unpacked, KINDS[name].numpy)
