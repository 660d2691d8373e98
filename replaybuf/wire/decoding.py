"""Strict decoding of what others wrote, with errors that name the field, what it holds and what it may hold."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import msgspec.inspect

from replaybuf.errors import Invalid, Malformed

T = TypeVar("T")

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_RANGE = re.compile(r"Expected `\w+` ([<>]=? \S+)")
"""What msgspec says of a number outside its bound."""
_ANY_KEY = "[...]"
"""What msgspec says in place of the key of a map."""


def decode_json(body: bytes, shape: type[T]) -> T:
    """Decode a JSON body strictly.

    Raises `Malformed` where it is not JSON or has another shape, `Invalid` where a number or text is outside its bound.
    NaN and infinities are taken as what they are (outside the JSON standard, but what Python's encoder writes), so that
    the check that follows can name them.
    """
    try:
        return msgspec.json.decode(body, type=shape)
    except msgspec.ValidationError as error:
        raise _explained(error, _loads(body), shape) from None  # what follows the fault may not even be JSON
    except (msgspec.DecodeError, ValueError, RecursionError):
        value = _loads(body)
    try:
        return msgspec.convert(value, shape)
    except msgspec.ValidationError as error:
        raise _explained(error, value, shape) from None


def _loads(body: bytes) -> Any:
    """Parse JSON as Python does. Raises `Malformed`, also for half a surrogate pair, which no UTF-8 text can hold."""
    try:
        value = json.loads(body.decode())
        if _SURROGATE.search(body):
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise Malformed(f"body is not JSON: {error}", name="body", value=_excerpt(body), bound="JSON") from None
    return value


def _explained(error: msgspec.ValidationError, body: Any, shape: type) -> Invalid | Malformed:
    message, _, path = str(error).partition(" - at `$")
    value, name, trail = body, "", list[str | int]()
    key: str | int
    for part in re.findall(r"\[\.{3}\]|\[\d+\]|[^.\[\]]+", path.rstrip("`")):
        if part == _ANY_KEY and isinstance(value, dict):
            key = _key_at_fault(error, body, trail, value, shape)
        else:
            key = int(part[1:-1]) if part.startswith("[") else part
        name += f"[{key}]" if isinstance(key, int) else f".{key}"
        trail.append(key)
        value = _inside(value, key)
    name = name.lstrip(".") or "body"
    shown = value if isinstance(value, str | int | float | None) else type(value).__name__
    kind = Invalid if re.search(r"[<>]=? |matching regex|Invalid enum", message) else Malformed
    if valid := _valid(message, shape, trail):
        message = f"{message}; valid: {', '.join(valid)}"
    told = name if name == "body" or isinstance(value, dict | list) else f"{name} is {shown!r}"
    if range_ := _RANGE.fullmatch(message):
        return kind(f"{told}; it must be {range_[1]}", name=name, value=shown, bound=range_[1])
    return kind(f"{told}: {message}", name=name, value=shown, bound=message)


def _valid(message: str, shape: type, trail: Sequence[str | int]) -> list[str]:
    """List the fields of the object at `trail`, or the words that may stand there, where the fault is another one."""
    kinds = _kinds(msgspec.inspect.type_info(shape))
    for key in trail:
        kinds = [part for kind in kinds for part in _kinds_inside(kind, key)]
    if message.startswith("Object contains unknown field"):
        structs = [kind for kind in kinds if isinstance(kind, msgspec.inspect.StructType)]
        return [field.encode_name for struct in structs for field in struct.fields]
    if message.startswith("Invalid enum value"):
        return [str(word) for kind in kinds if isinstance(kind, msgspec.inspect.LiteralType) for word in kind.values]
    return []


def _kinds(kind: msgspec.inspect.Type) -> Sequence[msgspec.inspect.Type]:
    return kind.types if isinstance(kind, msgspec.inspect.UnionType) else [kind]


def _kinds_inside(kind: msgspec.inspect.Type, key: str | int) -> Sequence[msgspec.inspect.Type]:
    """Return what may stand at `key` of an object, a map or a list."""
    match kind:
        case msgspec.inspect.StructType():
            return [part for field in kind.fields if field.encode_name == key for part in _kinds(field.type)]
        case msgspec.inspect.DictType():
            return _kinds(kind.value_type)
        case msgspec.inspect.ListType() | msgspec.inspect.VarTupleType():
            return _kinds(kind.item_type)
    return []


def _key_at_fault(
    error: msgspec.ValidationError, body: Any, trail: Sequence[str | int], found: dict[str, Any], shape: type
) -> str:
    """Name the key of the map at `trail` whose value does not fit: the one that, alone, gives the same error."""
    for key, value in found.items():
        try:
            msgspec.convert(_replaced(body, trail, {key: value}), shape)
        except msgspec.ValidationError as alone:
            if str(alone) == str(error):
                return key
    return _ANY_KEY


def _replaced(body: Any, trail: Sequence[str | int], value: Any) -> Any:
    """Return `body` with another value at `trail`."""
    if not trail:
        return value
    copy = body.copy()
    copy[trail[0]] = _replaced(body[trail[0]], trail[1:], value)
    return copy


def _inside(value: Any, key: str | int) -> Any:
    if isinstance(value, dict):
        return value.get(key)
    in_list = isinstance(value, list) and isinstance(key, int) and key < len(value)
    return value[key] if in_list else None  # a name given twice: JSON keeps the last


def _excerpt(body: bytes) -> str:
    return body[:80].decode("utf-8", "replace")
