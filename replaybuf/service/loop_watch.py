"""Measure how long the event loop is held: a timer ends every 40 ms and records how late it is.

A hold is the time between two turns of the loop. All calls of all runs wait meanwhile.
"""

from __future__ import annotations

import asyncio
import time

from replaybuf.kernel.figures.histograms import Histogram

PERIOD_S = 0.04
"""A shorter period would find shorter holds and cost more: an idle service takes 1.1 times at 50 wake-ups a second."""
HELD_US = tuple(round(1e6 * s) for s in (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5))
"""Upper edges of the buckets, in microseconds."""


class LoopWatch:
    """Histogram `holds` of the lateness of each wake-up, in microseconds."""

    def __init__(self) -> None:
        self.holds = Histogram(HELD_US)

    async def run(self) -> None:
        """Measure the running loop until this is cancelled."""
        # Timers and no task that sleeps: that takes twice the processor time, 9 ms per second.
        self._loop = asyncio.get_running_loop()
        self._start_timer()
        try:
            await self._loop.create_future()
        finally:
            self._timer.cancel()

    def _start_timer(self) -> None:
        self._timer = self._loop.call_later(PERIOD_S, self._record, time.monotonic() + PERIOD_S)

    def _record(self, due_s: float) -> None:
        self.holds.add_one(max(0, round(1e6 * (time.monotonic() - due_s))))
        self._start_timer()
