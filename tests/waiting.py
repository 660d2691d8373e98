"""Waiting for a condition, with a bound: the only way in which tests wait for other threads, tasks and processes.

Bounds are those of a machine that does nothing else; with more work than cores they grow in proportion.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import psutil

T = TypeVar("T")

POLL_S = 0.01
LATE_SHARE, MOST_LATE_S = 0.02, 0.05
"""A wait of 1 s may end 20 ms late: looks cost processor time that the awaited process needs."""


MOST_PATIENCE = 4.0


def patience() -> float:
    """Return how many times longer a wait may take now, by the load of the last minute: 1 to `MOST_PATIENCE`."""
    return min(max(os.getloadavg()[0] / (os.cpu_count() or 1), 1.0), MOST_PATIENCE)


def eventually(look: Callable[[], T], within_s: float, wanted: Callable[[T], object] = bool) -> T:
    """Call `look` until its result is `wanted`, and return it; fail with the last result after `within_s`."""
    began_s = time.monotonic()
    pause = threading.Event()
    while not wanted(seen := look()):
        assert not _over(began_s, within_s), f"not within {within_s:g} s; seen last: {seen!r:.1000}"
        pause.wait(max(POLL_S, _pause_s(began_s)))
    return seen


def still_running(processes: Sequence[psutil.Process], within_s: float) -> list[psutil.Process]:
    """Return the processes that have not ended within the time. A zombie has: not every init reaps what it inherits."""
    began_s = time.monotonic()
    pause = threading.Event()
    while (alive := list(filter(_runs, processes))) and not _over(began_s, within_s):
        pause.wait(max(POLL_S, _pause_s(began_s)))
    return alive


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def until(condition: Callable[[], object], within_s: float = 30.0, poll_s: float = 0.0) -> None:
    """Let other tasks run until the condition holds; fail after `within_s`.

    `poll_s`: pause between two looks, for conditions that another process or thread makes true.
    """
    began_s = time.monotonic()
    while not condition():
        assert not _over(began_s, within_s), f"not within {within_s:g} s"
        await asyncio.sleep(max(poll_s, _pause_s(began_s)))


def _over(began_s: float, within_s: float) -> bool:
    waited_s = time.monotonic() - began_s
    return waited_s > within_s and waited_s > within_s * patience()


def _pause_s(began_s: float) -> float:
    """Return the pause before the next look; 0 in the first 50 ms, when mostly tasks of this process are awaited."""
    pause_s = min(MOST_LATE_S, LATE_SHARE * (time.monotonic() - began_s))
    return pause_s if pause_s >= 0.001 else 0.0
