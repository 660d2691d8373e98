"""The store where the network between it and a real Valkey does what networks do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from replaybuf.errors import ServiceUnavailable
from replaybuf.store import EmbeddedServer, Ends, Store
from replaybuf.wire.ledger import AckRecord
from tests.faults import FaultyProxy
from tests.store.test_store import to_append

TIMEOUT_S = 1.0
TOKEN_OF_NOBODY = ""


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyProxy]:
    """A proxy before an embedded Valkey of this module."""
    embedded = EmbeddedServer(tmp_path_factory.mktemp("valkey"))
    asyncio.run(embedded.start())
    with FaultyProxy(embedded.socket_path).running() as running:
        yield running
    asyncio.run(embedded.stop())


def with_store(proxy: FaultyProxy, work: Callable[[Store], Awaitable[None]]) -> None:
    """Run `work` on an impatient store behind the proxy."""

    async def main() -> None:
        store = await Store.open(proxy.url, command_timeout_s=TIMEOUT_S, connect_timeout_s=TIMEOUT_S)
        try:
            await work(store)
        finally:
            await store.close()

    try:
        asyncio.run(main())
    finally:
        proxy.heal()


async def append(store: Store, run: str, *ids: str) -> list[bool]:
    """Append groups; say which were stored by this very call."""
    results = await store.groups.append(run, [to_append(name) for name in ids], {"": 0}, time.time(), TOKEN_OF_NOBODY)
    return [result.stored for result in results]


def test_a_reply_that_comes_twice_never_answers_the_next_command(proxy: FaultyProxy) -> None:
    """Payloads fetched together: none is taken for its neighbour's. The call fails, and the next one is right."""

    async def work(store: Store) -> None:
        await append(store, "twice", "a", "b", "c")
        entries = await store.groups.read_entries("twice", [1, 2, 3])
        sizes = {entry.strings.payload_key: int(entry.values["frame_bytes"]) for entry in entries}
        right = await store.groups.read_frames(sizes)
        assert len(set(right)) == 3
        proxy.answer_once(b"$3\r\nGET\r\n", "twice")
        with pytest.raises(ServiceUnavailable, match="out of step"):
            await store.groups.read_frames(sizes)
        assert proxy.happened(5)
        for _ in range(5):
            assert await store.groups.read_frames(sizes) == right

    with_store(proxy, work)


@pytest.mark.parametrize("mark", [b"rb_publish", b"rb_append", b"XRANGE", b"HGETALL", b"ZRANGE", b"HMGET", b"INFO"])
def test_after_a_doubled_reply_every_call_tells_the_truth_or_nothing(proxy: FaultyProxy, mark: bytes) -> None:
    """Whatever call the reply belonged to: what follows is right, or refused as out of reach."""
    run = f"truth-{mark.decode().lower()}"

    async def tell(store: Store, lease: str) -> list[Any]:
        told: list[Any] = [(await store.connection.report()).version, await append(store, run, "a", "b")]
        await store.ledger.append(run, lease, 1, AckRecord(step=0, epoch=1))
        told += [[chunk.numbers.tolist() async for chunk in store.groups.read_index(run, 0)]]
        told += [[chunk async for chunk in store.ledger.read(run, 0)]]
        told += [
            (await store.counters.read(run))["stored"],
            (await store.tickets.read([run]))[0].tickets,
            await store.groups.find_numbers(run, ["b", "a", "c"]),
        ]
        return told

    async def work(store: Store) -> None:
        lease = (await store.runs.take_lease(run, "one", 60.0)).token
        assert lease is not None
        await store.tickets.change(run, lease, deadlines_s={"t0-0-1-1": 5.0})
        await append(store, run, "a", "b")
        right = await tell(store, lease)
        proxy.answer_once(mark, "twice")
        refused = 0
        for _ in range(6):
            try:
                assert await tell(store, lease) == right
            except ServiceUnavailable:
                refused += 1
        assert proxy.happened(5)
        assert refused <= 2

    with_store(proxy, work)


@pytest.mark.parametrize("fate", ["lost", "cut"])
def test_an_append_whose_answer_is_lost_is_recognised_when_repeated(proxy: FaultyProxy, fate: str) -> None:
    """The first attempt stored it, the second says so; a ledger record is written once."""

    async def work(store: Store) -> None:
        run = f"again-{fate}"
        lease = (await store.runs.take_lease(run, "one", 60.0)).token or ""
        proxy.answer_once(b"rb_publish", fate)
        with pytest.raises(ServiceUnavailable):
            await append(store, run, "a")
        assert await append(store, run, "a") == [False]
        proxy.answer_once(b"rb_append", fate)
        with pytest.raises(ServiceUnavailable):
            await store.ledger.append(run, lease, 1, AckRecord(step=0, epoch=1))
        await store.ledger.append(run, lease, 1, AckRecord(step=0, epoch=1))
        assert await store.streams.read_end(run) == Ends(entry=1, group=1)

    with_store(proxy, work)


@pytest.mark.parametrize("fault", ["swallow", "lose_replies"])
def test_a_silent_redis_costs_one_timeout_not_one_per_caller(proxy: FaultyProxy, fault: str) -> None:
    """Callers that wait for each other would else wait one after another; it is found again by itself."""

    async def work(store: Store) -> None:
        getattr(proxy, fault)()
        started_s = time.monotonic()
        for _ in range(20):
            with pytest.raises(ServiceUnavailable):
                await store.counters.read("r")
        assert time.monotonic() - started_s < 3 * TIMEOUT_S
        proxy.heal()
        async with asyncio.timeout(5):
            while True:
                try:
                    assert await store.counters.read("silent") == {}
                except ServiceUnavailable:
                    await asyncio.sleep(0.05)
                else:
                    return

    with_store(proxy, work)


def test_connections_that_were_cut_while_idle_are_made_anew_unseen(proxy: FaultyProxy) -> None:
    """Ten idle connections in the pool, all cut: not one call fails for it."""

    async def work(store: Store) -> None:
        await asyncio.gather(*(store.counters.read("idle") for _ in range(10)))
        proxy.drop()
        for _ in range(5):  # the event loop sees the ends of connections in its next rounds
            await asyncio.sleep(0)
        for _ in range(3):
            await asyncio.gather(*(store.counters.read("idle") for _ in range(10)))

    with_store(proxy, work)


def test_a_blocking_read_ends_in_time_where_redis_is_silent(proxy: FaultyProxy) -> None:
    """It has no socket timeout of its own, and must not hang."""

    async def work(store: Store) -> None:
        proxy.swallow()
        with pytest.raises(ServiceUnavailable):
            async with asyncio.timeout(5):
                await store.streams.wait_for_entries({"r": Ends(entry=0, group=0)}, 0.2)

    with_store(proxy, work)


def test_slow_answers_are_waited_for_and_right(proxy: FaultyProxy, tmp_path: Path) -> None:
    """A delay below the timeout changes nothing but the time."""

    async def work(store: Store) -> None:
        proxy.delay(TIMEOUT_S / 4)
        assert await append(store, "slow", "a", "b") == [True, True]
        assert await append(store, "slow", "b", "c") == [False, True]

    with_store(proxy, work)
