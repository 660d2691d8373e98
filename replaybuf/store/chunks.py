"""Portions: how much is sent to Redis, or asked of it, at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

PORTION_BYTES = 8 << 20
"""Replies of Redis above 8 MiB halve the parser's speed and hold up other calls."""


READ_BYTES = 1 << 20
"""Taken from a connection at once, where so much has come: frames are large, and redis-py reads 64 KiB by default."""


def portions(items: Iterable[T], size: Callable[[T], int], at_most: int = sys.maxsize) -> Iterator[list[T]]:
    """Cut items of these sizes in bytes into portions of at most `PORTION_BYTES`, or of one item; order stays.

    `at_most`: items in a portion.
    """
    portion: list[T] = []
    room = PORTION_BYTES
    for item in items:
        needed = size(item)
        if portion and (needed > room or len(portion) == at_most):
            yield portion
            portion, room = [], PORTION_BYTES
        portion.append(item)
        room -= needed
    if portion:
        yield portion
