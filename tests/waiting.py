"""Waiting for a condition, with a bound: the only way in which tests wait for other threads, tasks and processes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.01
LATE_SHARE, MOST_LATE_S = 0.02, 0.05
"""A wait of 1 s may end 20 ms late: looks cost processor time that the awaited process needs."""


def eventually(look: Callable[[], T], within_s: float, wanted: Callable[[T], object] = bool) -> T:
    """Call `look` until its result is `wanted`, and return it; fail with the last result after `within_s`."""
    deadline_s = time.monotonic() + within_s
    pause = threading.Event()
    while not wanted(seen := look()):
        assert time.monotonic() < deadline_s, f"not within {within_s:g} s; seen last: {seen!r:.1000}"
        pause.wait(max(POLL_S, _pause_s(deadline_s - within_s)))
    return seen


async def until(condition: Callable[[], object], within_s: float = 30.0, poll_s: float = 0.0) -> None:
    """Let other tasks run until the condition holds; fail after `within_s`.

    `poll_s`: pause between two looks, for conditions that another process or thread makes true.
    """
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {within_s:g} s"
        await asyncio.sleep(max(poll_s, _pause_s(deadline_s - within_s)))


def _pause_s(began_s: float) -> float:
    """Return the pause before the next look; 0 in the first 50 ms, when mostly tasks of this process are awaited."""
    pause_s = min(MOST_LATE_S, LATE_SHARE * (time.monotonic() - began_s))
    return pause_s if pause_s >= 0.001 else 0.0
