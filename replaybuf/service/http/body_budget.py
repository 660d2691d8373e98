"""Budget for the bytes of request bodies that the service holds in memory."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import Self

from replaybuf.errors import ServiceUnavailable, TooLarge
from replaybuf.service.traffic import Traffic

SMALL_BYTES = 1 << 16
"""Smaller bodies are not counted: acks and tickets never wait for room. The number of connections bounds them."""
ROOM_TIMEOUT_S = 5.0
"""Maximum time that a body waits for room."""


class BodyBudget:
    """Bytes of all bodies in memory: sum of the shares <= `limit_bytes`.

    A body takes its declared size before it is read, so two bodies that are half read never wait for each other. A body
    that does not fit waits, first come first served, for up to `timeout_s`; then its call is answered 503.
    """

    def __init__(self, limit_bytes: int, traffic: Traffic, *, timeout_s: float = ROOM_TIMEOUT_S) -> None:
        self._limit_bytes = limit_bytes
        self._traffic = traffic
        self._timeout_s = timeout_s
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def share(self) -> BodyShare:
        """Return the share of one call; it is empty. Use it in `with`: its end frees the bytes."""
        return BodyShare(self)

    async def take(self, nbytes: int) -> None:
        """Take bytes. Raises `TooLarge` above the whole budget, `ServiceUnavailable` if no room comes in time."""
        if nbytes > self._limit_bytes:
            raise TooLarge(
                f"body has at least {nbytes} bytes; this server holds at most {self._limit_bytes} bytes of bodies "
                "(serve --body-budget-bytes). Send fewer groups per call",
                name="body",
                value=nbytes,
                bound=self._limit_bytes,
            )
        if not self._waiting and self._fits(nbytes):
            self._traffic.body_bytes += nbytes
            return
        granted = asyncio.get_running_loop().create_future()
        entry = (nbytes, granted)
        self._waiting.append(entry)
        try:
            async with asyncio.timeout(self._timeout_s):
                await granted
        except TimeoutError:
            self._abandon(entry)
            self._traffic.refused["no_body_room"] += 1
            raise ServiceUnavailable(
                f"no room for {nbytes} bytes of the body within {self._timeout_s:g} s: the server holds "
                f"{self._traffic.body_bytes} bytes of bodies; the maximum is {self._limit_bytes} "
                "(serve --body-budget-bytes)",
                name="body",
                value=nbytes,
                bound=self._limit_bytes,
            ) from None
        except asyncio.CancelledError:
            self._abandon(entry)
            raise

    def free(self, nbytes: int) -> None:
        """Free bytes, and grant them to the bodies that have waited longest."""
        self._traffic.body_bytes -= nbytes
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            wanted, granted = self._waiting.popleft()
            if not granted.cancelled():
                self._traffic.body_bytes += wanted
                granted.set_result(None)

    def _fits(self, nbytes: int) -> bool:
        return self._traffic.body_bytes + nbytes <= self._limit_bytes

    def _abandon(self, entry: tuple[int, asyncio.Future[None]]) -> None:
        nbytes, granted = entry
        if granted.done() and not granted.cancelled():  # the grant and the end of the wait met in one turn of the loop
            self.free(nbytes)
            return
        self._waiting.remove(entry)
        self._grant()  # a smaller body may have waited behind this one


class BodyShare:
    """Bytes that one call holds; `read_bytes`: size of its body so far."""

    def __init__(self, budget: BodyBudget) -> None:
        self.read_bytes = 0
        self._budget = budget
        self._held_bytes = SMALL_BYTES

    async def hold(self, total_bytes: int) -> None:
        """Grow to `total_bytes`; do nothing if that much is held. Raises what `BodyBudget.take` raises."""
        if (missing := total_bytes - self._held_bytes) > 0:
            await self._budget.take(missing)
            self._held_bytes = total_bytes

    def __enter__(self) -> Self:
        """Return this share."""
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        """Free all bytes."""
        if self._held_bytes > SMALL_BYTES:
            self._budget.free(self._held_bytes - SMALL_BYTES)
