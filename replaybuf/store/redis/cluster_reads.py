"""Blocking reads of the streams of several runs on a cluster.

A blocking read covers the keys of one slot, so each run has a connection of its own, on which its read stays open while
others are answered. Further runs than `MOST_BLOCKING` are looked at together once a second.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import Any

from replaybuf.errors import ServiceUnavailable
from replaybuf.store.redis.connection import Connection

MOST_BLOCKING = 64
LOOK_S = 1.0
AWAY_PAUSE_S = 0.5
"""Pause after a read that failed: its node is away, and the reads of other nodes go on."""
Streams = Mapping[Any, Any]
"""Streams of one run, each with the id of the last entry that is known."""


class ClusterReads:
    """Waits for new entries of several runs; one task at a time may wait."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._reads: dict[str, asyncio.Task[bool]] = {}
        self._look_at_s = 0.0

    async def wait(self, streams: Mapping[str, Streams], timeout_s: float) -> list[str]:
        """Block until a run has entries after the known ones, or for `timeout_s`; return such runs.

        Raises `ServiceUnavailable` if no read succeeds.
        """
        self._end(self._reads.keys() - streams.keys())
        own = [run for run in streams if run in self._reads]
        others = [run for run in streams if run not in self._reads]
        for run in others[: max(0, MOST_BLOCKING - len(own))]:
            self._reads[run] = asyncio.create_task(self._read(streams[run], timeout_s), name=f"read {run}")
        rest = {run: known for run, known in streams.items() if run not in self._reads}
        moved = await self._look(rest) if rest and time.monotonic() >= self._look_at_s else []
        await asyncio.wait(self._reads.values(), timeout=0 if moved else timeout_s, return_when=asyncio.FIRST_COMPLETED)
        ended = {run: self._reads.pop(run) for run, read in [*self._reads.items()] if read.done()}
        answered = {run: read for run, read in ended.items() if not read.cancelled()}
        failures = [failure for read in answered.values() if (failure := read.exception())]
        for failure in failures:
            if len(failures) == len(streams) or not isinstance(failure, ServiceUnavailable):
                raise failure
        return moved + [run for run, read in answered.items() if not read.exception() and read.result()]

    async def _read(self, known: Streams, timeout_s: float) -> bool:
        pipe = self._connection.pipeline()
        pipe.xread(dict(known), count=1, block=int(timeout_s * 1000))
        try:
            return bool(*await self._connection.run_each(pipe))
        except ServiceUnavailable:
            await asyncio.sleep(AWAY_PAUSE_S)
            raise

    async def _look(self, streams: Mapping[str, Streams]) -> list[str]:
        """Look at the streams of runs without waiting; those of a node that is away have no news."""
        self._look_at_s = time.monotonic() + LOOK_S
        pipe = self._connection.pipeline()
        for known in streams.values():
            pipe.xread(dict(known), count=1)
        replies = await self._connection.run_each(pipe)
        return [run for run, reply in zip(streams, replies, strict=True) if reply and isinstance(reply, dict)]

    def _end(self, runs: Iterable[str]) -> None:
        for run in runs:
            self._reads.pop(run).cancel()

    async def close(self) -> None:
        """End all reads."""
        reads, self._reads = [*self._reads.values()], {}
        for read in reads:
            read.cancel()
        await asyncio.gather(*reads, return_exceptions=True)
