"""Read from a few connections per turn of the event loop, so that a burst of requests does not hold it.

The loop hands over the bytes of all connections in one turn: 2,000 requests that arrived at once take 0.1 s to parse.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

READ_AT_ONCE = 64
"""Reads in one turn. A small request takes 0.05 ms to parse, and its task as long to start."""


class ReadGate:
    """Up to `READ_AT_ONCE` reads pass per turn of the event loop; the others follow in the order of arrival."""

    def __init__(self) -> None:
        self._passed = 0
        self._held: deque[Callable[[], None]] = deque()

    def enter(self, later: Callable[[], None]) -> bool:
        """Return whether the caller may read now; if not, `later` is called in one of the next turns."""
        if not self._passed and not self._held:
            asyncio.get_running_loop().call_soon(self._next_turn)
        if self._passed < READ_AT_ONCE and not self._held:
            self._passed += 1
            return True
        self._held.append(later)
        return False

    def _next_turn(self) -> None:
        self._passed = min(len(self._held), READ_AT_ONCE)
        for _ in range(self._passed):
            self._held.popleft()()
        if self._passed:
            asyncio.get_running_loop().call_soon(self._next_turn)
