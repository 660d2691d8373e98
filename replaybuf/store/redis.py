"""The store: every command replaybuf sends to Redis.

Nothing here decides anything. Calls are safe to repeat: a publish is recognised by group id, a ledger append by its
number, a payload has a key of its own per attempt. A lost connection and a server that takes no writes raise
`ServiceUnavailable`, a full server `NoRoom`, a lost lease `NotLeader`, a Redis that forgot what
it had acknowledged `DataLost`. What is acknowledged goes through `_durably`, which
waits for the server's confirmation on the same connection and raises `NotDurable` without it; a repeat writes something
too, so that its wait covers the first try. One client serves all calls; the blocking read of new entries has its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any, TypeVar

import numpy as np
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, OutOfMemoryError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.maint_notifications import MaintNotificationsConfig

from replaybuf.errors import (
    Conflict,
    DataLost,
    NoRoom,
    NotDurable,
    NotLeader,
    ReplaybufError,
    ServiceUnavailable,
    UnsupportedServer,
)
from replaybuf.group import Group
from replaybuf.index import entry_of
from replaybuf.ledger import AnyRecord, decode_record, encode_record
from replaybuf.store import keys
from replaybuf.store.durability import STRICT, Barrier, Level, Settings, Wanted, judge
from replaybuf.store.entries import (
    EntryStrings,
    IndexChunk,
    IndexEntry,
    default_prompt,
    encode_strings,
    read_chunk,
    read_stored,
)
from replaybuf.store.instep import InStepRedis, receive_in_step, send_in_step

logger = logging.getLogger(__name__)

T = TypeVar("T")

COMMAND_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 5.0
STALL_PAUSE_S = 1.0
"""A Redis that did not answer in time is asked again after so long."""
OLDEST_SERVER = (7, 0)
LIBRARY = "replaybuf1"
_LIBRARY = files("replaybuf.store").joinpath("library.lua").read_text()
READ_CHUNK_ENTRIES = 5_000
READ_CHUNK_BYTES = 8 << 20
"""Replies above 8 MiB halve the parser's speed and hold up other calls."""
_MARKED_AT_ONCE = 2_000
"""Half as many prompts, an index and a number each: a call with so many holds up others for about 2 ms."""


@dataclasses.dataclass(frozen=True, slots=True)
class Appended:
    """Outcome of one group of an append; `number` is the index number of the group that is stored under the id.

    0 = it was stored once, and its history is trimmed.
    """

    group_id: str
    stored: bool
    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class ToAppend:
    """One group ready to be stored: its id, the id its ticket's prompt stands for ("" without one), its frame."""

    group: Group
    group_id: str
    prompt_key: str
    frame: bytes
    crc32c: int


@dataclasses.dataclass(frozen=True, slots=True)
class Lease:
    """Who leads a run: `token` is our fencing token, or None where the `holder` leads for another `left_s` seconds."""

    token: str | None
    holder: str
    left_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Ends:
    """Where the streams of a run end: number of the newest ledger entry and of the newest group; 0 = none."""

    entry: int
    group: int


@dataclasses.dataclass(frozen=True, slots=True)
class ServerReport:
    """What the server is and how durable an acknowledged write is on it.

    `durability` is the level in force, `met_by` what it rests on, `reasons` say what is weaker than strict or at risk.
    `replicas` are connected now.
    """

    version: str
    durability: Level
    met_by: str
    reasons: tuple[str, ...]
    wanted: Wanted
    replicas: int
    used_memory_bytes: int
    max_memory_bytes: int
    max_memory_policy: str

    @property
    def summary(self) -> str:
        """Level and what it rests on: `strict (appendfsync always)`."""
        return f"{self.durability} ({self.met_by})"


# Words with which a server refuses writes that it may take later: it cannot save, is a replica, lost its replicas, ...
_NOT_NOW = "MISCONF|READONLY|NOREPLICAS|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|BUSY|UNBLOCKED"
_TAKES_NO_WRITES = re.compile(rf"(?:^|caused error: )\W*(?:{_NOT_NOW})\b")


class Store:
    """Commands on one Redis or Valkey server; see the module docstring. Build with `await Store.open(url)`.

    `unconfirmed` counts writes that were not confirmed in time, `replicas_confirmed` is how many replicas confirmed the
    last write that waited for any.
    """

    def __init__(
        self,
        url: str,
        wanted: Wanted = STRICT,
        *,
        command_timeout_s: float | None = None,
        connect_timeout_s: float | None = None,
    ) -> None:
        self.url = url
        self.command_timeout_s = COMMAND_TIMEOUT_S if command_timeout_s is None else command_timeout_s
        self._stalled_until_s = 0.0
        self.wanted = wanted
        self.unconfirmed = 0
        self.replicas_confirmed = 0
        self._barrier: Barrier | None = None
        self._reads_durable = True
        common: dict[str, Any] = {
            "protocol": 3,
            "legacy_responses": False,
            "socket_connect_timeout": CONNECT_TIMEOUT_S if connect_timeout_s is None else connect_timeout_s,
            "retry": Retry(NoBackoff(), 0),
            "health_check_interval": 0,
            # While they are on, redis-py takes connections from its pool without a look whether they were closed.
            "maint_notifications_config": MaintNotificationsConfig(enabled=False),
        }
        self._redis = InStepRedis.from_url(url, socket_timeout=self.command_timeout_s, **common)
        self._blocking = InStepRedis.from_url(url, socket_timeout=None, **common)

    @classmethod
    async def open(cls, url: str, wanted: Wanted = STRICT, **timeouts: float) -> Store:
        """Connect, check that the server is fit, load the function library.

        Raises `UnsupportedServer` for one that is too old, `ServiceUnavailable` where it cannot be reached.
        """
        store = cls(url, wanted, **timeouts)
        try:
            await store.prepare()
        except BaseException:
            await store.close()
            raise
        return store

    async def prepare(self) -> None:
        """Check the server's version and (re)load the function library; needed again after it was replaced."""
        report = await self.report()
        version = tuple(int(part) for part in report.version.split(".")[:2])
        if version < OLDEST_SERVER:
            oldest = ".".join(map(str, OLDEST_SERVER))
            raise UnsupportedServer(
                f"Redis at {self.url} has version {report.version}; at least {oldest} is needed",
                name="redis_version",
                value=report.version,
                bound=oldest,
            )
        if not await self._has(_LIBRARY):  # loading it needs room, which a full server has not
            await self._guard(self._redis.function_load(_LIBRARY, replace=True))

    async def _has(self, library: str) -> bool:
        listed = await self._guard(self._redis.function_list(LIBRARY, withcode=True))
        return any(library.encode() in _flat(entry) for entry in listed)

    async def close(self) -> None:
        """Close all connections."""
        await self._redis.aclose()
        await self._blocking.aclose()

    async def report(self) -> ServerReport:
        """Ask the server what it is and how it persists; writes are waited for accordingly from now on."""
        info: dict[str, Any] = await self._guard(self._redis.info())
        settings = await self._settings(info)
        verdict = judge(settings, self.wanted)
        self._barrier, self._reads_durable = verdict.barrier, verdict.reads_durable
        return ServerReport(
            version=str(info.get("redis_version") or info.get("valkey_version")),
            durability=verdict.level,
            met_by=verdict.met_by,
            reasons=verdict.reasons,
            wanted=self.wanted,
            replicas=settings.replicas,
            used_memory_bytes=int(info.get("used_memory", 0)),
            max_memory_bytes=int(info.get("maxmemory", 0)),
            max_memory_policy=settings.policy or "unknown",
        )

    async def _settings(self, info: dict[str, Any]) -> Settings:
        config: dict[str, str] = {}
        refused = None
        names = ("appendonly", "appendfsync", "no-appendfsync-on-rewrite", "maxmemory-policy")
        try:
            raw = await self._guard(self._redis.config_get(*names))
            config = {_text(key): _text(value) for key, value in raw.items()}
        except ReplaybufError as error:  # some who sell Redis as a service refuse it; INFO tells part of it
            if not isinstance(error.__cause__, ResponseError) or isinstance(error, ServiceUnavailable):
                raise
            refused = str(error.__cause__)
        appendonly = config["appendonly"] == "yes" if "appendonly" in config else None
        if appendonly is None and "aof_enabled" in info:
            appendonly = bool(int(info["aof_enabled"]))
        rewriting = config.get("no-appendfsync-on-rewrite")
        policy = config.get("maxmemory-policy") or info.get("maxmemory_policy")
        return Settings(
            appendonly=appendonly,
            appendfsync=config.get("appendfsync"),
            no_fsync_on_rewrite=None if rewriting is None else rewriting == "yes",
            policy=None if policy is None else str(policy),
            waitaof=await self._takes_waitaof(),
            replicas=sum(
                isinstance(value, dict) and value.get("state") == "online"
                for name, value in info.items()
                if name.startswith("slave")
            ),
            is_replica=info.get("role") == "slave",
            refused=refused,
        )

    async def _takes_waitaof(self) -> bool:
        try:
            await self._guard(self._redis.execute_command("WAITAOF", 0, 0, 0))  # type: ignore[no-untyped-call]
        except ReplaybufError as error:
            if isinstance(error.__cause__, ResponseError):  # unknown, not allowed, or not on a replica
                return False
            raise
        return True

    # ------------------------------------------------------------------ runs and lease

    async def runs(self) -> list[str]:
        """List the names of all runs."""
        names = await self._guard(self._redis.smembers(keys.RUNS))
        return sorted(_text(name) for name in names)

    async def add_run(self, run: str) -> None:
        """Add a name to the list of runs."""
        await self._guard(self._redis.sadd(keys.RUNS, run))

    async def lead(self, run: str, holder: str, ttl_s: float, *, force: bool = False) -> Lease:
        """Take or renew the lease on a run; `force` takes it from whoever holds it, fencing him."""
        arguments = [holder, int(ttl_s * 1000), "1" if force else "0"]
        reply = await self._call("rb_lead", [keys.lead(run), keys.fence(run)], arguments)
        if reply[0] == 1:
            return Lease(_text(reply[1]), holder, ttl_s)
        return Lease(None, _text(reply[1]), int(reply[2]) / 1000)

    async def ends(self, run: str) -> Ends:
        """Say where the streams of a run end."""
        pipe = self._redis.pipeline(transaction=False)
        pipe.xrevrange(keys.ledger(run), count=1)
        pipe.hget(keys.counts(run), "stored")
        newest, stored = await self._guard(pipe.execute())
        return Ends(int(newest[0][0].partition(b"-")[0]) if newest else 0, int(stored or 0))

    async def resign(self, run: str, holder: str) -> None:
        """Give the lease back, if it is held."""
        await self._call("rb_resign", [keys.lead(run)], [holder])

    # ------------------------------------------------------------------ groups

    async def append(
        self, run: str, groups: Sequence[ToAppend], published_version: int, now_s: float, token: str = ""
    ) -> list[Appended]:
        """Store groups; returns once what is answered `stored` is durable.

        With the fencing token of a leader nothing enters the index once a newer one leads: raises `NotLeader`.

        Order: payloads (with a TTL) -> index entries -> the TTL goes. A payload that lost the race for its id is
        deleted; a first attempt whose answer was lost gets its TTL removed by the repeat.
        """
        payload_keys = [keys.payload(run, item.group_id) for item in groups]
        pipe = self._redis.pipeline(transaction=False)
        for key, item in zip(payload_keys, groups, strict=True):
            pipe.set(key, item.frame, ex=keys.ORPHAN_TTL_S)
        try:
            await self._guard(pipe.execute())
        except NoRoom:
            await self.unlink(payload_keys)  # some may have found room; left there they would fill what is freed
            raise
        pipe = self._redis.pipeline(transaction=False)
        touched = keys.index(run), keys.group_ids(run), keys.counts(run), keys.fence(run)
        for key, item in zip(payload_keys, groups, strict=True):
            numbers = entry_of(item.group, len(item.frame), item.crc32c, published_version, now_s)
            strings = EntryStrings(
                item.group_id,
                item.group.prompt_id,
                item.group.adapter,
                key,
                item.group.ticket,
                item.group.lengths.astype("<i4").tobytes(),
            )
            named = [default_prompt(name) for name in (item.group_id, item.prompt_key)]
            done = [keys.prompts_done(run, prompt[0] if prompt else "") for prompt in named]
            bits = [prompt[1] if prompt else "" for prompt in named]
            arguments = [token, item.group_id, item.prompt_key, numbers, encode_strings(strings), *bits]
            pipe.fcall("rb_publish", len(touched) + 2, *touched, *done, *arguments)
        replies = await self._guard(pipe.execute())
        for reply in replies:
            if reply[0] < 0:
                raise _fenced(run, token, _text(reply[1]))
        results = [
            Appended(item.group_id, reply[0] == 1, int(reply[1])) for item, reply in zip(groups, replies, strict=True)
        ]
        await self._settle_payloads(run, payload_keys, results)
        return results

    async def _settle_payloads(self, run: str, payload_keys: list[str], results: list[Appended]) -> None:
        duplicates = [result.number for result in results if not result.stored and result.number]
        first = {entry.number: entry.strings.payload_key for entry in await self.entries(run, duplicates)}
        pipe = self._redis.pipeline(transaction=False)
        for key, result in zip(payload_keys, results, strict=True):
            if result.stored:
                pipe.persist(key)
            else:
                pipe.unlink(key)
                if result.number in first:
                    pipe.persist(first[result.number])
        repeats = sum(not result.stored for result in results)
        if repeats:  # counting them is the write by which the wait covers the append they repeat
            pipe.fcall("rb_count", 1, keys.counts(run), 1, "duplicate", repeats)
        await self._durably(pipe)

    async def adopt(self, payload_keys: Iterable[str]) -> None:
        """Make payloads permanent whose producer died between publishing and saying so."""
        pipe = self._redis.pipeline(transaction=False)
        for key in payload_keys:
            pipe.persist(key)
        await self._guard(pipe.execute())

    async def read_index(self, run: str, after: int, through: int | None = None) -> AsyncIterator[IndexChunk]:
        """Read the index stream from behind number `after`, up to number `through`, in chunks.

        On a connection of its own, past the client's conversions; while a chunk is parsed Redis prepares the next.
        """
        connection: Any = await self._guard(self._redis.connection_pool.get_connection())  # type: ignore[no-untyped-call]
        last, count = "+" if through is None else f"{through}-0", READ_CHUNK_ENTRIES
        command = ["XRANGE", keys.index(run), f"({after}-0", last, "COUNT", count]
        awaited = True
        try:
            word = await self._guard(send_in_step(connection, command))
            while awaited:
                raw = await self._guard(receive_in_step(connection, word))
                awaited = len(raw) == count
                if awaited:
                    command[2] = b"(" + raw[-1][0]
                    word = await self._guard(send_in_step(connection, command))
                if raw:
                    yield read_chunk(raw)
        finally:
            if awaited:  # whoever left before the end left a reply on its way
                await connection.disconnect()
            await self._redis.connection_pool.release(connection)

    async def entries(self, run: str, numbers: Sequence[int]) -> list[IndexEntry]:
        """Fetch the index entries of these groups, in this order; trimmed ones are left out."""
        if not numbers:
            return []
        pipe = self._raw_pipeline()
        for number in numbers:
            pipe.execute_command("XRANGE", keys.index(run), f"{number}-0", f"{number}-0")
        replies = await self._guard(pipe.execute())
        found = {number: read_chunk(reply) for number, reply in zip(numbers, replies, strict=True) if reply}
        missing = [number for number in numbers if number not in found]
        if missing:
            aside = await self._guard(self._redis.hmget(keys.set_aside(run), [str(number) for number in missing]))
            for number, raw in zip(missing, aside, strict=True):
                if raw is not None:
                    found[number] = read_stored(np.array([number]), [raw])
        return [found[number].entries()[0] for number in numbers if number in found]

    def _raw_pipeline(self) -> Any:
        pipe = self._redis.pipeline(transaction=False)
        pipe.response_callbacks = {}
        return pipe

    async def strings(self, run: str, first: int, last: int) -> list[EntryStrings]:
        """Fetch the variable part of the index entries `first` to `last`."""
        return [strings async for chunk in self.read_index(run, first - 1, last) for strings in chunk.strings]

    async def numbers_of(self, run: str, group_ids: Sequence[str]) -> list[int | None]:
        """Look up the numbers under which ids are stored; 0 = it was, and its history is trimmed."""
        if not group_ids:
            return []
        found = await self._guard(self._redis.hmget(keys.group_ids(run), list(group_ids)))
        numbers = [None if number is None else int(number) for number in found]
        asked = [
            (k, prompt) for k, name in enumerate(group_ids) if numbers[k] is None if (prompt := default_prompt(name))
        ]
        pipe = self._redis.pipeline(transaction=False)
        for _, (adapter, index) in asked:
            pipe.getbit(keys.prompts_done(run, adapter), index)
        for (k, _), bit in zip(asked, await self._guard(pipe.execute()), strict=True):
            numbers[k] = 0 if bit else None
        return numbers

    async def frames(self, sizes: Mapping[str, int]) -> list[bytes | None]:
        """Fetch payloads by key, given their sizes in bytes; a missing one is None. Replies stay below 8 MiB."""
        frames: list[bytes | None] = []
        chunk: list[str] = []
        room = READ_CHUNK_BYTES
        for key, size in sizes.items():
            if chunk and size > room:
                frames += await self._get(chunk)
                chunk, room = [], READ_CHUNK_BYTES
            chunk.append(key)
            room -= size
        return frames + (await self._get(chunk) if chunk else [])

    async def _get(self, payload_keys: list[str]) -> list[bytes | None]:
        # GETs, not MGET: payloads of a cluster lie in different slots.
        pipe = self._redis.pipeline(transaction=False)
        for key in payload_keys:
            pipe.get(key)
        return list(await self._guard(pipe.execute()))

    async def unlink(self, payload_keys: Iterable[str]) -> None:
        """Delete payloads."""
        pipe = self._redis.pipeline(transaction=False)
        for key in payload_keys:
            pipe.unlink(key)
        await self._guard(pipe.execute())

    async def wait_for_entries(self, known: Mapping[str, Ends], timeout_s: float) -> list[str]:
        """Block until a stream of a run has entries behind its known end; return those runs."""
        streams: dict[Any, Any] = {}
        for run, ends in known.items():
            streams |= {keys.index(run): f"{ends.group}-0", keys.ledger(run): f"{ends.entry}-0"}
        reading = self._blocking.xread(streams, count=1, block=int(timeout_s * 1000))
        try:
            async with asyncio.timeout(timeout_s + self.command_timeout_s):
                reply = await self._guard(reading)
        except TimeoutError:
            await self._blocking.connection_pool.disconnect()
            self._stalled_until_s = time.monotonic() + STALL_PAUSE_S
            raise ServiceUnavailable(
                f"Redis at {self.url} did not answer a blocking read within {timeout_s + self.command_timeout_s} s",
                name="redis",
                value=self.url,
            ) from None
        news = set(reply or {})
        return [run for run in known if news & {keys.index(run).encode(), keys.ledger(run).encode()}]

    # ------------------------------------------------------------------ ledger

    async def append_record(self, run: str, token: str, number: int, record: AnyRecord) -> None:
        """Append ledger entry `number`.

        Raises `NotLeader` where a newer leader exists, `DataLost` where the entries before it are gone, `Conflict`
        where another record has the number.
        """
        reply = await self._call_durably(
            "rb_append", [keys.ledger(run), keys.fence(run)], [token, number, encode_record(record)]
        )
        outcome, detail = _text(reply[0]), _text(reply[1])
        if outcome == "fenced":
            raise _fenced(run, token, detail)
        if outcome == "gap":
            raise data_lost(run, f"the ledger ends at entry {detail}, and entry {number - 1} was acknowledged")
        if outcome != "ok":
            raise Conflict(
                f"run {run}: ledger entry {number} is {outcome}; the newest is {detail}",
                name="entry",
                value=number,
                bound=detail,
            )

    async def read_ledger(
        self, run: str, after: int, count: int | None = None
    ) -> AsyncIterator[list[tuple[int, AnyRecord]]]:
        """Read ledger entries behind `after`, in chunks; at most `count` in all."""
        left = count
        while left is None or left > 0:
            chunk = 1000 if left is None else min(left, 1000)
            raw = await self._guard(self._redis.xrange(keys.ledger(run), min=f"({after}-0", max="+", count=chunk))
            if not raw:
                return
            records = [(int(e[0].partition(b"-")[0]), decode_record(_fields(e[1])[b"r"])) for e in raw]
            yield records
            after = records[-1][0]
            left = None if left is None else left - len(records)

    # ------------------------------------------------------------------ snapshot and trimming

    async def read_snapshot(self, run: str) -> bytes | None:
        """Read the snapshot; None where none was written yet."""
        raw: bytes | None = await self._guard(self._redis.get(keys.snapshot(run)))
        return raw

    async def write_snapshot(
        self, run: str, token: str, raw: bytes, first_group: int, first_entry: int, set_aside: Mapping[int, bytes]
    ) -> None:
        """Replace the snapshot, set entries aside, trim both streams to what is named first: all or nothing.

        A snapshot older than the one that stands there changes nothing. Raises `NotLeader`.
        """
        names = [keys.snapshot(run), keys.fence(run), keys.index(run), keys.ledger(run), keys.set_aside(run)]
        aside = [part for pair in set_aside.items() for part in pair]
        self._check_fence(
            run, token, await self._call("rb_snapshot", names, [token, raw, first_group, first_entry, *aside])
        )

    async def read_set_aside(self, run: str) -> AsyncIterator[IndexChunk]:
        """Read the entries that trimming set aside, in the order of their numbers, in chunks."""
        numbers = np.sort(np.array(await self._guard(self._redis.hkeys(keys.set_aside(run))), np.int64))
        for start in range(0, len(numbers), READ_CHUNK_ENTRIES):
            chunk = numbers[start : start + READ_CHUNK_ENTRIES]
            raw = await self._guard(self._redis.hmget(keys.set_aside(run), [str(number) for number in chunk.tolist()]))
            yield read_stored(chunk, raw)

    async def drop_set_aside(self, run: str, numbers: Sequence[int]) -> None:
        """Delete entries that trimming set aside."""
        await self._guard(self._redis.hdel(keys.set_aside(run), *[str(number) for number in numbers]))

    async def mark_done(self, run: str, token: str, prompts: Iterable[tuple[str, int, int]]) -> None:
        """Remember a bit each of these prompts instead of the default id of their group, which is freed.

        `prompts`: adapter, prompt index, number of the group. Raises `NotLeader`.
        """
        by_adapter: dict[str, list[int]] = {}
        for adapter, index, number in prompts:
            by_adapter.setdefault(adapter, []).extend((index, number))
        for adapter, indexes in by_adapter.items():
            names = [keys.group_ids(run), keys.prompts_done(run, adapter), keys.counts(run), keys.fence(run)]
            for start in range(0, len(indexes), _MARKED_AT_ONCE):
                arguments = [
                    token,
                    adapter,
                    f"{adapter}/p" if adapter else "p",
                    *indexes[start : start + _MARKED_AT_ONCE],
                ]
                self._check_fence(run, token, await self._call("rb_done", names, arguments))

    # ------------------------------------------------------------------ tickets and counters

    async def tickets(self, run: str) -> list[tuple[str, float]]:
        """List the tickets that are out or to be issued again, with their deadlines in seconds (0 = again)."""
        raw = await self._guard(self._redis.zrange(keys.tickets(run), 0, -1, withscores=True))
        return [(_text(ticket), float(deadline) / 1000) for ticket, deadline in raw]

    async def change_tickets(
        self,
        run: str,
        token: str,
        *,
        drop: Sequence[str] = (),
        deadlines_s: Mapping[str, float] | None = None,
        counts: Mapping[str, int] | None = None,
        durably: bool = True,
    ) -> None:
        """Drop tickets, set the deadlines of others and raise counters, all or nothing. Raises `NotLeader`.

        `durably=False` where a restart finds out by itself what is lost.
        """
        put = [part for ticket, at_s in (deadlines_s or {}).items() for part in (int(at_s * 1000), ticket)]
        raised = [part for name, by in (counts or {}).items() for part in (name, by)]
        call = self._call_durably if durably else self._call
        reply = await call(
            "rb_tickets",
            [keys.tickets(run), keys.counts(run), keys.fence(run)],
            [token, len(drop), *drop, len(put) // 2, *put, *raised],
        )
        if _text(reply[0]) != "ok":
            raise _fenced(run, token, _text(reply[1]))

    async def counts(self, run: str) -> dict[str, int]:
        """Read the run's counters."""
        raw = await self._guard(self._redis.hgetall(keys.counts(run)))
        return {_text(name): int(value) for name, value in raw.items()}

    async def count(self, run: str, raised: Mapping[str, int]) -> None:
        """Raise counters."""
        changes = [part for name, by in raised.items() for part in (name, by)]
        await self._call("rb_count", [keys.counts(run)], [len(raised), *changes])

    async def set_count(self, run: str, name: str, value: int) -> None:
        """Set a counter."""
        await self._call("rb_count", [keys.counts(run)], [0, name, value])

    # ------------------------------------------------------------------ durability

    async def confirmed_ends(self, run: str) -> Ends | None:
        """Say how far the streams of a run are durable; None where everything that can be read is. Raises `NotDurable`.

        Whoever acts on what it reads, not on what it was answered, reads no further.
        """
        if self._barrier is None or self._reads_durable:
            return None
        ends = await self.ends(run)
        # The wait covers what the server wrote before the last write of this connection: so here is one.
        await self._call_durably("rb_count", [keys.counts(run)], [1, "confirmed", 1])
        return ends

    async def _durably(self, pipe: Any) -> list[Any]:
        """Execute a pipeline of writes; return its replies once the server confirms what it wrote."""
        barrier = self._barrier
        if barrier is None:
            replies: list[Any] = await self._guard(pipe.execute())
            return replies
        waits = barrier.commands
        for wait in waits:
            pipe.execute_command(*wait)
        all_replies = await self._guard(_executed(pipe, len(waits)))
        replies, waited = all_replies[: -len(waits)], all_replies[-len(waits) :]
        try:
            confirmed = barrier.check(waited)
        except NotDurable:
            self.unconfirmed += 1
            raise
        if barrier.replicas:
            self.replicas_confirmed = confirmed
        return replies

    async def _call_durably(self, function: str, names: list[str], arguments: list[Any]) -> list[Any]:
        pipe = self._redis.pipeline(transaction=False)
        pipe.fcall(function, len(names), *names, *arguments)
        reply: list[Any] = (await self._durably(pipe))[0]
        return reply

    # ------------------------------------------------------------------ plumbing

    def _check_fence(self, run: str, token: str, reply: list[Any]) -> None:
        if _text(reply[0]) == "fenced":
            raise _fenced(run, token, _text(reply[1]))

    async def _call(self, function: str, names: list[str], arguments: list[Any]) -> list[Any]:
        reply: list[Any] = await self._guard(self._redis.fcall(function, len(names), *names, *arguments))
        return reply

    def _check_answering(self) -> None:
        """Fail at once while Redis keeps silent, but for one call at a time that finds out whether it still does.

        Otherwise callers that wait for each other's locks would each wait the whole timeout, one after another.
        """
        now_s = time.monotonic()
        if now_s < self._stalled_until_s:
            raise ServiceUnavailable(
                f"Redis at {self.url} does not answer; it is asked again within {self.command_timeout_s} s",
                name="redis",
                value=self.url,
            )
        if self._stalled_until_s:
            self._stalled_until_s = now_s + self.command_timeout_s

    async def _guard(self, command: Awaitable[Any]) -> Any:
        try:
            self._check_answering()
        except ServiceUnavailable:
            if isinstance(command, Coroutine):
                command.close()  # it is never awaited
            raise
        try:
            reply = await command
            self._stalled_until_s = 0.0
            return reply
        except RedisTimeoutError as error:
            self._stalled_until_s = time.monotonic() + STALL_PAUSE_S
            raise ServiceUnavailable(
                f"Redis at {self.url} did not answer within {self.command_timeout_s} s", name="redis", value=self.url
            ) from error
        except OutOfMemoryError as error:
            raise NoRoom(f"Redis at {self.url} is out of memory: {error}", name="maxmemory") from error
        except BusyLoadingError as error:
            raise self._takes_none(error) from error
        except (RedisConnectionError, OSError) as error:
            self._stalled_until_s = 0.0  # refused or cut is known at once, nobody need be spared
            raise ServiceUnavailable(
                f"Redis at {self.url} cannot be reached: {error or type(error).__name__}", name="redis", value=self.url
            ) from error
        except RedisError as error:
            if _TAKES_NO_WRITES.search(f"{getattr(error, 'status_code', None) or ''} {error}"):
                raise self._takes_none(error) from error
            if "Function not found" in str(error):
                # Another server answers here than the one that was prepared. What data it has is looked at afterwards.
                await self._guard(self._redis.function_load(_LIBRARY, replace=True))
                raise ServiceUnavailable(
                    f"Redis at {self.url} did not have our functions: it was replaced; they are loaded now",
                    name="redis",
                    value=self.url,
                ) from error
            raise ReplaybufError(f"Redis at {self.url} refused a command: {error}", name="redis") from error

    def _takes_none(self, error: RedisError) -> ServiceUnavailable:
        return ServiceUnavailable(f"Redis at {self.url} takes no writes for now: {error}", name="redis", value=self.url)


async def _executed(pipe: Any, waits: int) -> list[Any]:
    """Execute a pipeline whose last commands are waits; raise the first error of the others, return that of waits."""
    replies: list[Any] = await pipe.execute(raise_on_error=False)
    for reply in replies[:-waits]:
        if isinstance(reply, Exception):
            raise reply
    return replies


def data_lost(run: str, seen: str) -> DataLost:
    """Build the error of a Redis that does not hold what it acknowledged."""
    return DataLost(
        f"run {run}: {seen}; Redis was emptied, or replaced by an older copy, under the running service, which writes "
        "nothing more for this run. Restore Redis from its append-only file; the service goes on once all is there",
        name="redis",
        value=run,
    )


def _fenced(run: str, token: str, newest: str) -> ReplaybufError:
    if not newest:
        return data_lost(run, f"the fencing token is gone, and {token} was acknowledged")
    return NotLeader(
        f"run {run}: our fencing token is {token}, the newest is {newest}; another server leads",
        name="leader",
        bound=newest,
    )


def _fields(raw: Any) -> dict[bytes, bytes]:
    return raw if isinstance(raw, dict) else dict(zip(raw[::2], raw[1::2], strict=True))


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _flat(value: Any) -> list[Any]:
    return [part for pair in value.items() for part in pair] if isinstance(value, dict) else list(value)
