"""Waiting for something to become true, with a bound: the only way in which tests that are not asyncio's wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.01


def eventually(look: Callable[[], T], within_s: float, wanted: Callable[[T], object] = bool) -> T:
    """Look until what is seen is as `wanted`, and return it; fails, with what was seen last, after `within_s`."""
    deadline_s = time.monotonic() + within_s
    pause = threading.Event()
    while not wanted(seen := look()):
        assert time.monotonic() < deadline_s, f"not within {within_s:g} s; seen last: {seen!r:.1000}"
        pause.wait(POLL_S)
    return seen
