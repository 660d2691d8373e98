"""Safetensors file in memory: its header, and one view per tensor, for writing and for reading."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from replaybuf.errors import Malformed, counted
from replaybuf.wire.group import Bools, Int32s

INT32, FLOAT32, BOOL = np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.bool_)
_NAMES = {INT32: "I32", FLOAT32: "F32", BOOL: "BOOL"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_LENGTH = struct.Struct("<Q")
_PIECE = 1 << 18


class Field(NamedTuple):
    """One tensor of every row, by name: its type and its length in each row."""

    name: str
    dtype: np.dtype[Any]
    lengths: Sequence[int]


class NewFile(NamedTuple):
    """A file whose data is not initialised: all tensors of four bytes, then those of one.

    `word_starts`, `flag_starts`: where each row starts in them. A row holds its tensors in the order of the fields.
    """

    whole: memoryview
    words: Int32s
    flags: Bools
    word_starts: list[int]
    flag_starts: list[int]


def allocate(metadata: Mapping[str, str], fields: Sequence[Field], rows: int) -> NewFile:
    """Write the header of a file with the tensors `ROW.NAME`."""
    # safetensors allows no gaps; 4-byte columns first keep every column aligned.
    wide, narrow = ([field for field in fields if field.dtype.itemsize == width] for width in (4, 1))
    encoded_metadata = (f'{json.dumps(name)}:"{_escape(text)}"' for name, text in metadata.items())
    parts = [f'"__metadata__":{{{",".join(encoded_metadata)}}}']
    wide_starts, end = _describe(parts, wide, 4, rows, 0)
    narrow_starts, last = _describe(parts, narrow, 1, rows, end)
    encoded = f"{{{','.join(parts)}}}".encode()
    encoded += b" " * (-len(encoded) % 8)
    start = _LENGTH.size + len(encoded)
    body = np.empty(start + last, np.uint8)
    whole = body.data
    _LENGTH.pack_into(whole, 0, len(encoded))
    whole[_LENGTH.size : start] = encoded
    words, rest = body[start : start + end].view(np.int32), body[start + end :].view(np.bool_)
    return NewFile(whole, words, rest, [at // 4 for at in wide_starts], [at - end for at in narrow_starts])


def _describe(parts: list[str], fields: Sequence[Field], width: int, rows: int, end: int) -> tuple[list[int], int]:
    """Add the header entries of tensors from byte `end` on; return the start of each row, and the end."""
    starts = []
    # One format per row: one per tensor takes three times as long.
    entry = '"%d.{}":{{"dtype":"{}","shape":[%d],"data_offsets":[%d,%d]}}'
    row_format = ",".join(entry.format(field.name, _NAMES[field.dtype]) for field in fields)
    lengths = list(zip(*(field.lengths for field in fields), strict=True))
    for row in range(rows if fields else 0):
        starts.append(end)
        numbers: list[int] = []
        for length in lengths[row]:
            begin, end = end, end + width * length
            numbers += (row, length, begin, end)
        parts.append(row_format % tuple(numbers))
    return starts, end


def _escape(text: str) -> str:
    """Escape a text for a JSON string, in pieces: the whole of 16 MiB would hold the interpreter for 0.1 s."""
    pieces = (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))
    return "".join(json.dumps(piece)[1:-1] for piece in pieces)


def split_file(body: bytes | bytearray | memoryview) -> tuple[dict[str, Any], memoryview]:
    """Return the header and the data behind it. Raises `Malformed`."""
    buffer = memoryview(body).toreadonly()
    if len(buffer) < _LENGTH.size:
        raise Malformed(f"batch body has {counted(len(buffer), 'byte')}; the minimum is {_LENGTH.size}", name="body")
    length = _LENGTH.unpack_from(buffer)[0]
    if length > len(buffer) - _LENGTH.size:
        detail = f"batch header says {counted(length, 'byte')}; the body has {len(buffer)}"
        raise Malformed(detail, name="body", value=length)
    try:
        header = msgspec.json.decode(buffer[_LENGTH.size : _LENGTH.size + length], type=dict[str, Any])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Malformed(f"batch header does not decode: {error}", name="body") from error
    return header, buffer[_LENGTH.size + length :]


def view_tensor(data: memoryview, entry: dict[str, Any]) -> npt.NDArray[Any]:
    """View the tensor of a header entry. Raises `ValueError`, `KeyError` and more for a wrong entry."""
    start, end = entry["data_offsets"]
    dtype = _DTYPES[entry["dtype"]]
    if not 0 <= start <= end <= len(data) or end - start != dtype.itemsize * entry["shape"][0]:
        raise ValueError(f"tensor bytes {start}..{end} do not fit a body of {counted(len(data), 'byte')}")
    return np.frombuffer(data, dtype, entry["shape"][0], start)
