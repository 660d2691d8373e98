"""Check JSON objects of any shape that users send and read back (`metadata`, `feedback`).

All stored objects must be readable: msgpack has integers of 64 bits, and JSON readers support 100 to 1000 levels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from replaybuf.errors import Invalid

DEEPEST = 64
"""Nested levels of objects and lists; the object itself is the first."""
MOST_NESTED = 1 << 14
"""Objects and lists on one level, for each of which the check takes a turn of a Python loop."""
SMALLEST_INTEGER, LARGEST_INTEGER = -(2**63), 2**64 - 1

_PLAIN = frozenset({str, int, float, bool, type(None)})
_NESTED = (dict, list, tuple)
_MAX_COUNTED = 1000
"""No JSON reader returns deeper objects; an object that contains itself is infinitely deep."""
_SHOWN_BITS = 128


def check_metadata(name: str, value: Any) -> None:
    """Raise `Invalid` if `given` is nested too deeply, has an integer beyond 64 bits, or is not JSON."""
    depth = _depth(name, value)
    if depth > DEEPEST:
        raise Invalid(f"{name} is nested {depth} deep; the maximum is {DEEPEST}", name=name, value=depth, bound=DEEPEST)
    try:
        msgspec.msgpack.encode(value)
        msgspec.json.encode(value)
    except OverflowError:
        raise _integer_error(name, value) from None
    except (TypeError, ValueError) as error:  # from a Python producer
        raise Invalid(f"{name} does not encode: {error}", name=name) from None


def readable(metadata: dict[str, Any]) -> dict[str, Any] | None:
    """Return stored metadata, or None if JSON cannot hold it: a program that writes to Redis itself may store any."""
    try:
        check_metadata("metadata", metadata)
    except Invalid:
        return None
    return metadata


def encode_within(objects: Iterable[dict[str, Any]], most_bytes: int) -> Iterator[msgspec.Raw | None]:
    """Yield each as JSON, up to `most_bytes` in all; None for what is not JSON, and for all that comes too late."""
    left = most_bytes
    for value in objects:
        if left < 0 or readable(value) is None:
            yield None
            continue
        encoded = msgspec.json.encode(value)
        left -= len(encoded)
        yield msgspec.Raw(encoded) if left >= 0 else None


def _depth(name: str, value: Any) -> int:
    depth, level = 0, [value]
    while level and depth < _MAX_COUNTED:
        depth += 1
        level = [inner for outer in level for inner in _nested_in(outer)]
        if len(level) > MOST_NESTED:
            detail = f"{name} has {len(level)} objects and lists {depth + 1} deep; the maximum is {MOST_NESTED}"
            raise Invalid(detail, name=name, value=len(level), bound=MOST_NESTED)
    return depth


def _nested_in(outer: Any) -> Iterable[Any]:
    values = outer.values() if isinstance(outer, dict) else outer
    if _PLAIN.issuperset(map(type, values)):  # the usual case, found without a Python loop
        return ()
    return [inner for inner in values if isinstance(inner, _NESTED)]


def _integer_error(name: str, metadata: Any) -> Invalid:
    """Name the first integer beyond 64 bits."""
    for where, number in _integers(name, metadata):
        if not SMALLEST_INTEGER <= number <= LARGEST_INTEGER:
            bits = number.bit_length()
            value = number if bits <= _SHOWN_BITS else f"a number of {bits} bits"
            detail = f"{where} is {value}; integers are from -2^63 to 2^64 - 1"
            return Invalid(detail, name=where, value=value, bound=[SMALLEST_INTEGER, LARGEST_INTEGER])
    return Invalid(f"{name} has a key beyond 64 bits; keys must be text", name=name, bound="text")


def _integers(name: str, value: Any) -> Iterator[tuple[str, int]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _integers(f"{name}.{key}", inner)
    elif isinstance(value, _NESTED):
        for position, inner in enumerate(value):
            yield from _integers(f"{name}[{position}]", inner)
    elif isinstance(value, int):
        yield name, value
