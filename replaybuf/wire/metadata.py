"""JSON objects of any shape that others send and read back (`metadata`, `feedback`): what they may hold.

All that is kept must be readable again by whoever looks: msgpack has whole numbers of 64 bits, and readers of JSON give
up somewhere between 100 and 1000 levels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from replaybuf.errors import Invalid

DEEPEST = 64
"""Levels of objects and lists, one inside the other; the object itself is the first."""
SMALLEST_WHOLE, LARGEST_WHOLE = -(2**63), 2**64 - 1

_PLAIN = frozenset({str, int, float, bool, type(None)})
_NESTED = (dict, list, tuple)
_COUNTED_TO = 1000
"""No deeper one comes out of a reader of JSON; an object that holds itself has no end."""
_SHOWN_BITS = 128


def check_metadata(name: str, given: Any) -> None:
    """Raise `Invalid` where `given` is nested too deeply, has a whole number beyond 64 bits, or is no JSON at all."""
    depth = _depth(given)
    if depth > DEEPEST:
        raise Invalid(f"{name} is nested {depth} deep; at most {DEEPEST}", name=name, value=depth, bound=DEEPEST)
    try:
        msgspec.msgpack.encode(given)
    except OverflowError:
        raise _beyond(name, given) from None
    except (TypeError, ValueError) as error:  # of a producer in Python
        raise Invalid(f"{name} does not encode: {error}", name=name) from None


def _depth(given: Any) -> int:
    depth, level = 0, [given]
    while level and depth < _COUNTED_TO:
        depth += 1
        level = [inner for outer in level for inner in _nested_in(outer)]
    return depth


def _nested_in(outer: Any) -> Iterable[Any]:
    values = outer.values() if isinstance(outer, dict) else outer
    if _PLAIN.issuperset(map(type, values)):  # mostly so, and told without a turn of the interpreter for each
        return ()
    return [inner for inner in values if isinstance(inner, _NESTED)]


def _beyond(name: str, given: Any) -> Invalid:
    """Name the first whole number beyond 64 bits."""
    for where, number in _whole_numbers(name, given):
        if not SMALLEST_WHOLE <= number <= LARGEST_WHOLE:
            bits = number.bit_length()
            value = number if bits <= _SHOWN_BITS else f"a number of {bits} bits"
            return Invalid(
                f"{where} is {value}; whole numbers are from -2^63 to 2^64 - 1",
                name=where,
                value=value,
                bound=[SMALLEST_WHOLE, LARGEST_WHOLE],
            )
    return Invalid(f"{name} has a key beyond 64 bits; keys are text", name=name, bound="text")


def _whole_numbers(name: str, given: Any) -> Iterator[tuple[str, int]]:
    if isinstance(given, dict):
        for key, inner in given.items():
            yield from _whole_numbers(f"{name}.{key}", inner)
    elif isinstance(given, _NESTED):
        for position, inner in enumerate(given):
            yield from _whole_numbers(f"{name}[{position}]", inner)
    elif isinstance(given, int):
        yield name, given
