"""Budget for the bytes of request bodies that the service holds in memory."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from replaybuf.errors import ServiceUnavailable, TooLarge
from replaybuf.service.traffic import Traffic

SMALL_BYTES = 1 << 16
"""Smaller bodies are not counted: acks and tickets never wait for room. The number of connections bounds them."""
STEP_BYTES = 1 << 20
"""How far ahead of what has arrived a body takes room."""
FAVOURED_BYTES = 64 << 20
"""The largest body that a call may have."""
ROOM_TIMEOUT_S = 5.0
"""Maximum time that a body waits for room."""


class BodyBudget:
    """Bytes of all bodies in memory: sum of the shares <= `limit_bytes`.

    A body takes what has arrived and `STEP_BYTES` ahead, not what it declares, so clients that declare much and send
    little hold little. The last bytes, room for one largest body, are for one favoured body: the one that waited first
    when nobody was favoured. It can always finish, so bodies that are half read never wait for each other for ever. Of
    the rest each holder, an address or a run, has at most half. A body without room waits for up to `timeout_s`; then
    its call is answered 503.
    """

    def __init__(self, limit_bytes: int, traffic: Traffic, *, timeout_s: float = ROOM_TIMEOUT_S) -> None:
        self._limit_bytes = limit_bytes
        self._shared_bytes = limit_bytes - min(FAVOURED_BYTES, limit_bytes // 2)
        self._traffic = traffic
        self._timeout_s = timeout_s
        self._held: dict[str, int] = {}
        """Bytes by holder."""
        self._favoured: BodyShare | None = None
        self._waiting: list[tuple[BodyShare, int, asyncio.Future[None]]] = []

    def share(self, *holders: str) -> BodyShare:
        """Return the share of one call; it is empty. Use it in `with`, or call `end`, which frees the bytes."""
        return BodyShare(self, holders)

    def check(self, nbytes: int) -> None:
        """Raise `TooLarge` above the whole budget."""
        if nbytes > self._limit_bytes:
            detail = (
                f"body has at least {nbytes} bytes; this server holds at most {self._limit_bytes} bytes of bodies "
                "(serve --body-budget-bytes). Send fewer groups per call"
            )
            raise TooLarge(detail, name="body", value=nbytes, bound=self._limit_bytes)

    async def wait(self, share: BodyShare, nbytes: int) -> None:
        """Take bytes when there is room. Raises `ServiceUnavailable` if none comes in time, and what `check` raises."""
        self.check(share.held_bytes + nbytes - SMALL_BYTES)
        granted = asyncio.get_running_loop().create_future()
        entry = (share, nbytes, granted)
        self._waiting.append(entry)
        try:
            async with asyncio.timeout(self._timeout_s):
                await granted
        except TimeoutError:
            self._abandon(entry)
            self._traffic.refused["no_body_room"] += 1
            detail = (
                f"no room for {nbytes} more bytes of the body within {self._timeout_s:g} s: the server holds "
                f"{self._traffic.body_bytes} bytes of bodies; the maximum is {self._limit_bytes} "
                "(serve --body-budget-bytes)"
            )
            raise ServiceUnavailable(detail, name="body", value=nbytes, bound=self._limit_bytes) from None
        except asyncio.CancelledError:
            self._abandon(entry)
            raise

    def free(self, share: BodyShare, nbytes: int, *, ended: bool) -> None:
        """Free bytes, and grant them to those that have waited longest; `ended`: they are all that the share has."""
        if ended and share is self._favoured:
            self._favoured = None
        elif not nbytes:
            return
        self._count(share, -nbytes)
        for entry in list(self._waiting):
            share, nbytes, granted = entry
            if granted.done():  # cancelled in this turn of the loop
                continue
            if self.take(share, nbytes):
                self._waiting.remove(entry)
                granted.set_result(None)

    def take(self, share: BodyShare, nbytes: int) -> bool:
        """Take bytes if there is room; return whether there is."""
        total_bytes = self._traffic.body_bytes + nbytes
        fits, most_bytes = total_bytes <= self._shared_bytes, self._shared_bytes // 2 - nbytes
        for holder in share.holders:
            fits = fits and self._held.get(holder, 0) <= most_bytes
        if not fits:
            self._favoured = self._favoured or share
            fits = share is self._favoured and total_bytes <= self._limit_bytes
        if fits:
            self._count(share, nbytes)
        return fits

    def _count(self, share: BodyShare, nbytes: int) -> None:
        self._traffic.body_bytes += nbytes
        for holder in share.holders:
            if held := self._held.pop(holder, 0) + nbytes:
                self._held[holder] = held

    def _abandon(self, entry: tuple[BodyShare, int, asyncio.Future[None]]) -> None:
        share, nbytes, granted = entry
        if granted.done() and not granted.cancelled():  # the grant and the end of the wait met in one turn of the loop
            self.free(share, nbytes, ended=False)
            return
        self._waiting.remove(entry)


class BodyShare:
    """Bytes that one call holds, for its `holders`; `read_bytes`: size of its body so far.

    `held_bytes`: how far the body may grow without another `hold`.
    `kept`: a small body that was read, for the leader of the run if that is another server.
    """

    def __init__(self, budget: BodyBudget, holders: tuple[str, ...]) -> None:
        self.read_bytes = 0
        self.kept: bytes | None = None
        self.holders = holders
        self._budget = budget
        self.held_bytes = SMALL_BYTES

    def check(self, total_bytes: int) -> None:
        """Raise `TooLarge` for a body that can never fit."""
        self._budget.check(total_bytes - SMALL_BYTES)

    async def hold(self, total_bytes: int) -> None:
        """Grow to `total_bytes`; do nothing if that much is held. Raises what `BodyBudget.wait` raises."""
        if (missing := total_bytes - self.held_bytes) > 0:
            if not self._budget.take(self, missing):
                await self._budget.wait(self, missing)
            self.held_bytes = total_bytes

    def __enter__(self) -> Self:
        """Return this share."""
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        """Free all bytes."""
        self.end()

    def end(self) -> None:
        """Free all bytes."""
        self._budget.free(self, self.held_bytes - SMALL_BYTES, ended=True)
