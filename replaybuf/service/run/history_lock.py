"""Shared-exclusive lock between appends and rewinds of one run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class HistoryLock:
    """Appends hold the lock shared; a rewind holds it exclusively.

        holders > 0  =>  a rewind waits;      a rewind waits or holds  =>  no append starts

    Counter-example without it: a group of version 3 is checked before a rewind to version 1 and stored after it. It
    would pass as a group of the new version 3. A holder checks and stores one chunk, and takes no other lock.
    """

    def __init__(self) -> None:
        self._holders = 0
        self._unheld = asyncio.Event()
        self._unheld.set()
        self._open = asyncio.Event()
        self._open.set()

    def shared(self) -> HistoryLock:
        """Keep rewinds out during the body of `async with`."""
        return self

    async def __aenter__(self) -> None:
        while not self._open.is_set():
            await self._open.wait()
        self._holders += 1
        self._unheld.clear()

    async def __aexit__(self, *_: object) -> None:
        self._holders -= 1
        if not self._holders:
            self._unheld.set()

    @contextlib.asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Keep appends out during the body. The caller holds the decision lock, so there is one at a time."""
        self._open.clear()
        try:
            await self._unheld.wait()
            yield
        finally:
            self._open.set()
