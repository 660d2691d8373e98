"""Decode JSON strictly, with errors that name the field, its value and the bound."""

from __future__ import annotations

import contextlib
import gc
import json
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import msgspec.inspect as inspect

from replaybuf.errors import Invalid, Malformed
from replaybuf.wire.names import check_strings

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_RANGE = re.compile(r"Expected `\w+` ([<>]=? \S+)")
"""msgspec's message for a number outside its bound."""
_LENGTH = re.compile(r"Expected `(?:object|array)` of length ([<>]=?) (\d+)")
"""msgspec's message for too many or too few entries."""
_BOUND = re.compile(r"[<>]=? |matching regex|Invalid enum")
"""Parts of msgspec's messages for values of the right type outside their bound."""
_STEP = re.compile(r"\[\.{3}\]|\[\d+\]|[^.\[\]]+")
"""One step of msgspec's path to a value."""
_ANY_KEY = "[...]"
"""msgspec's step for any key of a map; only in a map with one entry is the key known."""
_SMALL_BYTES = 16 << 10
_CONTAINERS: dict[str, Any] = {"dict": dict[str, msgspec.Raw], "list": list[msgspec.Raw]}
_preparing = threading.Lock()
_prepared: set[Any] = set()


def prepared(shape: type[T]) -> type[T]:
    """Return a shape after msgspec has built its data about it, in one thread at a time.

    msgspec 0.22 builds the data when a shape is first decoded, and crashes if two threads do that at once.
    """
    if shape not in _prepared:
        with _preparing:
            msgspec.json.Decoder(shape)
            _prepared.add(shape)
    return shape


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector, which would walk the new objects again and again and find no garbage.

    Without the pause, decoding 250,000 empty lists takes 3 times and a fold of the streams 1.6 times as long.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def decode_json(body: bytes | memoryview | msgspec.Raw, shape: type[T], at: str = "") -> T:
    """Decode a JSON body strictly; `at` is its path if it is part of a larger one.

    Raises `Malformed` if it is not JSON or has another shape, `Invalid` if a number or text is outside its bound.
    Accepts NaN and infinities, which Python's encoder writes, so that a later check can name them.
    """
    prepared(shape)
    try:
        if memoryview(body).nbytes <= _SMALL_BYTES:
            return msgspec.json.decode(body, type=shape)
        with collector_paused():
            return msgspec.json.decode(body, type=shape)
    except msgspec.ValidationError as error:
        raise _explain(error, _unopened(body), shape, at) from None  # the rest of the body may not even be JSON
    except (msgspec.DecodeError, ValueError, RecursionError):
        value = _loads(body)
    try:
        return msgspec.convert(value, shape)
    except msgspec.ValidationError as error:
        raise _explain(error, value, shape, at) from None


def decode_request(body: bytes | memoryview, shape: type[S]) -> S:
    """Decode the JSON body of a request. Raises what `decode_json` raises, and `Invalid` for a string out of bounds."""
    decoded = decode_json(body, shape)
    check_strings(decoded)
    return decoded


def _unopened(body: bytes | memoryview | msgspec.Raw) -> Any:
    """Return a body without its values, if it is strict JSON: 60 MB of `[],` take 1.7 GB as Python objects."""
    if not _SURROGATE.search(memoryview(body)):
        with contextlib.suppress(msgspec.DecodeError, ValueError, RecursionError):
            return msgspec.json.decode(body, type=msgspec.Raw)
    return _loads(body)


def _opened(value: Any) -> Any:
    """Open one level of a value that may be raw JSON; what is inside stays raw."""
    if not isinstance(value, msgspec.Raw):
        return value
    kind = _type_of(value)
    if kind in _CONTAINERS:
        with contextlib.suppress(ValueError):  # a key that is not UTF-8; `Raw` does not read it
            return msgspec.json.decode(value, type=prepared(_CONTAINERS[kind]))
    return _loads(value)


def _type_of(value: Any) -> str:
    """Name the type of a value that may be raw JSON, as Python names it."""
    if not isinstance(value, msgspec.Raw):
        return type(value).__name__
    return {b"{": "dict", b"[": "list"}.get(bytes(memoryview(value)[:1]), "")


def _loads(data: bytes | memoryview | msgspec.Raw) -> Any:
    """Parse JSON as Python does. Raises `Malformed`, also for half a surrogate pair, which UTF-8 cannot encode."""
    body = bytes(memoryview(data))
    try:
        value = json.loads(body.decode())
        if _SURROGATE.search(body):
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        excerpt = body[:80].decode("utf-8", "replace")
        raise Malformed(f"body is not JSON: {error}", name="body", value=excerpt, bound="JSON") from None
    return value


def _explain(error: msgspec.ValidationError, body: Any, shape: type, at: str) -> Invalid | Malformed:
    message, _, path = str(error).partition(" - at `$")
    name, value, kinds = at, body, _alternatives(inspect.type_info(shape))
    for step in _STEP.findall(path.rstrip("`")):
        value = _opened(value)
        if step == _ANY_KEY and isinstance(value, dict) and len(value) == 1:
            (step,) = value
        name += step if step.startswith("[") else f".{step}"
        value = _inside(value, step)
        kinds = [part for kind in kinds for part in _kinds_inside(kind, step)]
    name = name.lstrip(".") or "body"
    container = _type_of(value) in _CONTAINERS
    shown = _type_of(value) if container else _opened(value)
    subject = name if name == "body" or _ANY_KEY in name or container else f"{name} is {shown!r}"
    if valid := _valid_words(message, kinds):
        message = f"{message}; valid: {', '.join(valid)}"
    error_type = Invalid if _BOUND.search(message) else Malformed
    if container and (bounds := _LENGTH.fullmatch(message)):
        entries = len(_opened(value))
        bound = f"{bounds[1]} {bounds[2]}"
        return error_type(f"{name} has {entries} entries; it must be {bound}", name=name, value=entries, bound=bound)
    if bounds := _RANGE.fullmatch(message):
        return error_type(f"{subject}; it must be {bounds[1]}", name=name, value=shown, bound=bounds[1])
    return error_type(f"{subject}: {message}", name=name, value=shown, bound=message)


def _inside(value: Any, step: str) -> Any:
    if isinstance(value, dict):
        return value.get(step)
    index = int(step[1:-1]) if step[1:-1].isdigit() else -1
    in_list = isinstance(value, list) and 0 <= index < len(value)
    return value[index] if in_list else None  # of a field given twice, JSON keeps the last


def _alternatives(kind: inspect.Type) -> Sequence[inspect.Type]:
    if isinstance(kind, inspect.Metadata):
        return _alternatives(kind.type)
    return kind.types if isinstance(kind, inspect.UnionType) else [kind]


def _kinds_inside(kind: inspect.Type, step: str) -> Sequence[inspect.Type]:
    """Return the types allowed at `step` of a struct, a map or a list."""
    match kind:
        case inspect.StructType():
            return [part for field in kind.fields if field.encode_name == step for part in _alternatives(field.type)]
        case inspect.DictType():
            return _alternatives(kind.value_type)
        case inspect.ListType() | inspect.VarTupleType():
            return _alternatives(kind.item_type)
    return []


def _valid_words(message: str, kinds: Sequence[inspect.Type]) -> list[str]:
    """List the allowed fields for an unknown field, or the allowed words for an unknown word."""
    if message.startswith("Object contains unknown field"):
        structs = [kind for kind in kinds if isinstance(kind, inspect.StructType)]
        return [field.encode_name for struct in structs for field in struct.fields]
    if message.startswith("Invalid enum value"):
        return [str(word) for kind in kinds if isinstance(kind, inspect.LiteralType) for word in kind.values]
    return []
