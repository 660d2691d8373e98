"""Safetensors file in memory: its header, and one view per tensor, for writing and for reading."""

from __future__ import annotations

import json
import struct
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from replaybuf.errors import Malformed, counted

INT32, FLOAT32, BOOL = np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.bool_)
_NAMES = {INT32: "I32", FLOAT32: "F32", BOOL: "BOOL"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_LENGTH = struct.Struct("<Q")
_PIECE = 1 << 18
Key: TypeAlias = tuple[int, str]
"""Micro-batch and name of a tensor."""
Shapes: TypeAlias = dict[Key, tuple[np.dtype[Any], int]]
"""Type and length of each tensor."""


def allocate(metadata: dict[str, str], shapes: Shapes) -> tuple[memoryview, dict[Key, npt.NDArray[Any]]]:
    """Write the header; the views are not initialised."""
    # safetensors allows no gaps; 4-byte columns first keep every column aligned.
    tensors, offsets, end = {}, {}, 0
    for key, (dtype, length) in sorted(shapes.items(), key=lambda item: -item[1][0].itemsize):
        offsets[key], end = end, end + dtype.itemsize * length
        tensors["{}.{}".format(*key)] = {
            "dtype": _NAMES[dtype],
            "shape": [length],
            "data_offsets": [offsets[key], end],
        }
    quoted = (f'{json.dumps(name)}:"{_escape(text)}"' for name, text in metadata.items())
    encoded = f'{{"__metadata__":{{{",".join(quoted)}}}}}'.encode()
    if tensors:  # json takes ten times as long for thousands of rows; msgspec does not escape to ASCII
        encoded = encoded[:-1] + b"," + msgspec.json.encode(tensors)[1:]
    encoded += b" " * (-len(encoded) % 8)
    start = _LENGTH.size + len(encoded)
    body = np.empty(start + end, np.uint8)
    whole = body.data
    _LENGTH.pack_into(whole, 0, len(encoded))
    whole[_LENGTH.size : start] = encoded
    # One view per type, sliced into columns: a view of the bytes per column takes ten times as long.
    data = body[start:]
    typed = {dtype: data[: end - end % dtype.itemsize].view(dtype) for dtype in _NAMES}
    views = {}
    for key, (dtype, length) in shapes.items():
        begin = offsets[key] // dtype.itemsize
        views[key] = typed[dtype][begin : begin + length]
    return whole, views


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
        raise Malformed(
            f"batch header says {counted(length, 'byte')}; the body has {len(buffer)}", name="body", value=length
        )
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
