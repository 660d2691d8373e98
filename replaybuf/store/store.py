"""The store: every command that replaybuf sends to Redis, one class per kind of data.

Nothing here decides anything. Every call is safe to repeat: a publish is recognised by its group id, a ledger append by
its number, and every attempt to append a payload has its own key. Errors are those of `connection`; a lost lease
raises `NotLeader`, and a Redis without data that it acknowledged raises `DataLost`.

Each function of a run (`library.lua`) first compares what Redis holds with what this process knows to be stored
(`KnownEnds`), and the fencing token of a leader with the newest one. So nothing is written to an older copy of Redis,
and nothing by a leader that was suspended while another one took over. These writes are outside of functions:

    SET, UNLINK of a payload   its key belongs to one append attempt; it has a TTL until it is published, or a note
    names of runs              they only grow; the name "" that tests writability never exists
    keys of a deleted run      a fenced mark deleted them; each call compares the mark, which names this deletion
    `rb_resign`, `rb_restore`  they compare the holder of the lease
    announced servers          they decide nothing; each server changes its own, and one call forgets silent ones
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from replaybuf.errors import Unreadable
from replaybuf.store.buckets import BucketStore
from replaybuf.store.copying import CopyStore
from replaybuf.store.groups import GroupStore, with_columns
from replaybuf.store.ledger import LedgerStore
from replaybuf.store.reader_data import CursorStore, EvaluationStore, SampleStore
from replaybuf.store.redis.connection import Connection
from replaybuf.store.redis.durability import STRICT, WritePolicy
from replaybuf.store.runs import RunStore
from replaybuf.store.servers import ServerStore
from replaybuf.store.snapshots import SnapshotStore
from replaybuf.store.spill import SpillStore
from replaybuf.store.streams import StreamEnds
from replaybuf.store.tickets import CounterStore, TicketStore

logger = logging.getLogger(__name__)

PAYLOADS_AT_ONCE = 250
PAUSE_S = 0.005
"""Payloads of a deleted run that one call deletes, and the pause after it: nobody waits for this work."""


class Store:
    """All data of one Redis or Valkey server. Build it with `await Store.open(url)`."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        buckets = BucketStore(connection, connection.cluster) if connection.cluster else None
        self.runs = RunStore(connection, buckets)
        self.servers = ServerStore(connection)
        self.groups = GroupStore(connection, buckets)
        self.ledger = LedgerStore(connection)
        self.streams = StreamEnds(connection, buckets)
        self.snapshots = SnapshotStore(connection)
        self.tickets = TicketStore(connection)
        self.counters = CounterStore(connection)
        self.evaluations = EvaluationStore(connection)
        self.samples = SampleStore(connection)
        self.cursors = CursorStore(connection)
        self.spill = SpillStore(connection)
        self.copying = CopyStore(connection)

    @classmethod
    async def open(cls, url: str, policy: WritePolicy = STRICT, **options: Any) -> Store:
        """Connect, check the server's role and version, load the function library.

        `options` are those of `Connection`. Raises `UnsupportedServer` if the server is too old or no primary of its
        own, `ServiceUnavailable` if it cannot be reached.
        """
        connection = Connection(url, policy, **options)
        try:
            await connection.check_role()  # not later: after a failover a replica may answer for a moment
            await connection.prepare()
        except BaseException:
            await connection.close()
            raise
        return cls(connection)

    async def delete_run(self, run: str, mark: str) -> int | None:
        """Delete the keys of a deleted run, payloads first, in chunks; return the number of its groups.

        A repetition continues after a crash: the index, which names the payloads, goes last. Several servers may do
        this at the same time. Returns None when `mark` has changed: another server has deleted all keys, and keys of
        the same names may belong to a restored run. Raises `DataLost` if another server has just deleted them.
        """
        groups = 0
        counters = await self.counters.read(run)
        folder = await self._own_folder(run)
        columns = [name.partition(":")[2] for name in counters if name.startswith("column:")]
        index = self.groups.read_index(run, 0, count=PAYLOADS_AT_ONCE)
        for chunks in (index, self.snapshots.read_old_entries(run)):
            async for chunk in chunks:
                payloads = [strings.payload_key for strings in chunk.strings if strings.payload_key]
                for start in range(0, len(payloads), PAYLOADS_AT_ONCE):
                    names = with_columns(payloads[start : start + PAYLOADS_AT_ONCE], columns)
                    if not await self.runs.erase(run, mark, names):
                        return None
                    await asyncio.sleep(PAUSE_S)
                groups += len(payloads)
        # The folder was read before the mark is found unchanged, so it is that of the deleted run.
        if folder and await self.runs.erase(run, mark, []):
            await self.spill.remove_files(run, *folder)
        if self.groups.buckets and await self.runs.erase(run, mark, []):
            await self.groups.buckets.delete_all(run)
        adapters = [name.partition(":")[2] for name in counters if name.startswith("next:")]
        return groups if await self.runs.erase_last(run, mark, adapters) else None

    async def _own_folder(self, run: str) -> tuple[str, str] | None:
        """Read the spill folder of a run; one that is not its own is logged and stays."""
        try:
            return await self.spill.read_folder(run)
        except Unreadable as error:
            logger.error("no spilled file of deleted run %s is deleted: %s", run, error.detail)
            return None

    async def close(self) -> None:
        """Close all connections."""
        await self.streams.close()
        await self.connection.close()
