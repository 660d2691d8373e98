"""Pipelines on a real Valkey: which connections they use, and which replies they read."""

from __future__ import annotations

import asyncio

import pytest
import redis
import redis.asyncio as aioredis

from replaybuf.store import EmbeddedServer, Store
from replaybuf.store.redis.connection import Connection
from replaybuf.store.redis.pipeline import read_values
from tests.store.test_store import with_store


def test_pipelines_and_single_commands_in_turn_ask_the_pool_for_one_connection(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The locks and metrics of the pool take longer than a command."""
    asked: list[aioredis.ConnectionPool] = []
    from_pool = aioredis.ConnectionPool.get_connection

    async def counted(pool: aioredis.ConnectionPool) -> object:
        asked.append(pool)
        return await from_pool(pool)  # type: ignore[no-untyped-call]

    async def work(store: Store) -> None:
        monkeypatch.setattr(aioredis.ConnectionPool, "get_connection", counted)
        for number in range(20):
            pipe = store.connection.pipeline()
            pipe.execute_command("SET", "kept", number)
            pipe.execute_command("GET", "kept")
            assert await pipe.execute() == [True, str(number).encode()]
            assert await store.connection.client.get("kept") == str(number).encode()
        assert len(asked) <= 1  # opening the store may have asked already

    with_store(server, work)


def test_pipelines_at_the_same_time_have_a_connection_each(server: EmbeddedServer) -> None:
    """Each gets its own replies."""

    async def echo(store: Store, number: int) -> None:
        pipe = store.connection.pipeline()
        for at in range(10):
            pipe.execute_command("ECHO", f"{number}-{at}")
        assert await pipe.execute() == [f"{number}-{at}".encode() for at in range(10)]

    async def work(store: Store) -> None:
        await asyncio.gather(*(echo(store, number) for number in range(20)))

    with_store(server, work)


def test_a_large_argument_arrives_whole_beside_words_of_other_types(server: EmbeddedServer) -> None:
    """Large arguments are sent without a copy, among text and numbers."""
    large = bytes(range(256)) * 100

    async def work(store: Store) -> None:
        pipe = store.connection.pipeline()
        for frame in (large, memoryview(large)):
            pipe.execute_command("SET", "großer Schlüssel", frame, "EX", 60)
            pipe.execute_command("GET", "großer Schlüssel")
            pipe.execute_command("TTL", "großer Schlüssel")
        replies = await pipe.execute()
        assert [replies[1], replies[4]] == [large, large]
        assert 0 < replies[2] <= 60

    with_store(server, work)


def test_a_key_of_another_type_reads_as_missing_and_later_replies_stay_in_order(server: EmbeddedServer) -> None:
    """An error among the replies must not shift them."""
    with redis.Redis(unix_socket_path=str(server.socket_path), protocol=3) as client:
        client.delete("a list", "missing")
        client.rpush("a list", 1)
        client.set("a string", "value")
        for _ in range(2):
            values, last = read_values(client, ["a list", "a string", "missing"], ["ECHO", "end"])
            assert (values, last) == ([None, b"value", None], b"end")


def test_a_failed_last_command_raises_and_leaves_no_reply_unread(server: EmbeddedServer) -> None:
    """The next call reads its own replies."""
    with redis.Redis(unix_socket_path=str(server.socket_path), protocol=3) as client:
        client.set("a string", "value")
        with pytest.raises(redis.ResponseError):
            read_values(client, ["a string"], ["NOSUCHCOMMAND"])
        assert read_values(client, ["a string"], ["ECHO", "end"]) == ([b"value"], b"end")


def test_several_large_arguments_of_one_command_arrive_in_their_order(server: EmbeddedServer) -> None:
    """A command may begin, go on and end with one."""
    first, last = b"a" * 5_000, memoryview(b"b" * 70_000)

    async def work(store: Store) -> None:
        pipe = store.connection.pipeline()
        pipe.execute_command("DEL", "list")
        pipe.execute_command("RPUSH", "list", first, 7, "ä", last)
        pipe.execute_command("RPUSH", "list", first, last, b"")
        pipe.execute_command("LRANGE", "list", 0, -1)
        *_, listed = await pipe.execute()
        assert listed == [first, b"7", "ä".encode(), bytes(last), first, bytes(last), b""]

    with_store(server, work)


def test_a_silent_node_of_a_cluster_fails_within_the_timeout() -> None:
    """No command waits without a bound, the first on a connection neither."""
    never = asyncio.Event()

    async def work() -> None:
        async def keep_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await never.wait()
            writer.close()

        silent = await asyncio.start_server(keep_silent, "127.0.0.1", 0)
        port = silent.sockets[0].getsockname()[1]
        connection = Connection(f"redis+cluster://127.0.0.1:{port}", command_timeout_s=0.1)
        assert connection.cluster
        with pytest.raises(redis.TimeoutError):
            async with asyncio.timeout(10.0):
                await connection.cluster.node(("127.0.0.1", port)).exchange([("PING",)])
        await connection.close()
        never.set()
        silent.close()
        await silent.wait_closed()

    asyncio.run(work())
