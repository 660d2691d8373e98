"""Keep a Redis awake while a write waits for its disk.

With `appendfsync everysec` a thread of the server syncs, and the server notices its end when it next wakes up: an idle
one after 0.1 s (`hz 10`). Every write alone would take so long.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from redis.exceptions import RedisError

from replaybuf.store.redis.pipeline import FastPipeline

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.05


@contextlib.asynccontextmanager
async def keep_awake(pipeline: Callable[[], FastPipeline]) -> AsyncIterator[None]:
    """Send PING during the body, on other connections and at growing intervals."""
    answered = asyncio.Event()
    pings = asyncio.create_task(_ping_until(answered, pipeline))
    try:
        yield
    finally:
        answered.set()  # a PING that is cancelled would cost its connection
    await pings


async def _ping_until(answered: asyncio.Event, pipeline: Callable[[], FastPipeline]) -> None:
    pause_s = FIRST_PAUSE_S
    while not await _within(answered, pause_s):
        ping = pipeline()
        ping.execute_command("PING")
        with contextlib.suppress(RedisError, OSError):  # the write reports what is wrong
            await ping.execute()
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


async def _within(event: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()
