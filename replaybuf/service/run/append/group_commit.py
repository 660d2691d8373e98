"""Group commit: appends that arrive while one is being written are written together after it.

A caller alone writes at once. With many callers, one round trip and one wait for the disk serve all of them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import msgspec

from replaybuf.errors import NoRoom
from replaybuf.store import AppendResult, PendingGroup
from replaybuf.store.chunks import CHUNK_BYTES

APPEND_CHUNK = 64
"""Groups stored at once: the event loop is free between two writes."""

Write: TypeAlias = Callable[[list[PendingGroup], int], Awaitable[list[AppendResult]]]


class _Caller(msgspec.Struct, frozen=True):
    """The groups of one caller, the newest ledger entry that they were checked against, and what will answer it."""

    items: Sequence[PendingGroup]
    checked_at: int
    results: asyncio.Future[list[AppendResult]]

    @property
    def nbytes(self) -> int:
        return sum([len(item.frame) for item in self.items])


class GroupCommit:
    """Calls `write` for the groups of all waiting callers, one call at a time; each caller gets its own results.

    A write has at most `APPEND_CHUNK` groups and `CHUNK_BYTES`, or one caller. Callers are not dropped: the server
    bounds how many requests, and bytes of them, it takes.
    """

    def __init__(self, write: Write) -> None:
        self._write = write
        self._waiting: deque[_Caller] = deque()
        self._writing = False
        self._task: asyncio.Task[None] | None = None

    async def append(self, items: list[PendingGroup], checked_at: int) -> list[AppendResult]:
        """Store groups; return one result each. Raises what `write` raises."""
        if not items:
            return []
        if not self._writing:
            self._writing = True
            try:
                return await self._write(items, checked_at)  # a task and a future would take longer than its checks
            finally:
                self._go_on()
        caller = _Caller(items, checked_at, asyncio.get_running_loop().create_future())
        self._waiting.append(caller)
        return await caller.results

    def _go_on(self) -> None:
        """Write for those who came meanwhile, in a task: a caller that is cancelled must not take others with it."""
        self._writing = bool(self._waiting)
        if self._writing:
            self._task = asyncio.create_task(self._write_waiting())

    async def _write_waiting(self) -> None:
        try:
            while self._waiting:
                await self._write_together(self._take())
        finally:
            self._writing = False
            for caller in self._waiting:  # only if this task was cancelled
                caller.results.cancel()

    def _take(self) -> list[_Caller]:
        """Remove the next callers that fit into one write."""
        callers = [self._waiting.popleft()]
        if not self._waiting:
            return callers
        groups, nbytes = len(callers[0].items), callers[0].nbytes
        while self._waiting:
            groups, nbytes = groups + len(self._waiting[0].items), nbytes + self._waiting[0].nbytes
            if groups > APPEND_CHUNK or nbytes > CHUNK_BYTES:
                break
            callers.append(self._waiting.popleft())
        return callers

    async def _write_together(self, callers: Sequence[_Caller]) -> None:
        try:
            checked_at = min([caller.checked_at for caller in callers])
            results = iter(await self._write([item for caller in callers for item in caller.items], checked_at))
        except NoRoom as error:
            if len(callers) > 1:  # a full server still answers those who repeat what is stored
                for caller in callers:
                    await self._write_together([caller])
            else:
                _fail(callers, error)
        except Exception as error:  # noqa: BLE001 - each caller raises it
            _fail(callers, error)
        except asyncio.CancelledError:
            for caller in callers:
                caller.results.cancel()
            raise
        else:
            for caller in callers:
                own = [next(results) for _ in caller.items]
                if not caller.results.done():  # else its request was cancelled
                    caller.results.set_result(own)


def _fail(callers: Sequence[_Caller], error: Exception) -> None:
    for caller in callers:
        if not caller.results.done():
            caller.results.set_exception(error)
