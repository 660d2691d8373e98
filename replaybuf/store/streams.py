"""The ends of the two streams of a run, index and ledger, and waiting for new entries."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from replaybuf.errors import DataLost, LedgerGap
from replaybuf.store import keys
from replaybuf.store.buckets import BucketStore
from replaybuf.store.loss.ends import Ends
from replaybuf.store.redis.connection import Connection, text

SHORTEST_LOOK_S, LOOK_S = 0.02, 0.001
"""Pause between two looks for new entries on a cluster, at least and for each run."""


class StreamEnds:
    """Reads the ends of streams and waits until they move."""

    def __init__(self, connection: Connection, buckets: BucketStore | None = None) -> None:
        self._connection = connection
        self._buckets = buckets

    async def read_end(self, run: str) -> Ends:
        """Read where the streams of a run end. Raises `DataLost` or `LedgerGap` if that is before what is known."""
        return _ends((await self._connection.call(run, "rb_ends"))[1])

    async def read_ends(self, runs: Sequence[str]) -> list[Ends | DataLost | LedgerGap]:
        """Read where the streams of each of these runs end, or what `read_end` raises, in one round trip."""
        pipe = self._connection.pipeline()
        for run in runs:
            self._connection.add_call(pipe, run, "rb_ends")
        ends: list[Ends | DataLost | LedgerGap] = []
        for run, reply in zip(runs, await self._connection.run_each(pipe), strict=True):
            try:
                ends.append(_ends(self._connection.check_reply(run, "", reply)[1]))
            except (DataLost, LedgerGap) as error:
                ends.append(error)
        for position, run in enumerate(runs):
            if self._buckets and (loss := await self._buckets.find_loss_again(run)):
                ends[position] = loss
        return ends

    async def read_confirmed_end(self, run: str) -> Ends | None:
        """Read up to where the streams of a run are durable; None = all readable entries are.

        A reader that acts on entries it read, and not on an answer to its own write, must not read further. Raises
        `NotDurable`, and what `read_end` raises.
        """
        if self._connection.reads_are_durable:
            await self.read_end(run)
            return None
        # WAIT covers what the server wrote before the last write of this connection, so this makes one.
        return _ends((await self._connection.call(run, "rb_count", (), ["confirmed", 1], durably=True))[1])

    async def wait_for_entries(self, known: Mapping[str, Ends], timeout_s: float) -> list[str]:
        """Block until a stream of a run has entries after its known end; return those runs."""
        if self._connection.cluster:
            return await self._look_for_entries(known, timeout_s)
        streams: dict[Any, Any] = {}
        for run, ends in known.items():
            streams |= {keys.index(run): f"{ends.group}-0", keys.ledger(run): f"{ends.entry}-0"}
        reply = await self._connection.read_blocking(streams, timeout_s)
        moved = set(reply or {})
        return [run for run in known if moved & {keys.index(run).encode(), keys.ledger(run).encode()}]

    async def _look_for_entries(self, known: Mapping[str, Ends], timeout_s: float) -> list[str]:
        """Look often: a blocking read covers one slot, so it would take a connection for each run."""
        ends_s = time.monotonic() + timeout_s
        while True:
            pipe = self._connection.pipeline()
            for run, ends in known.items():
                pipe.xread({keys.index(run): f"{ends.group}-0", keys.ledger(run): f"{ends.entry}-0"}, count=1)
            replies = await self._connection.run_each(pipe)
            moved = [run for run, reply in zip(known, replies, strict=True) if reply and isinstance(reply, dict)]
            if moved or time.monotonic() >= ends_s:
                return moved
            await asyncio.sleep(max(SHORTEST_LOOK_S, len(known) * LOOK_S))


def _ends(detail: Sequence[int]) -> Ends:
    entry, group, entry_key = detail
    return Ends(int(entry), int(group), entry_key=text(entry_key))
