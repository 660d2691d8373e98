"""Late columns: values that a stage adds to a stored group, and the frame that holds them.

::

    offset  size  field
         0     4  magic b"RBC1"
         4     4  crc32c of everything after this field
         8     8  length of the whole frame in bytes
        16     4  format version (1)
        20     4  length of the header in bytes
        24     h  header, msgpack: `group_id`, `lengths`, `columns` with dtype, offset, length and codec
       ...        columns in the header's order, each at a multiple of 64 bytes, without overlap

The stored frame of a group is never changed. Each late column is a frame of its own beside it, and readers put both
together with `add_columns`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import crc32c
import msgspec
import numpy as np
import numpy.typing as npt

from replaybuf.errors import BrokenFrame, Invalid, counted
from replaybuf.wire.column.columns import ALIGNMENT_BYTES, KINDS, PART_PREFIX, Column
from replaybuf.wire.frame import FORMAT_VERSION, PREFIX, PREFIX_BYTES, aligned, open_frame
from replaybuf.wire.group import LARGEST_ROLLOUTS, LARGEST_SCORE, LOGPROBS, OPTIONAL_PER_TOKEN, Group
from replaybuf.wire.group_check import LOGPROB_TOLERANCE
from replaybuf.wire.names import check_string

MAGIC = b"RBC1"
FIXED_NAMES = ("ref_logprobs", "old_logprobs", "teacher_logprobs", "token_advantages", "rewards", "advantages")
"""Late columns with a field of `Group`; others are reward parts, `rewards.<name>`. Index entries hold their order."""
MOST_PARTS = 8
"""Reward parts that the groups of one run may get late: one bit per column and group is kept in memory."""
_VALID = f"{', '.join(FIXED_NAMES)} or {PART_PREFIX}<name>"
_CHECKED_FROM = 8

Values = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LateColumns:
    """Columns for one group.

    `lengths`: completion tokens of each rollout, as the sender of the columns saw them; empty if no column has
    values per token. `columns`: float32 [C] or float64 [n] by name, as in `Group`.
    """

    group_id: str
    lengths: list[int]
    columns: dict[str, Values]


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    group_id: str
    lengths: list[int]
    columns: dict[str, Column]


_encode = msgspec.msgpack.Encoder().encode
_decode_header = msgspec.msgpack.Decoder(_Header).decode


def check_name(name: str) -> None:
    """Raise `Invalid` unless a late column may have this name."""
    check_string("the name of a column", name)
    if name not in FIXED_NAMES and not (name.startswith(PART_PREFIX) and len(name) > len(PART_PREFIX)):
        raise Invalid(f"column is {name!r}; valid: {_VALID}", name="columns", value=name, bound=_VALID)


def check_names(names: Iterable[str]) -> None:
    """Raise `Invalid` unless late columns may have these names, and at least one is given."""
    listed = list(names)
    if not listed or len(listed) > len(FIXED_NAMES) + MOST_PARTS:
        most = len(FIXED_NAMES) + MOST_PARTS
        detail = f"columns has {counted(len(listed), 'name')}; it needs 1 to {most}"
        raise Invalid(detail, name="columns", value=len(listed), bound=[1, most])
    for name in listed:
        check_name(name)


def is_per_token(name: str) -> bool:
    """Return whether a late column has a value per completion token, and not one per rollout."""
    return name in OPTIONAL_PER_TOKEN


def late_columns(group_id: str, columns: Mapping[str, Sequence[Any] | Values]) -> LateColumns:
    """Build late columns from lists or arrays.

    A column with values per token has one list per rollout, any other column one number per rollout. Raises `Invalid`
    for an unknown name, for another shape, and for columns of different lengths.
    """
    check_names(columns)
    lengths: list[int] | None = None
    flat: dict[str, Values] = {}
    for name, values in columns.items():
        if len(values) > LARGEST_ROLLOUTS:
            raise _invalid(name, f"{len(values)} rollouts", f"at most {LARGEST_ROLLOUTS}")
        if not is_per_token(name):
            flat[name] = _numbers(name, values, np.float64)
            continue
        rollouts = [_numbers(f"{name}[{n}]", column, np.float32) for n, column in enumerate(values)]
        own = [len(rollout) for rollout in rollouts]
        if lengths is not None and own != lengths:
            raise _invalid(name, "other lengths than the columns before it", "the same lengths in every column")
        lengths, flat[name] = own, np.concatenate(rollouts) if rollouts else np.empty(0, np.float32)
    return LateColumns(group_id, lengths or [], flat)


def _numbers(name: str, values: Any, kind: type[np.floating[Any]]) -> Values:
    try:
        with np.errstate(over="ignore"):  # an overflow becomes infinity, which `check_columns` rejects
            array = np.asarray(values, kind)
    except (TypeError, ValueError):
        array = np.empty((0, 0))
    if array.ndim != 1:
        raise _invalid(name, "not a list of numbers", "one number per completion token or per rollout")
    return array


def _invalid(name: str, value: str, bound: str) -> Invalid:
    path = f"columns.{name}"
    return Invalid(f"{path}: {value}; needed: {bound}", name=path, value=value, bound=bound)


# ---------------------------------------------------------------------- frames


def encode_columns(late: LateColumns) -> bytes:
    """Encode late columns as one frame. The same columns give the same bytes."""
    arrays = [np.ascontiguousarray(values, _dtype(name)) for name, values in late.columns.items()]
    places: dict[str, Column] = {}
    header_bytes = len(_encode(_Header(late.group_id, late.lengths, {}))) + sum(map(_entry_bound, late.columns))
    start = end = aligned(PREFIX_BYTES + header_bytes)
    pieces: list[bytes] = []
    for name, array in zip(late.columns, arrays, strict=True):
        offset = aligned(end)
        pieces += [bytes(offset - end), array.tobytes()]
        places[name] = Column(array.dtype.str, offset, array.nbytes)  # type: ignore[arg-type]
        end = offset + array.nbytes
    header = _encode(_Header(late.group_id, late.lengths, places))
    filling = bytes(start - PREFIX_BYTES - len(header))
    body = b"".join((PREFIX.pack(MAGIC, 0, end, FORMAT_VERSION, len(header))[_CHECKED_FROM:], header, filling, *pieces))
    return b"".join((MAGIC, int(crc32c.crc32c(body)).to_bytes(4, "little"), body))


def decode_columns(frame: bytes | memoryview) -> LateColumns:
    """Decode one frame into read-only views of it. Raises `BrokenFrame`, and `Invalid` for a wrong name."""
    buffer = memoryview(frame).toreadonly()
    header, header_end = open_frame(buffer, _decode_header, MAGIC)
    check_names(header.columns)
    if len(header.lengths) > LARGEST_ROLLOUTS:
        detail = f"frame has {len(header.lengths)} lengths; the maximum is {LARGEST_ROLLOUTS}"
        raise BrokenFrame(detail, name="lengths", value=len(header.lengths), bound=LARGEST_ROLLOUTS)
    arrays: dict[str, Values] = {}
    end = header_end
    for name, column in header.columns.items():
        dtype = _dtype(name)
        fits = end <= column.offset and column.offset + column.length <= len(buffer)
        whole = not (column.offset % ALIGNMENT_BYTES or column.length % dtype.itemsize)
        if not (fits and whole) or column.dtype != dtype.str or column.codec != "raw":
            detail = (
                f"column {name} is {column.codec} {column.dtype} with {counted(column.length, 'byte')} at offset "
                f"{column.offset}; "
                f"it must be raw {dtype.str} at a multiple of {ALIGNMENT_BYTES}, behind byte {end}, and end by byte "
                f"{len(buffer)}"
            )
            raise BrokenFrame(detail, name=name, value=column.offset, bound=len(buffer))
        end = column.offset + column.length
        arrays[name] = np.frombuffer(buffer[column.offset : end], dtype)
    return LateColumns(header.group_id, header.lengths, arrays)


def _dtype(name: str) -> np.dtype[Any]:
    return KINDS[name if name in KINDS else "rewards"].numpy


def _entry_bound(name: str) -> int:
    """Return the most bytes that a column takes in the header: name, dtype, two numbers, codec."""
    return 5 + len(name.encode()) + 1 + 4 + 9 + 9 + 5


# ---------------------------------------------------------------------- beside their group


def check_columns(group: Group, late: LateColumns) -> None:
    """Check late columns against their group. Raises `Invalid` for another length and for a value out of bounds."""
    lengths = group.completion_lengths.tolist()
    for name, values in late.columns.items():
        if not is_per_token(name):
            if len(values) != group.rollouts:
                raise _invalid(name, counted(len(values), "value"), f"one per rollout, {group.rollouts}")
        elif late.lengths != lengths or len(values) != sum(lengths):
            raise _wrong_length(name, late.lengths, lengths)
        _check_values(name, values)


def _wrong_length(name: str, counts: list[int], lengths: list[int]) -> Invalid:
    if len(counts) != len(lengths):
        return _invalid(name, counted(len(counts), "rollout"), f"one list per rollout, {len(lengths)}")
    pairs = enumerate(zip(counts, lengths, strict=True))
    number, (own, needed) = next(((n, pair) for n, pair in pairs if pair[0] != pair[1]), (0, (counts[0], lengths[0])))
    return _invalid(f"{name}[{number}]", counted(own, "value"), f"one per completion token, {needed}")


def _check_values(name: str, values: Values) -> None:
    if not len(values):
        return
    low, high = float(values.min()), float(values.max())  # NaN if one value is
    if not (math.isfinite(low) and math.isfinite(high) and max(-low, high) <= LARGEST_SCORE):
        raise _invalid(name, "NaN, infinity or a value beyond float32", "finite values")
    if name in LOGPROBS and high > LOGPROB_TOLERANCE:
        raise _invalid(name, f"a logprob of {high:.6g}", f"at most {LOGPROB_TOLERANCE}")


def add_columns(group: Group, columns: Mapping[str, Values]) -> Group:
    """Return the group with late columns, which replace columns of the same name."""
    fields: dict[str, Any] = {name: values for name, values in columns.items() if name in FIXED_NAMES}
    parts = {name.removeprefix(PART_PREFIX): values for name, values in columns.items() if name not in FIXED_NAMES}
    return msgspec.structs.replace(group, **fields, reward_parts=group.reward_parts | parts)


def find_column(group: Group, name: str) -> Values | None:
    """Return a column that a late column may have the name of; None if the group has none."""
    values: Values | None = (
        getattr(group, name) if name in FIXED_NAMES else group.reward_parts.get(name.removeprefix(PART_PREFIX))
    )
    return values
