"""Bounds on what is sent to Redis, or read from it, at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

CHUNK_BYTES = 8 << 20
"""Replies above 8 MiB halve the parser's speed and delay other calls."""
READ_BYTES = 1 << 20
"""Bytes read from a socket at once: frames are large, and redis-py reads 64 KiB by default."""


def split_chunks(items: Iterable[T], size: Callable[[T], int], max_items: int = sys.maxsize) -> Iterator[list[T]]:
    """Split items, in order, into chunks of at most `CHUNK_BYTES` and `max_items`; a larger item is its own chunk."""
    chunk: list[T] = []
    free_bytes = CHUNK_BYTES
    for item in items:
        needed = size(item)
        if chunk and (needed > free_bytes or len(chunk) == max_items):
            yield chunk
            chunk, free_bytes = [], CHUNK_BYTES
        chunk.append(item)
        free_bytes -= needed
    if chunk:
        yield chunk
