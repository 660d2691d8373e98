"""Raw reads and writes of all keys of a run, to copy it to a file or to another Redis.

Keys that change in place are read in one transaction (`Moment`); streams, ids and payloads only grow, or shrink by
trimming and freeing, and are read in pieces after it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from replaybuf.errors import Conflict, Gone, NoRoom
from replaybuf.store import keys
from replaybuf.store.chunks import split_chunks
from replaybuf.store.connection import Connection

STAGED_S = 3600
"""Lifetime of restored keys until the run appears: a restore that is cut leaves nothing for longer."""
IDS_AT_ONCE = 10_000
ENTRIES_AT_ONCE = 1_000

StreamEntry: TypeAlias = tuple[bytes, list[bytes]]
"""Id and flat list of fields."""


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of a run that change in place, at one moment. `counts` holds the ends of both streams then."""

    counts: dict[bytes, bytes]
    tickets: list[tuple[bytes, float]]
    cursors: dict[bytes, bytes]
    snapshot: bytes | None
    fence: bytes | None
    spill_url: bytes | None

    @property
    def entries(self) -> int:
        """Number of the newest ledger entry."""
        return int(self.counts.get(b"entries", 0))

    @property
    def stored(self) -> int:
        """Number of the newest group."""
        return int(self.counts.get(b"stored", 0))

    @property
    def adapters(self) -> list[str]:
        """Adapters that prompt indexes were issued for."""
        return [name.decode().removeprefix("next:") for name in self.counts if name.startswith(b"next:")]


class CopyStore:
    """Reads and writes the keys of one run at a time."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    # ------------------------------------------------------------------ read

    async def read_moment(self, run: str) -> Moment:
        """Read the keys that change in place, in one transaction."""
        pipe = self._connection.client.pipeline(transaction=True)
        pipe.hgetall(keys.counts(run))
        pipe.zrange(keys.tickets(run), 0, -1, withscores=True)
        pipe.hgetall(keys.cursors(run))
        pipe.get(keys.snapshot(run))
        pipe.get(keys.fence(run))
        pipe.hget(keys.spill(run), "url")
        counts, tickets, cursors, snapshot, fence, spill_url = await self._connection.run(pipe.execute())
        return Moment(
            counts=counts,
            tickets=[(ticket, float(deadline)) for ticket, deadline in tickets],
            cursors=cursors,
            snapshot=snapshot,
            fence=fence,
            spill_url=spill_url,
        )

    async def read_stream(self, key: str, through: int | str, count: int) -> AsyncIterator[list[StreamEntry]]:
        """Read the entries of a stream up to id `through`, in pieces of at most `count`."""
        after = "-"
        while True:
            found = await self._connection.run(self._connection.client.xrange(key, after, str(through), count))
            if not found:
                return
            yield [(number, [part for pair in fields.items() for part in pair]) for number, fields in found]
            after = "(" + found[-1][0].decode()

    async def read_hash(self, key: str) -> AsyncIterator[dict[bytes, bytes]]:
        """Read the fields of a hash, in pieces; a field may come twice."""
        position = 0
        while True:
            scan: Any = self._connection.client.hscan(key, position, count=IDS_AT_ONCE)
            position, fields = await self._connection.run(scan)
            if fields:
                yield fields
            if not position:
                return

    async def read_value(self, key: str) -> bytes | None:
        """Read a string or bitmap."""
        value: bytes | None = await self._connection.run(self._connection.client.get(key))
        return value

    # ------------------------------------------------------------------ write

    async def check_free(self, run: str) -> None:
        """Raise `Conflict` if this Redis holds the run, and `Gone` while an older run of the name is being deleted.

        A run that was deleted less than a day ago may be restored.
        """
        pipe = self._connection.client.pipeline(transaction=True)
        pipe.sismember(keys.RUNS, run)
        pipe.ttl(keys.deleted(run))
        listed, left_s = await self._connection.run(pipe.execute())
        if left_s == -1:
            raise Gone(f"run {run} is being deleted; restore it when its keys are gone", name="run", value=run)
        if listed:
            detail = f"run {run} exists on {self._connection.url}; delete it first, or restore to another Redis"
            raise Conflict(detail, name="run", value=run)

    async def remove_staged(self, run: str, adapters: Iterable[str]) -> None:
        """Delete restored keys other than payloads, to begin again."""
        await self._connection.run(self._connection.client.unlink(*_copied(run, adapters)))

    async def write_moment(self, run: str, moment: Moment) -> None:
        """Write the keys that change in place."""
        pipe = self._connection.pipeline()
        for key, fields in ((keys.counts(run), moment.counts), (keys.cursors(run), moment.cursors)):
            if fields:
                pipe.execute_command("HSET", key, *(part for pair in fields.items() for part in pair))
        for ticket, deadline in moment.tickets:
            pipe.execute_command("ZADD", keys.tickets(run), deadline, ticket)
        for key, value in ((keys.snapshot(run), moment.snapshot), (keys.fence(run), moment.fence)):
            if value is not None:
                pipe.execute_command("SET", key, value)
        await self._stage(pipe, _copied(run, moment.adapters))

    async def write_stream(self, key: str, entries: Sequence[StreamEntry]) -> None:
        """Append entries under their ids."""
        for piece in split_chunks(entries, lambda entry: sum(map(len, entry[1]))):
            pipe = self._connection.pipeline()
            for number, fields in piece:
                pipe.execute_command("XADD", key, number, *fields)
            await self._stage(pipe, [key])

    async def write_hash(self, key: str, fields: Mapping[bytes, bytes]) -> None:
        """Set fields of a hash."""
        pipe = self._connection.pipeline()
        pipe.execute_command("HSET", key, *(part for pair in fields.items() for part in pair))
        await self._stage(pipe, [key])

    async def write_values(self, values: Mapping[str, bytes]) -> None:
        """Write strings, bitmaps and payloads."""
        pipe = self._connection.pipeline()
        for key, value in values.items():
            pipe.execute_command("SET", key, value, "EX", STAGED_S)
        await self._connection.run(pipe.execute())

    async def keep_payloads(self, payload_keys: Sequence[str]) -> None:
        """Remove the lifetime of payloads. Raises `NoRoom` if one is gone."""
        for piece in split_chunks(payload_keys, len, ENTRIES_AT_ONCE):
            pipe = self._connection.pipeline()
            for key in piece:
                pipe.execute_command("PERSIST", key)
            if not all(await self._connection.run(pipe.execute())):
                raise NoRoom(f"{self._connection.url} dropped restored payloads; it needs more memory", name="payloads")

    async def show(self, run: str, adapters: Iterable[str]) -> None:
        """Let a restored run appear, durably: from now on servers open it."""
        pipe = self._connection.pipeline()
        for key in _copied(run, adapters):
            pipe.execute_command("PERSIST", key)
        pipe.execute_command("UNLINK", keys.deleted(run))
        pipe.execute_command("SADD", keys.RUNS, run)
        await self._connection.run_durably(pipe)

    async def _stage(self, pipe: Any, names: Iterable[str]) -> None:
        for key in names:
            pipe.execute_command("EXPIRE", key, STAGED_S)
        await self._connection.run(pipe.execute())


def _copied(run: str, adapters: Iterable[str]) -> list[str]:
    """List the keys of a run that a copy holds. Lease, known ends and spilled groups belong to one Redis."""
    left_out = {keys.lead(run), keys.lost(run), keys.spill(run)}
    return [key for key in keys.all_of(run, adapters) if key not in left_out]
