"""Collect cyclic garbage of long life at moments of our choice.

A full collection visits every container of the process and holds the event loop. Python starts one whenever a quarter
more objects live, so several times while a batch of 100,000 groups is assembled. Collections of young objects go on as
always. Structs of groups and entries have `gc=False`, and columns are numpy arrays, so no collection visits them.
"""

from __future__ import annotations

import asyncio
import gc
import time

PERIOD_S = 60.0
MOST_OF_TIME = 0.001
"""Share of the time that full collections may take: one of 0.1 s every 100 s."""
NEVER = 1_000_000_000


async def collect_garbage() -> None:
    """Collect all generations every `PERIOD_S`, or less often if it takes long, until cancelled."""
    thresholds = gc.get_threshold()
    gc.set_threshold(*thresholds[:2], NEVER)
    took_s = 0.0
    try:
        while True:
            await asyncio.sleep(max(PERIOD_S, took_s / MOST_OF_TIME))
            begun_s = time.monotonic()
            gc.collect()
            took_s = time.monotonic() - begun_s
    finally:
        gc.set_threshold(*thresholds)
