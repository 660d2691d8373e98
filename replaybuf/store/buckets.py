"""Payloads in the buckets of a cluster, which lie on other servers than the index.

An append reads what is published, and then takes two steps. First each bucket gets a note of the attempt and then its
payloads, without a TTL. They are durable before the second step, which publishes the groups in the index. So every
index entry has its payload, and no crash needs a repair. What a crash between the steps leaves behind is found by its
note.

Attempts are counted in rounds, which a leader begins some minutes apart. The index refuses attempts from before the
last two rounds, so their payloads may be deleted unless the index names them. No clock decides this, and a leader that
was suspended meanwhile does no harm.

A bucket counts the payloads that were ever written to it, and the index keeps the highest count that was published. A
bucket whose count is lower has lost acknowledged payloads, and takes no new ones. Each append reads the highest count
again: the payload that is lost may be of another server, and a write of one that does not know it would make the count
right again, so nobody would notice the loss. A server that was suspended between this read and the end of its write
reads again, also after an error, which says nothing of what was written: if a number of its own is published, the
payload that had it is lost. The index refuses such numbers too, and the sweep looks for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from redis.exceptions import AskError, RedisError

from replaybuf.errors import DataLost, ReplaybufError, ServiceUnavailable
from replaybuf.store import keys
from replaybuf.store.redis.cluster import Cluster, ClusterNode
from replaybuf.store.redis.connection import Connection
from replaybuf.store.redis.faults import data_lost
from replaybuf.store.redis.pipeline import FastPipeline, read_values

DELETED_AT_ONCE = 1_000
MOST_SETTLED = 1_000
"""Notes of published attempts that wait for the next append to their bucket; the leader removes further ones."""
ATTEMPTS_AT_ONCE = 500
SUSPENDED_S = 0.5
"""A process that takes longer from reading what is published to the end of its write reads it again. A node that has
lost payloads takes writes after a longer time."""
READ_AGAIN_S = (0.1, 0.5, 1.0, 2.0, 4.0)
"""Pauses between the tries of that read: a failover takes less than their sum."""
FindPublished = Callable[[str, Sequence[str]], Awaitable[set[str]]]
"""Returns which of these payloads of a run have an index entry."""


@dataclasses.dataclass(slots=True)
class KnownBuckets:
    """What this process knows of the buckets of a run, for one incarnation of it.

    - `round`: in which new attempts begin
    - `settled`: keys of published attempts, by bucket, whose notes are to be removed
    """

    incarnation: int
    round: int
    settled: dict[int, list[str]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Attempt:
    """Payloads that are durable and not published yet.

    - `round`: in which it began
    - `written`: how many payloads each bucket has had, and how many of the newest are of this attempt; 0 = may be lost
    """

    round: int
    written: dict[int, tuple[int, int]]


class BucketStore:
    """Writes, reads and deletes payloads on the nodes of a cluster."""

    def __init__(self, connection: Connection, cluster: Cluster) -> None:
        self._connection = connection
        self._cluster = cluster
        self._known: dict[str, KnownBuckets] = {}
        self._lost: dict[str, int] = {}
        """A bucket by run that had lost payloads when it was last looked at."""

    # ------------------------------------------------------------------ append

    async def write(self, run: str, payloads: Mapping[str, bytes | memoryview]) -> Attempt:
        """Write payloads of one attempt, durably. Raises `DataLost` if a bucket is older than the index, `NoRoom`."""
        began_s = time.monotonic()
        published, newest = await self._read_published(run)
        known = self._learn(run, newest)
        began = known.round  # of the notes: other appends and the sweep of this process raise it meanwhile
        by_bucket = _by_bucket(run, payloads)
        pipe = self._connection.pipeline()
        pipe.response_callbacks = {}
        may_lose = self._connection.policy.level == "relaxed"
        settled = [(bucket, known.settled.pop(bucket)) for bucket in by_bucket if bucket in known.settled]
        for bucket, own in by_bucket.items():
            lowest = 0 if may_lose else published.get(bucket, 0)
            names = [keys.attempts(run, bucket), keys.written(run, bucket)]
            pipe.execute_command("FCALL", "rb_note", 2, *names, lowest, began, *own)
        for key, frame in payloads.items():
            pipe.execute_command("SET", key, frame)
        for bucket, done in settled:
            pipe.execute_command("ZREM", keys.attempts(run, bucket), *done)
        count = len(by_bucket) + len(payloads)
        try:
            replies = await self._connection.run_durably(pipe, may_fail=count)
        except ReplaybufError:  # a replaced primary, or one node of several: the payloads may be written all the same
            await self._check_again(run, published, by_bucket, began_s)
            raise
        written = dict(zip(by_bucket, replies, strict=False))
        try:
            await self._check_again(run, published, by_bucket, began_s)
            self._check(run, published, written, replies[:count])
        except ReplaybufError:
            await self.withdraw(run, list(payloads))
            raise
        own_counts = {bucket: 0 if may_lose else len(own) for bucket, own in by_bucket.items()}
        return Attempt(began, {bucket: (int(written[bucket][1]), own_counts[bucket]) for bucket in by_bucket})

    async def _check_again(
        self, run: str, compared: Mapping[int, int], by_bucket: Mapping[int, Sequence[str]], began_s: float
    ) -> None:
        """Raise `DataLost` if numbers of a slow attempt are published: its payloads would hide that others are lost.

        `compared`: the published numbers with which the buckets were compared
        """
        if time.monotonic() <= began_s + SUSPENDED_S or self._connection.policy.level == "relaxed":
            return
        published = await self._read_published_again(run)
        losses = [
            self._record_loss(run, bucket, published[bucket], counter)
            for bucket, own in by_bucket.items()
            if published.get(bucket, 0) > compared.get(bucket, 0)
            and (counter := await self.take_back(run, bucket, published[bucket], own)) >= 0
        ]
        if losses:
            raise losses[0]

    async def _read_published_again(self, run: str) -> dict[int, int]:
        """Read what is published, some times if the node is away: without an answer the count would hide a loss."""
        for pause_s in READ_AGAIN_S:
            with contextlib.suppress(ServiceUnavailable):
                return (await self._read_published(run))[0]
            await asyncio.sleep(pause_s)
        return (await self._read_published(run))[0]

    def _check(
        self, run: str, published: Mapping[int, int], written: Mapping[int, Any], replies: Sequence[Any]
    ) -> None:
        for reply in replies:
            if isinstance(reply, (RedisError, OSError)):
                raise self._connection.explain(reply)
        for bucket, (noted, number) in written.items():
            if not noted:
                raise self._record_loss(run, bucket, published[bucket], int(number))

    def _record_loss(self, run: str, bucket: int, known: int, counter: int) -> DataLost:
        node = self._cluster.owner_name(keys.written(run, bucket))
        self._lost[run] = bucket
        cause = f"bucket {bucket} on node {node} has had {counter} payloads, but {known} were acknowledged"
        return data_lost(run, cause, groups=known - counter)

    def settle(self, run: str, attempt: Attempt, published: Iterable[str], newest: int) -> None:
        """Remove the notes of published payloads with the next append; `newest`: the round that the index is in."""
        known = self._known[run]
        known.round = max(known.round, newest)
        for bucket, own in _by_bucket(run, published).items():
            waiting = known.settled.setdefault(bucket, [])
            if len(waiting) < MOST_SETTLED:
                waiting += own

    async def take_back(self, run: str, bucket: int, number: int, payload_keys: Sequence[str]) -> int:
        """Delete payloads of attempts in a bucket, and do not count them, if one has this number, which is published.

        The payload that had the number before is lost, and the count then shows it. Returns how many payloads the
        bucket had before the attempts, or -1 if none has the number: the attempt's own may be the lost ones.
        """
        own = _by_bucket(run, payload_keys)[bucket]
        names = [keys.attempts(run, bucket), keys.written(run, bucket), *own]
        return int(await self._connection.write_one("FCALL", "rb_take_back", len(names), *names, number))

    def begin_round(self, run: str, newest: int) -> None:
        """Begin new attempts in round `newest`: the index refused those of an older one."""
        self._known[run].round = newest

    async def withdraw(self, run: str, payload_keys: Sequence[str]) -> None:
        """Delete payloads that are surely not published; what fails is found by its note."""
        with contextlib.suppress(ReplaybufError):
            await self.unlink(payload_keys)
            pipe = self._connection.pipeline()
            _remove_notes(pipe, run, payload_keys)
            await self._connection.run(pipe.execute())

    # ------------------------------------------------------------------ known counts

    def _learn(self, run: str, newest: int) -> KnownBuckets:
        """Return what is known of the buckets of a run, whose index is in round `newest`."""
        known, incarnation = self._known.get(run), self._connection.known.of(run).incarnation
        if known is None or known.incarnation != incarnation:
            known = self._known[run] = KnownBuckets(incarnation, newest)
        known.round = max(known.round, newest)
        return known

    async def _read_published(self, run: str) -> tuple[dict[int, int], int]:
        pipe = self._connection.pipeline()
        pipe.hgetall(keys.buckets(run))
        pipe.hget(keys.counts(run), "round")
        published, newest = await self._connection.read(run, pipe)
        return _integers(published), int(newest or 0)

    async def find_loss(self, run: str, buckets: Iterable[int] = range(keys.BUCKETS)) -> DataLost | None:
        """Check that buckets have had as many payloads as are published; return what is wrong with the first."""
        published, _ = await self._read_published(run)  # before the counts, which only grow
        asked = [bucket for bucket in buckets if bucket in published]
        if not asked or self._connection.policy.level == "relaxed":
            return None
        for bucket, number in zip(asked, await self._read_written(run, asked), strict=True):
            if number < published[bucket]:
                return self._record_loss(run, bucket, published[bucket], number)
        return None

    async def find_loss_again(self, run: str) -> DataLost | None:
        """Check again the bucket of a run in which a loss was found; return None when it has its payloads again."""
        if run not in self._lost:
            return None
        loss = await self.find_loss(run, [self._lost[run]])
        if loss is None:
            self._lost.pop(run, None)  # an operator may have accepted the loss meanwhile
        return loss

    async def count_missing(self, run: str) -> int:
        """Return how many published payloads the buckets of a run have never had; it may be anew in Redis."""
        published = await self._connection.run(self._connection.client.hgetall(keys.buckets(run)))
        return sum((await self._read_missing(run, _integers(published))).values())

    async def accept_loss(self, run: str) -> None:
        """Let the buckets of a run go on without what they lack: each then has had what is published, durably."""
        published, _ = await self._read_published(run)
        pipe = self._connection.pipeline()
        for bucket, missing in (await self._read_missing(run, published)).items():
            _correct_written(pipe, run, bucket, missing)
        if pipe.command_stack:
            await self._connection.run_durably(pipe)
        self._lost.pop(run, None)

    async def _read_missing(self, run: str, published: Mapping[int, int]) -> dict[int, int]:
        """Return how many payloads each bucket lacks; `published` was read before the counts, which only grow."""
        written = dict(zip(published, await self._read_written(run, list(published)), strict=True))
        return {bucket: number - written[bucket] for bucket, number in published.items() if written[bucket] < number}

    async def _read_written(self, run: str, buckets: Sequence[int]) -> list[int]:
        pipe = self._connection.pipeline()
        for bucket in buckets:
            pipe.get(keys.written(run, bucket))
        return [int(number or 0) for number in await self._connection.run(pipe.execute())]

    # ------------------------------------------------------------------ read

    async def read(self, run: str, payload_keys: Sequence[str]) -> list[bytes | None]:
        """Read payloads. Raises `DataLost` if one is missing in a bucket that has lost payloads."""
        values, _ = await asyncio.gather(self._read(payload_keys), self._connection.call(run, "rb_ends"))
        missing = [key for key in payload_keys if values[key] is None]
        buckets = {bucket for key in missing if (bucket := keys.bucket_of_payload(run, key)) is not None}
        if buckets and (loss := await self.find_loss(run, sorted(buckets))):
            raise loss
        return [values[key] for key in payload_keys]

    async def _read(self, payload_keys: Sequence[str]) -> dict[str, bytes | None]:
        try:
            return await self._connection.run(self._read_nodes(payload_keys))  # type: ignore[no-any-return]
        except ReplaybufError as error:
            if not isinstance(error.__cause__, AskError):
                raise
        pipe = self._connection.pipeline()  # a slot moves: the pipeline follows
        for key in payload_keys:
            pipe.get(key)
        return dict(zip(payload_keys, await self._connection.run(pipe.execute()), strict=True))

    async def _read_nodes(self, payload_keys: Sequence[str]) -> dict[str, bytes | None]:
        """Read payloads in threads, one for each node."""
        await self._cluster.find()
        by_node: dict[ClusterNode, list[str]] = {}
        for key in payload_keys:
            by_node.setdefault(self._cluster.node(self._cluster.owner(key)), []).append(key)
        reads = [asyncio.to_thread(read_values, node.reader, own, ("PING",)) for node, own in by_node.items()]
        replies = await asyncio.gather(*reads)
        pairs = (zip(own, payloads, strict=True) for own, (payloads, _) in zip(by_node.values(), replies, strict=True))
        return {key: value for each in pairs for key, value in each}

    # ------------------------------------------------------------------ delete

    async def unlink(self, names: Sequence[str], *, durably: bool = False, noted_in: str | None = None) -> None:
        """Delete keys, wherever they are, and before them their notes in the buckets of run `noted_in`."""
        for start in range(0, len(names), DELETED_AT_ONCE):
            chunk, pipe = names[start : start + DELETED_AT_ONCE], self._connection.pipeline()
            if noted_in is not None:
                _remove_notes(pipe, noted_in, chunk)
            for key in chunk:
                pipe.unlink(key)
            await (self._connection.run_durably(pipe) if durably else self._connection.run(pipe.execute()))

    async def delete_all(self, run: str) -> None:
        """Delete what the buckets of a deleted run hold beside published payloads."""
        async for bucket, attempts in self._attempts(run, "+inf"):
            await self.unlink(attempts)
            await self._forget(run, bucket, attempts)
        names = [key(run, bucket) for bucket in range(keys.BUCKETS) for key in (keys.attempts, keys.written)]
        await self.unlink(names, durably=True)
        self._known.pop(run, None)

    async def sweep(self, run: str, token: str, find_published: FindPublished) -> int:
        """Begin a round of attempts; delete payloads of older attempts that the index lacks. Return how many.

        Raises `NotLeader`, and `DataLost` if such payloads hid a loss: their process ended before it looked for one.
        """
        if not await self._has_attempts(run):
            return 0
        _, newest = await self._connection.call(run, "rb_begin_round", (), (), token, durably=True)
        self._learn(run, int(newest))
        numbers, _ = await self._read_published(run)
        swept = 0
        async for bucket, attempts in self._attempts(run, f"({newest - 1}"):
            published = await find_published(run, attempts)
            orphans = [key for key in attempts if key not in published]
            if orphans:
                await self._uncover_loss(run, bucket, numbers.get(bucket, 0), orphans)
                await self.unlink(orphans)
            await self._forget(run, bucket, attempts)
            swept += len(orphans)
        return swept

    async def _uncover_loss(self, run: str, bucket: int, number: int, orphans: Sequence[str]) -> None:
        """Raise `DataLost` if payloads that the index lacks have the newest published `number` of their bucket.

        Also one that does not exist: a full node counts it with its note, and then refuses it.
        """
        if not number or self._connection.policy.level == "relaxed":
            return
        if (counter := await self.take_back(run, bucket, number, orphans)) >= 0:
            raise self._record_loss(run, bucket, number, counter)

    async def _has_attempts(self, run: str) -> bool:
        pipe = self._connection.pipeline()
        for bucket in range(keys.BUCKETS):
            pipe.exists(keys.attempts(run, bucket))
        return any(await self._connection.run(pipe.execute()))

    async def _attempts(self, run: str, last: str) -> AsyncIterator[tuple[int, list[str]]]:
        """Read attempts with scores up to `last` by bucket, in chunks that are forgotten before the next are read."""
        while True:
            pipe = self._connection.pipeline()
            for bucket in range(keys.BUCKETS):
                pipe.zrangebyscore(keys.attempts(run, bucket), "-inf", last, start=0, num=ATTEMPTS_AT_ONCE)
            chunks = await self._connection.run(pipe.execute())
            if not any(chunks):
                return
            for bucket, attempts in enumerate(chunks):
                if attempts:
                    yield bucket, [key.decode() for key in attempts]

    async def _forget(self, run: str, bucket: int, attempts: Sequence[str]) -> None:
        pipe = self._connection.pipeline()
        pipe.zrem(keys.attempts(run, bucket), *attempts)
        await self._connection.run(pipe.execute())


def _integers(numbers: Mapping[bytes, bytes]) -> dict[int, int]:
    return {int(bucket): int(number) for bucket, number in numbers.items()}


def _correct_written(pipe: FastPipeline, run: str, bucket: int, by: int) -> None:
    pipe.execute_command("FCALL", "rb_correct_written", 1, keys.written(run, bucket), by)


def _remove_notes(pipe: FastPipeline, run: str, payload_keys: Iterable[str]) -> None:
    for bucket, own in _by_bucket(run, payload_keys).items():
        pipe.execute_command("ZREM", keys.attempts(run, bucket), *own)


def _by_bucket(run: str, payload_keys: Iterable[str]) -> dict[int, list[str]]:
    buckets: dict[int, list[str]] = {}
    for key in payload_keys:
        bucket = keys.bucket_of_payload(run, key)
        if bucket is not None:
            buckets.setdefault(bucket, []).append(key)
    return buckets
