"""Gates that let a few reads, and a few calls, begin per turn of the event loop: a burst of thousands does not hold it.

The loop hands over the bytes of all connections in one turn: 2,000 requests that arrived at once take 0.1 s to parse.
A gate counts over several turns and begins anew in the turn after it is full: an extra turn after each request would
take longer than the gate.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

STARTED_AT_ONCE = 32
"""Calls started in one turn. A call takes 0.1 to 0.3 ms until it waits for something."""
READ_AT_ONCE = 64
"""Reads in one turn. A small request takes 0.05 ms to parse, and its task as long to start."""


class StartGate:
    """ASGI middleware: `STARTED_AT_ONCE` calls start per turn of the event loop, one of each path in rotation.

    Calls of one path start in the order of their arrival. Without the rotation an append would wait until thousands of
    ranks, which ask for one batch, have started.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._started = 0
        self._held: dict[str, deque[asyncio.Future[None]]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a call on in this turn or in a later one."""
        if self._started < STARTED_AT_ONCE and not self._held:
            self._started += 1
            if self._started == STARTED_AT_ONCE:
                asyncio.get_running_loop().call_soon(self._next_turn)
        else:
            held = asyncio.get_running_loop().create_future()
            self._held.setdefault(scope["path"], deque()).append(held)
            await held
        await self._app(scope, receive, send)

    def _next_turn(self) -> None:
        """Start calls that are held: of each path the one that is held longest."""
        self._started = 0
        while self._held and self._started < STARTED_AT_ONCE:
            path = next(iter(self._held))
            waiting = self._held.pop(path)
            held = waiting.popleft()
            if waiting:
                self._held[path] = waiting  # behind all other paths
            if not held.done():
                held.set_result(None)
                self._started += 1
        if self._held or self._started == STARTED_AT_ONCE:
            asyncio.get_running_loop().call_soon(self._next_turn)


class ReadGate:
    """Up to `READ_AT_ONCE` reads pass per turn of the event loop; the others follow in the order of arrival."""

    def __init__(self) -> None:
        self._passed = 0
        self._held: deque[Callable[[], None]] = deque()

    def enter(self, later: Callable[[], None]) -> bool:
        """Return whether the caller may read now; if not, `later` is called in one of the next turns."""
        if self._passed < READ_AT_ONCE and not self._held:
            self._passed += 1
            if self._passed == READ_AT_ONCE:
                asyncio.get_running_loop().call_soon(self._next_turn)
            return True
        self._held.append(later)
        return False

    def _next_turn(self) -> None:
        self._passed = min(len(self._held), READ_AT_ONCE)
        for _ in range(self._passed):
            self._held.popleft()()
        if self._held or self._passed == READ_AT_ONCE:
            asyncio.get_running_loop().call_soon(self._next_turn)
