"""Bounds on what is sent to Redis, or read from it, at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

CHUNK_BYTES = 8 << 20
"""Replies above 8 MiB halve the parser's speed and delay other calls."""
READ_BYTES = 1 << 20
"""Bytes read from a socket at once: frames are large, and redis-py reads 64 KiB by default."""


def split_chunks(items: Iterable[T], size: Callable[[T], int], max_items: int = sys.maxsize) -> Iterator[list[T]]:
    """Split items, in order, into chunks of at most `CHUNK_BYTES` and `max_items`; a larger item is its own chunk."""
    chunk = Chunk[T](max_items)
    for item in items:
        if not chunk.fits(needed := size(item)):
            yield chunk.take()
        chunk.add(item, needed)
    if chunk.items:
        yield chunk.items


class Chunk(Generic[T]):
    """A chunk that grows. Add what fits; else take it first."""

    def __init__(self, max_items: int) -> None:
        self.items: list[T] = []
        self._max_items = max_items
        self._free_bytes = CHUNK_BYTES

    def fits(self, needed: int) -> bool:
        """Check whether the next item belongs into this chunk."""
        return not self.items or (needed <= self._free_bytes and len(self.items) < self._max_items)

    def add(self, item: T, needed: int) -> None:
        """Add an item."""
        self.items.append(item)
        self._free_bytes -= needed

    def take(self) -> list[T]:
        """Return the items and begin the next chunk."""
        items, self.items, self._free_bytes = self.items, [], CHUNK_BYTES
        return items
