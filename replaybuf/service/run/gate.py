"""The gate between appends and rewinds: a group is stored under the history it was judged by, or judged again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Gate:
    """Appends pass, many at a time; a rewind shuts it: it waits for those inside, and others wait for it.

        inside > 0 and shut  =>  the rewind waits;      shut  =>  nobody enters

    Else a group of version 3, judged before a rewind to version 1 and stored after it, would pass for the work of the
    version 3 to come. Whoever is inside judges and stores one portion, in bounded time, and takes no other lock.
    """

    def __init__(self) -> None:
        self._inside = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._open = asyncio.Event()
        self._open.set()

    @contextlib.asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """Be inside during the body."""
        while not self._open.is_set():
            await self._open.wait()
        self._inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._empty.set()

    @contextlib.asynccontextmanager
    async def shut(self) -> AsyncIterator[None]:
        """Have nobody inside during the body. One at a time: called within a decision."""
        self._open.clear()
        try:
            await self._empty.wait()
            yield
        finally:
            self._open.set()
