"""Long work beside the other tasks of the event loop: in turns with them, or in a thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

FEW = 2_000
"""Work on so many items takes a few milliseconds: less than a thread would delay it on a busy machine."""
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


async def call_beside(size: int, call: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Call a function that works on `size` items: in a thread if they are many. Nobody may change them meanwhile."""
    if size <= FEW:
        return call(*arguments, **options)
    return await asyncio.to_thread(call, *arguments, **options)
