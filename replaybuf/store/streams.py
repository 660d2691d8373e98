"""The ends of the two streams of a run, index and ledger, and waiting for new entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from replaybuf.errors import DataLost, LedgerGap, ServiceUnavailable
from replaybuf.store import keys
from replaybuf.store.buckets import BucketStore
from replaybuf.store.known_ends import Ends
from replaybuf.store.redis.cluster_reads import ClusterReads
from replaybuf.store.redis.connection import Connection, text


class StreamEnds:
    """Reads the ends of streams and waits until they move."""

    def __init__(self, connection: Connection, buckets: BucketStore | None = None) -> None:
        self._connection = connection
        self._buckets = buckets
        self._cluster_reads = ClusterReads(connection) if connection.cluster else None

    async def read_end(self, run: str) -> Ends:
        """Read where the streams of a run end. Raises `DataLost` or `LedgerGap` if that is before what is known."""
        return _ends((await self._connection.call(run, "rb_ends"))[1])

    async def read_ends(self, runs: Sequence[str]) -> list[Ends | DataLost | LedgerGap | ServiceUnavailable]:
        """Read where the streams of each of these runs end, or what `read_end` raises, in one round trip.

        `ServiceUnavailable`: the node of the run is away, while others of its cluster answer.
        """
        pipe = self._connection.pipeline()
        for run in runs:
            pipe.execute_command(*self._connection.words_of(run, "rb_ends"))
        ends: list[Ends | DataLost | LedgerGap | ServiceUnavailable] = []
        for run, reply in zip(runs, await self._connection.run_each(pipe), strict=True):
            try:
                ends.append(_ends(self._connection.check_reply(run, "", reply)[1]))
            except (DataLost, LedgerGap, ServiceUnavailable) as error:
                ends.append(error)
        for position, run in enumerate(runs):
            try:
                loss = await self._buckets.find_loss_again(run) if self._buckets else None
            except (DataLost, ServiceUnavailable) as error:
                ends[position] = error
            else:
                ends[position] = loss or ends[position]
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
        return _ends((await self._connection.call(run, "rb_confirm", durably=True))[1])

    async def wait_for_entries(self, known: Mapping[str, Ends], timeout_s: float) -> list[str]:
        """Block until a stream of a run has entries after its known end; return those runs."""
        streams: dict[str, dict[Any, Any]] = {
            run: {keys.index(run): f"{ends.group}-0", keys.ledger(run): f"{ends.entry}-0"}
            for run, ends in known.items()
        }
        if self._cluster_reads:
            return await self._cluster_reads.wait(streams, timeout_s)
        together = {key: known_id for each in streams.values() for key, known_id in each.items()}
        moved = set(await self._connection.read_blocking(together, timeout_s) or {})
        return [run for run, each in streams.items() if any(key.encode() in moved for key in each)]

    async def close(self) -> None:
        """End the reads that wait."""
        if self._cluster_reads:
            await self._cluster_reads.close()


def _ends(detail: Sequence[int]) -> Ends:
    entry, group, entry_key = detail
    return Ends(int(entry), int(group), entry_key=text(entry_key))
