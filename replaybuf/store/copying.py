"""Raw reads and writes of all keys of a run, to copy it to a file or to another Redis.

Keys that change in place are read in one transaction (`Moment`); streams, ids and payloads only grow, or shrink by
trimming and freeing, and are read in pieces after it.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec

from replaybuf.errors import Conflict, Gone, NoRoom, Unreadable, UnsupportedServer
from replaybuf.store import keys
from replaybuf.store.chunks import split_chunks
from replaybuf.store.redis.connection import Connection
from replaybuf.store.runs import DELETING, RESTORING, read_incarnation
from replaybuf.store.tickets import WHOLE
from replaybuf.wire.config import ADAPTER_NAME
from replaybuf.wire.ledger import EPOCHS_OF_RESTORE

STAGED_S = 3600
"""Lifetime of restored keys until the run appears: a restore that is cut leaves nothing for longer.

`CopyStore.extend_lifetimes` renews it: a large run takes longer than that.
"""
IDS_AT_ONCE = 10_000
ENTRIES_AT_ONCE = 1_000
COMMANDS_AT_ONCE = 1_000
FIELDS_AT_ONCE = 2_000
"""Fields of a hash in one command: a function passes at most about 8,000 words to a command."""

MOST_DELETIONS = 2**31
"""Deletions of runs of one name that a backup may report."""

_ISSUED = b"next:"
EPOCH_BASE = "epoch_base"
"""Counter of a restored run: later trainers get epochs above it (`decide_attach`)."""

StreamEntry: TypeAlias = tuple[bytes, list[bytes]]
"""Id and flat list of fields."""
Command: TypeAlias = tuple[Any, ...]
"""Name, key and further words of a Redis command."""


@dataclasses.dataclass(frozen=True, slots=True)
class Restore:
    """Who restores which run: each write compares `holder`, which is random, with the lease, and renews the lease."""

    run: str
    holder: str
    lease_s: float


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of a run that change in place, at one moment. `counts` holds the ends of both streams then.

    `incarnation`: how often runs of this name had been deleted before.
    """

    counts: dict[bytes, bytes]
    tickets: list[tuple[bytes, float]]
    cursors: dict[bytes, bytes]
    snapshot: bytes | None
    fence: bytes | None
    spill_url: bytes | None
    incarnation: Annotated[int, msgspec.Meta(ge=0, le=MOST_DELETIONS)] = 0

    def __post_init__(self) -> None:
        for name, value in self.counts.items():
            adapter = name.removeprefix(_ISSUED) if name.startswith(_ISSUED) else b""
            if not WHOLE.fullmatch(value) or (adapter and not ADAPTER_NAME.fullmatch(adapter.decode("latin-1"))):
                raise ValueError(f"the counter {name[:80]!r} is {value[:40]!r}")

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
        pipe = (await self._connection.client_of(keys.counts(run))).pipeline(transaction=True)
        pipe.hgetall(keys.counts(run))
        pipe.zrange(keys.tickets(run), 0, -1, withscores=True)
        pipe.hgetall(keys.cursors(run))
        pipe.get(keys.snapshot(run))
        pipe.get(keys.fence(run))
        pipe.hget(keys.spill(run), "url")
        pipe.get(keys.incarnation(run))
        counts, tickets, cursors, snapshot, fence, spill_url, deleted = await self._connection.run(pipe.execute())
        try:
            return Moment(
                counts=counts,
                tickets=[(ticket, float(deadline)) for ticket, deadline in tickets],
                cursors=cursors,
                snapshot=snapshot,
                fence=fence,
                spill_url=spill_url,
                incarnation=read_incarnation(run, deleted),
            )
        except ValueError as error:
            raise Unreadable(f"run {run} cannot be copied: {error}", name="run", value=run) from error

    async def read_stream(self, key: str, through: int | str, count: int) -> AsyncIterator[list[StreamEntry]]:
        """Read the entries of a stream up to id `through`, in pieces of at most `count`."""
        after = "-"
        while True:
            entries = await self._connection.run(self._connection.client.xrange(key, after, str(through), count))
            if not entries:
                return
            yield [(number, [part for pair in fields.items() for part in pair]) for number, fields in entries]
            after = "(" + entries[-1][0].decode()

    async def read_hash(self, key: str, count: int = IDS_AT_ONCE) -> AsyncIterator[dict[bytes, bytes]]:
        """Read the fields of a hash, in pieces of about `count`; a field may come twice."""
        position = 0
        while True:
            scan: Any = self._connection.client.hscan(key, position, count=count)
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

        A run that was deleted less than a day ago may be restored. Raises `UnsupportedServer` for a cluster.
        """
        if self._connection.cluster:
            # Nothing checks the lease in the slot of a payload: a restore that stood still would write over another.
            detail = f"{self._connection.url} is a Redis Cluster; restore to one server (redis://HOST:PORT/DB)"
            raise UnsupportedServer(detail, name="redis_url", value=self._connection.url)
        pipe = self._connection.client.pipeline(transaction=True)
        pipe.sismember(keys.RUNS, run)
        pipe.get(keys.deleted(run))
        listed, mark = await self._connection.run(pipe.execute())
        if mark and mark.startswith(DELETING.encode()):
            raise Gone(f"run {run} is being deleted; restore it when its keys are gone", name="run", value=run)
        if listed:
            detail = f"run {run} exists on {self._connection.url}; delete it first, or restore to another Redis"
            raise Conflict(detail, name="run", value=run)

    async def remove_staged(self, restore: Restore, adapters: Iterable[str]) -> None:
        """Delete restored keys other than payloads, to begin again."""
        await self._write(restore, [("UNLINK", key) for key in _copied(restore.run, adapters)])

    async def write_moment(self, restore: Restore, moment: Moment) -> None:
        """Write the keys that change in place.

        With a fencing token that no server of the copied run has had, and a base of epochs above those of its trainers.
        """
        run, number = restore.run, (moment.fence or b"0").partition(b":")[0]
        counts = moment.counts | {EPOCH_BASE.encode(): b"%d" % _new_epoch_base(moment)}
        await self._stage(restore, _set_fields(keys.counts(run), counts))
        await self._stage(restore, _set_fields(keys.cursors(run), moment.cursors))
        await self._stage(restore, [("ZADD", keys.tickets(run), at, ticket) for ticket, at in moment.tickets])
        fence = moment.fence and b"%s:%s" % (number, restore.holder.encode())
        values = ((keys.snapshot(run), moment.snapshot), (keys.fence(run), fence))
        await self.write_values(restore, {key: value for key, value in values if value is not None})

    async def write_stream(self, restore: Restore, key: str, entries: Sequence[StreamEntry]) -> None:
        """Append entries under their ids."""
        await self._stage(restore, [("XADD", key, number, *fields) for number, fields in entries])

    async def write_hash(self, restore: Restore, key: str, fields: Mapping[bytes, bytes]) -> None:
        """Set fields of a hash."""
        await self._stage(restore, _set_fields(key, fields))

    async def write_values(self, restore: Restore, values: Mapping[str, bytes]) -> None:
        """Write strings, bitmaps and payloads."""
        await self._write(restore, [("SET", key, value, "EX", STAGED_S) for key, value in values.items()])

    async def extend_lifetimes(self, restore: Restore, adapters: Iterable[str], payload_keys: Iterable[str]) -> None:
        """Give all restored keys their full lifetime again."""
        names = [*_copied(restore.run, adapters), *payload_keys]
        await self._write(restore, [("EXPIRE", key, STAGED_S) for key in names])

    async def keep_payloads(self, restore: Restore, adapters: Iterable[str], payload_keys: Iterable[str]) -> None:
        """Remove the lifetime of payloads. Raises `NoRoom` if one is gone.

        A mark comes first: if this restore loses its lease before `show`, servers delete the payloads by the index.
        """
        run, mark = restore.run, f"{RESTORING}:{restore.holder}"
        marked: list[Command] = [("SET", keys.deleted(run), mark), ("SADD", keys.DELETING, run)]
        await self._call(restore, [*marked, *(("PERSIST", key) for key in _copied(run, adapters))])
        if not all(await self._write(restore, [("PERSIST", key) for key in payload_keys])):
            raise NoRoom(f"{self._connection.url} dropped restored payloads; it needs more memory", name="payloads")

    async def show(self, restore: Restore, copied: int) -> None:
        """Let a restored run appear, durably: from now on servers open it. `copied`: its incarnation in the copy."""
        run = restore.run
        # Nothing counts deletions meanwhile: the run is not listed, and its mark is that of the restore.
        deleted = await self._connection.run(self._connection.client.get(keys.incarnation(run)))
        shown: list[Command] = [
            ("SET", keys.incarnation(run), max(copied, read_incarnation(run, deleted))),
            ("UNLINK", keys.deleted(run)),
            ("SREM", keys.DELETING, run),
            ("SADD", keys.RUNS, run),
        ]
        await self._call(restore, shown, durably=True)

    async def _stage(self, restore: Restore, commands: Iterable[Command]) -> None:
        """Write keys that have a lifetime until the run appears."""
        for piece in split_chunks(commands, _nbytes, COMMANDS_AT_ONCE):
            lifetimes: list[Command] = [("EXPIRE", key, STAGED_S) for key in dict.fromkeys(c[1] for c in piece)]
            await self._call(restore, [*piece, *lifetimes])

    async def _write(self, restore: Restore, commands: Iterable[Command]) -> list[Any]:
        replies: list[Any] = []
        for piece in split_chunks(commands, _nbytes, COMMANDS_AT_ONCE):
            replies += await self._call(restore, piece)
        return replies

    async def _call(self, restore: Restore, commands: Sequence[Command], *, durably: bool = False) -> list[Any]:
        """Do commands of a restore at once. Raises `Conflict`, and changes nothing, if it lost its lease."""
        run, pipe = restore.run, self._connection.pipeline()
        names = [keys.lead(run), keys.RUNS, keys.deleted(run), *(command[1] for command in commands)]
        words = [word for name, _, *rest in commands for word in (name, len(rest), *rest)]
        pipe.fcall("rb_restore", len(names), *names, restore.holder, int(restore.lease_s * 1000), run, *words)
        (answer,) = await (self._connection.run_durably(pipe) if durably else self._connection.run(pipe.execute()))
        written, replies = answer
        if not written:
            detail = (
                f"the restore of run {run} lost its lease of {restore.lease_s:g} s on {self._connection.url}: it stood "
                "still, or another process created, restored or deleted the run; start the restore again"
            )
            raise Conflict(detail, name="run", value=run)
        return list(replies)


def _set_fields(key: str, fields: Mapping[bytes, bytes]) -> list[Command]:
    pairs = list(fields.items())
    return [
        ("HSET", key, *(part for pair in pairs[at : at + FIELDS_AT_ONCE] for part in pair))
        for at in range(0, len(pairs), FIELDS_AT_ONCE)
    ]


def _new_epoch_base(moment: Moment) -> int:
    """Return a base of epochs that no other restore has: random, because one backup may be restored many times.

    A run may be restored from backups of restored runs a thousand times before epochs exceed what JSON keeps exactly.
    """
    before = int(moment.counts.get(EPOCH_BASE.encode(), 0))
    return before + EPOCHS_OF_RESTORE * (1 + int(secrets.token_hex(3), 16))


def _nbytes(command: Command) -> int:
    return sum(len(word) for word in command if isinstance(word, (bytes, str)))


def _copied(run: str, adapters: Iterable[str]) -> list[str]:
    """List the keys of a run that a copy holds. Lease, known ends, spilled groups and buckets belong to one Redis."""
    left_out = {keys.lead(run), keys.lost(run), keys.spill(run), keys.buckets(run)}
    return [key for key in keys.all_of(run, adapters) if key not in left_out]
