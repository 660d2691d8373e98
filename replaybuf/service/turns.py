"""Long work in turns with the other tasks of the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

T = TypeVar("T")

TURN_S = 0.005
"""A turn of the loop costs about 20 µs, so short items share one."""


async def in_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield items; let other tasks run whenever the items since their last turn took `TURN_S`."""
    begun_s = time.monotonic()
    for item in items:
        yield item
        if time.monotonic() - begun_s > TURN_S:
            await asyncio.sleep(0)
            begun_s = time.monotonic()
