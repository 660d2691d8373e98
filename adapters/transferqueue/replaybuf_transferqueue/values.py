"""Values of fields as bytes: tensors, arrays and plain Python values, without pickle.

A payload is one byte for its kind, then

- tensor: the length of a header (uint16, little-endian), the header (msgpack: dtype, shape), the elements
- plain: msgpack, with extension types for tensors, arrays and tensor dictionaries inside
- pickle: only for fields that the user named in `pickle_fields`, in both directions
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Collection
from typing import Any

import msgspec
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from replaybuf.errors import Invalid, Malformed

TENSOR, PLAIN, PICKLE = 1, 2, 3
_INNER_TENSOR, _INNER_ARRAY, _INNER_DICT = 1, 2, 3
_UNENCODABLE = (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError)


def encode(value: Any, field: str, pickle_fields: Collection[str] = ()) -> bytes:
    """Encode one value of `field`. Raises `Invalid` if only pickle could and the field is not in `pickle_fields`."""
    if isinstance(value, torch.Tensor) and not value.is_nested and not value.is_sparse:
        return bytes([TENSOR]) + _encode_tensor(value)
    try:
        return bytes([PLAIN]) + _encoder.encode(value)
    except _UNENCODABLE as error:
        if field in pickle_fields:
            return bytes([PICKLE]) + pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        raise Invalid(
            f"field {field!r} has a {type(value).__name__} that is stored only as pickle ({error}); store tensors, "
            f"arrays or plain values, or add {field!r} to pickle_fields",
            name=field,
            value=type(value).__name__,
        ) from error


def decode(payload: bytes | memoryview, field: str, pickle_fields: Collection[str] = ()) -> Any:
    """Decode a payload of `field`. Raises `Malformed` for pickle in a field that is not in `pickle_fields`."""
    kind, body = payload[0], memoryview(payload)[1:]
    if kind == TENSOR:
        return _decode_tensor(body)
    if kind == PLAIN:
        return _decoder.decode(body)
    if kind == PICKLE and field in pickle_fields:
        return pickle.loads(body)  # noqa: S301 - the user named this field
    if kind == PICKLE:
        raise Malformed(
            f"field {field!r} is stored as pickle, which may run code; add it to pickle_fields to allow it",
            name=field,
            value="pickle",
        )
    raise Malformed(f"field {field!r} has a payload of kind {kind}; the kinds are 1, 2 and 3", name=field, value=kind)


def _encode_tensor(value: torch.Tensor) -> bytes:
    value = value.detach().cpu().contiguous()
    header = msgspec.msgpack.encode([str(value.dtype).removeprefix("torch."), list(value.shape)])
    # A view of bytes: numpy has no bfloat16.
    elements = value.reshape(-1).view(torch.uint8).numpy().data
    return b"".join((struct.pack("<H", len(header)), header, elements))


def _decode_tensor(body: memoryview) -> torch.Tensor:
    end = 2 + struct.unpack_from("<H", body)[0]
    name, shape = msgspec.msgpack.decode(body[2:end], type=tuple[str, list[int]])
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise Malformed(f"dtype {name!r} is unknown to this version of torch", name="dtype", value=name)
    if end == len(body):
        return torch.empty(shape, dtype=dtype)
    # A copy, so that users may write to the tensor.
    return torch.frombuffer(bytearray(body[end:]), dtype=torch.uint8).view(dtype).reshape(shape)


def _encode_inner(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and not value.is_nested and not value.is_sparse:
        return msgspec.msgpack.Ext(_INNER_TENSOR, _encode_tensor(value))
    if isinstance(value, TensorDictBase):
        return msgspec.msgpack.Ext(_INNER_DICT, _encoder.encode([list(value.batch_size), dict(value.items())]))
    if isinstance(value, np.ndarray | np.generic) and value.dtype.names is None and not value.dtype.hasobject:
        array = np.ascontiguousarray(value)
        header = [array.dtype.str, list(np.shape(value)), isinstance(value, np.generic), array.tobytes()]
        return msgspec.msgpack.Ext(_INNER_ARRAY, _encoder.encode(header))
    raise TypeError(f"{type(value).__name__} has no form without pickle")


def _decode_inner(code: int, data: memoryview) -> Any:
    if code == _INNER_TENSOR:
        return _decode_tensor(data)
    if code == _INNER_DICT:
        batch_size, items = _decoder.decode(data)
        return TensorDict(items, batch_size=batch_size)
    if code == _INNER_ARRAY:
        dtype, shape, is_scalar, elements = msgspec.msgpack.decode(data, type=tuple[str, list[int], bool, bytes])
        array = np.frombuffer(elements, dtype=np.dtype(dtype)).reshape(shape).copy()
        return array[()] if is_scalar else array
    raise Malformed(f"extension type {code} is unknown", name="extension", value=code)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_inner)
_decoder = msgspec.msgpack.Decoder(ext_hook=_decode_inner)
