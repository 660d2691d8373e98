"""How often servers are asked who is the primary: twice a second, and ten times for a while after a sign of trouble."""

from __future__ import annotations

import asyncio
import contextlib
import time

FRESH_S = 0.1
"""Pause during trouble, and how long an answer is used again: connections opened at the same time ask once."""
WATCH_PERIOD_S = 0.5
ALERT_S = 10.0
"""How long to ask often after a sign of trouble. A failover under Sentinel promotes a replica 0.2 s after its begin."""


class Attention:
    """Pauses between questions; `suspect` reports a sign of trouble, which ends a pause."""

    def __init__(self) -> None:
        self._signs = asyncio.Event()
        self._alert_until_s = -float("inf")

    def suspect(self) -> None:
        """Ask soon, and often for a while."""
        self._signs.set()

    @property
    def alert(self) -> bool:
        """Whether there was a sign of trouble lately."""
        return self._signs.is_set() or time.monotonic() < self._alert_until_s

    async def pause(self, *, in_trouble: bool) -> None:
        """Wait until the next question is due."""
        if self._signs.is_set():
            self._signs.clear()
            self._alert_until_s = time.monotonic() + ALERT_S
        if in_trouble or time.monotonic() < self._alert_until_s:
            await asyncio.sleep(FRESH_S)
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_PERIOD_S):
                    await self._signs.wait()
