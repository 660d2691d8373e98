"""Waiting for something to become true, with a bound."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

POLL_S = 0.02


def eventually(condition: Callable[[], bool], within_s: float) -> None:
    """Return once `condition()` holds; fails where it does not within `within_s` seconds."""
    deadline_s = time.monotonic() + within_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline_s, f"not true within {within_s} s"
        pause.wait(POLL_S)
