"""The store behind a faulty network, with a real Valkey."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest
import uvloop

from replaybuf.errors import ServiceUnavailable
from replaybuf.store import EmbeddedServer, Ends, Store, WritePolicy
from replaybuf.store.redis import connection
from replaybuf.wire.ledger import AckRecord
from tests.faults import FaultyProxy
from tests.ports import free_port
from tests.store.test_store import to_append

TIMEOUT_S = 1.0
SHORT_TIMEOUT_S = 0.3
NO_TOKEN = ""


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyProxy]:
    """Put a proxy in front of an embedded Valkey."""
    embedded = EmbeddedServer(tmp_path_factory.mktemp("valkey"))
    asyncio.run(embedded.start())
    with FaultyProxy(embedded.socket_path).running() as running:
        yield running
    asyncio.run(embedded.stop())


def with_store(
    proxy: FaultyProxy, work: Callable[[Store], Awaitable[None]], command_timeout_s: float = TIMEOUT_S
) -> None:
    """Run `work` on a store with short timeouts behind the proxy."""

    async def main() -> None:
        store = await Store.open(proxy.url, command_timeout_s=command_timeout_s, connect_timeout_s=TIMEOUT_S)
        try:
            await work(store)
        finally:
            await store.close()

    try:
        asyncio.run(main())
    finally:
        proxy.heal()


async def append(store: Store, run: str, *ids: str) -> list[bool]:
    """Append groups; return which of them this call stored."""
    results = await store.groups.append(run, [to_append(name) for name in ids], {"": 0}, time.time())
    return [result.stored for result in results]


@pytest.mark.parametrize("ending", ["cancelled", "timed out"])
@pytest.mark.parametrize("form", ["command", "pipeline"])
def test_a_connection_with_an_unread_reply_is_not_used_again(
    proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch, form: str, ending: str
) -> None:
    """Replies have no names: the next call on that connection would read the late reply as its own."""
    monkeypatch.setattr(connection, "STALL_PAUSE_S", 0.0)
    delay_s, timeout_s = (0.3, 0.1) if ending == "timed out" else (0.3, TIMEOUT_S)

    async def read(store: Store, run: str) -> dict[str, int]:
        return await store.counters.read(run) if form == "command" else (await store.tickets.read_one(run)).counts

    async def work(store: Store) -> None:
        left, right = (f"{side}-{form}-{ending}" for side in ("left", "right"))
        for run in (left, right):
            await store.counters.add(run, {run: 1})
        proxy.delay(delay_s)
        late = asyncio.create_task(read(store, left))
        await asyncio.wait({late}, timeout=0.1 if ending == "cancelled" else None)  # the command is on its way
        proxy.delay(0.0)
        late.cancel()
        with pytest.raises((asyncio.CancelledError, ServiceUnavailable)):
            await late
        replies: list[dict[str, int]] = []
        while len(replies) < 20:  # until the late reply has come
            with contextlib.suppress(ServiceUnavailable):  # a slow machine misses the short timeout
                replies.append(await read(store, right))
            await asyncio.sleep(delay_s / 20)
        assert replies == [{right: 1}] * 20

    with_store(proxy, work, timeout_s)


def test_a_reader_that_stops_early_leaves_no_reply_behind(proxy: FaultyProxy) -> None:
    """The next chunk of the index is on its way when the reader stops."""

    async def work(store: Store) -> None:
        await append(store, "early", "a", "b", "c")
        for _ in range(3):
            chunks = store.groups.read_index("early", 0, count=1)
            assert (await anext(chunks)).numbers.tolist() == [1]
            await chunks.aclose()  # type: ignore[attr-defined]
            assert (await store.counters.read("early"))["stored"] == 3

    with_store(proxy, work)


@pytest.mark.parametrize("fate", ["lost", "cut"])
def test_a_repeated_append_is_recognised_if_the_first_answer_was_lost(proxy: FaultyProxy, fate: str) -> None:
    """The first attempt stores the group, the second reports it; a ledger record is written once."""

    async def work(store: Store) -> None:
        run = f"again-{fate}"
        lease = (await store.runs.take_lease(run, "one", 60.0)).token or ""
        proxy.break_once(b"rb_publish", fate)
        with pytest.raises(ServiceUnavailable):
            await append(store, run, "a")
        assert await append(store, run, "a") == [False]
        proxy.break_once(b"rb_append", fate)
        with pytest.raises(ServiceUnavailable):
            await store.ledger.append(run, lease, 1, AckRecord(step=0, epoch=1))
        stored = await store.ledger.append(run, lease, 1, AckRecord(step=0, epoch=1))
        assert await store.streams.read_end(run) == Ends(entry=1, group=1, entry_key=stored.key)

    with_store(proxy, work)


@pytest.mark.parametrize("fault", ["swallow", "lose_replies"])
def test_a_silent_redis_costs_one_timeout_not_one_per_caller(
    proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Callers that wait for each other's locks do not add up their timeouts; calls work again after the fault."""
    monkeypatch.setattr(connection, "STALL_PAUSE_S", SHORT_TIMEOUT_S)

    async def work(store: Store) -> None:
        getattr(proxy, fault)()
        before = proxy.connections
        for _ in range(100):
            with pytest.raises(ServiceUnavailable):
                await store.counters.read("r")
        assert proxy.connections - before < 50, "a call that ran into its timeout opened a connection"
        proxy.heal()
        async with asyncio.timeout(60):
            while True:
                try:
                    assert await store.counters.read("silent") == {}
                except ServiceUnavailable:
                    await asyncio.sleep(0.05)
                else:
                    return

    with_store(proxy, work, SHORT_TIMEOUT_S)


def test_connections_cut_while_idle_are_reopened_without_an_error(proxy: FaultyProxy) -> None:
    """Ten idle connections in the pool are cut; no call fails."""

    async def work(store: Store) -> None:
        await asyncio.gather(*(store.counters.read("idle") for _ in range(10)))
        proxy.drop()
        for _ in range(5):  # the event loop notices closed connections in its next rounds
            await asyncio.sleep(0)
        for _ in range(3):
            await asyncio.gather(*(store.counters.read("idle") for _ in range(10)))

    with_store(proxy, work)


def test_a_blocking_read_ends_in_time_if_redis_is_silent(proxy: FaultyProxy) -> None:
    """The blocking client has no socket timeout, and must not hang."""

    async def work(store: Store) -> None:
        proxy.swallow()
        with pytest.raises(ServiceUnavailable):
            async with asyncio.timeout(60):
                await store.streams.wait_for_entries({"r": Ends(entry=0, group=0)}, 0.1)

    with_store(proxy, work, SHORT_TIMEOUT_S)


def test_slow_answers_are_correct(proxy: FaultyProxy) -> None:
    """A delay below the timeout only costs time."""

    async def work(store: Store) -> None:
        proxy.delay(TIMEOUT_S / 20)
        assert await append(store, "slow", "a", "b") == [True, True]
        assert await append(store, "slow", "b", "c") == [False, True]

    with_store(proxy, work)


def test_a_write_on_a_connection_that_was_just_closed_is_a_lost_connection(proxy: FaultyProxy) -> None:
    """uvloop reports it as RuntimeError, which would end the service."""

    async def main() -> None:
        store = await Store.open(proxy.url)
        try:
            _, writer = await asyncio.open_unix_connection(str(proxy.target))
            writer.transport.abort()
            await asyncio.sleep(0)  # the transport is closed in the next turn

            async def write() -> None:
                writer.writelines([b"PING"])

            with pytest.raises(RuntimeError, match="handler is closed"):
                await write()
            with pytest.raises(ServiceUnavailable, match="the connection was closed"):
                await store.connection.run(write())
            assert (await store.streams.read_end("closed")).group == 0
        finally:
            await store.close()

    uvloop.run(main())


def test_a_blocking_read_of_an_unreachable_server_ends_without_a_warning() -> None:
    """A coroutine that is never awaited would be reported in the log of the service, once per outage."""

    async def main() -> None:
        unreachable = connection.Connection(f"redis://127.0.0.1:{free_port()}/0", WritePolicy())
        with pytest.raises(ServiceUnavailable):
            await unreachable.read_blocking({"stream": "0-0"}, 0.1)
        gc.collect()
        await unreachable.close()

    asyncio.run(main())
