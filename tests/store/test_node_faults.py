"""Faults of one node, shown by a node without data: each becomes an error that background work waits out."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Any

import hiredis
import pytest
import redis
import redis.asyncio as aioredis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.utils import HIREDIS_AVAILABLE

from replaybuf.errors import ServiceUnavailable
from replaybuf.store.redis.awake import keep_awake
from replaybuf.store.redis.cluster import Cluster
from replaybuf.store.redis.cluster_reads import ClusterReads
from replaybuf.store.redis.connection import Connection
from replaybuf.store.redis.faults import translate
from replaybuf.store.redis.pipeline import IdleConnections, ReplyParser, read_values

WITHIN_S = 20.0
GREETING = {"HELLO": b"%1\r\n$5\r\nproto\r\n:3\r\n"}
CLOSED = "unable to perform operation on <TCPTransport closed=True>; the handler is closed"
"""What uvloop raises for a write on a connection that the other side has just closed."""


class FakeNode:
    """A server with fixed replies by command. It answers nothing to commands with the reply b""."""

    def __init__(self, **replies: bytes) -> None:
        self.replies = GREETING | replies
        self.connections, self.silent = 0, asyncio.Event()
        self.port = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[FakeNode]:
        """Listen until the end of the body."""
        writers: list[asyncio.StreamWriter] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.connections += 1
            writers.append(writer)
            commands = hiredis.Reader()
            with contextlib.suppress(OSError):
                while data := await reader.read(1 << 16):
                    commands.feed(data)
                    while words := commands.gets():
                        reply = self.replies.get(words[0].decode(), b"+OK\r\n")
                        if not reply:
                            self.silent.set()
                        writer.write(reply)

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for writer in writers:
                writer.close()
            await server.wait_closed()


@contextlib.asynccontextmanager
async def connections_to(node: FakeNode) -> AsyncIterator[IdleConnections]:
    pool = aioredis.Redis(port=node.port, socket_timeout=WITHIN_S, socket_connect_timeout=WITHIN_S).connection_pool
    connections = IdleConnections(pool)
    try:
        yield connections
    finally:
        await connections.close()


@pytest.mark.parametrize(
    "reply",
    [
        "TRYAGAIN Multiple keys request during rehashing of slot",
        "CLUSTERDOWN The cluster is down",
        "CLUSTERDOWN Hash slot not served",
        "MOVED 7000 127.0.0.1:1",
        "ASK 7000 :1",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        "LOADING Valkey is loading the dataset in memory",
        "READONLY You can't write against a read only replica.",
        "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)",
        "ERR max number of clients reached",
        "ERR WAIT cannot be used with replica instances. Please also note that writes to replicas are just local.",
        "ERR WAITAOF cannot be used with replica instances. Please also note that writes to replicas are just local.",
        "NOAUTH Authentication required.",
        "WRONGPASS invalid username-password pair or user is disabled.",
        "NOPERM User replaybuf has no permissions to run the 'fcall' command",
        "ERR Function not found",
    ],
)
def test_an_error_of_a_node_that_may_pass_is_waited_for(reply: str) -> None:
    """Any other error ends the background work, and with it the service."""
    error = ReplyParser.parse_error(reply)
    assert isinstance(translate(error, "redis://node", 1.0), ServiceUnavailable)


def test_a_reply_of_another_protocol_is_waited_for() -> None:
    """Another program has the port of a node that is gone."""

    async def main() -> None:
        async with FakeNode(PING=b"HTTP/1.1 400 Bad Request\r\n").running() as node:
            connection = Connection(f"redis://127.0.0.1:{node.port}")
            pipe = connection.pipeline()
            pipe.execute_command("PING")
            with pytest.raises(ServiceUnavailable, match="does not answer as a Redis"):
                await connection._answer(pipe.execute())
            await connection.close()

    assert HIREDIS_AVAILABLE
    asyncio.run(main())


@pytest.mark.parametrize("nodes", [b"*0\r\n", b"$5\r\nthree\r\n", b":1\r\n", b"-ERR no\r\n"])
def test_a_node_with_a_strange_map_does_not_end_the_watch(nodes: bytes) -> None:
    """It counts as one that does not answer: the task that watches the cluster goes on."""

    async def main() -> None:
        async with FakeNode(CLUSTER=nodes).running() as node:
            cluster = Cluster([("127.0.0.1", node.port)], {}, lambda: None)
            with pytest.raises(RedisConnectionError, match="no node of the cluster answers"):
                await cluster.find()
            await asyncio.sleep(0)
            await cluster.close()

    asyncio.run(main())


def test_the_map_of_a_cluster_is_combined_again_only_after_a_change() -> None:
    """Servers ask twice a second. A redirection changes the map too, and then the nodes have the last word."""
    line = b"%s :%d@17000 myself,master - 0 %d 1 connected 0-16383\n"

    async def main() -> None:
        node = FakeNode()
        async with node.running():
            cluster = Cluster([("127.0.0.1", node.port)], {}, lambda: None)

            async def ask(at: int, node_id: bytes = b"a1") -> None:
                text = line % (node_id, node.port, at)
                node.replies["CLUSTER"] = b"$%d\r\n%s\r\n" % (len(text), text)
                await cluster._look()

            await ask(1)
            first = cluster.view
            await ask(2)  # another time of the last pong
            assert cluster.view is first
            cluster.move_slot(7, ("127.0.0.1", 1))
            await ask(3)
            assert cluster.view.owners[7] == ("127.0.0.1", node.port)
            known = cluster.view
            await ask(4, b"b1")
            assert cluster.view is not known
            await cluster.close()

    asyncio.run(main())


def test_a_write_on_a_closed_connection_ends_no_watch_and_no_ping(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop reports it by a RuntimeError, in a handshake too."""

    async def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError(CLOSED)

    async def main() -> None:
        async with FakeNode().running() as node, connections_to(node) as connections:
            assert await connections.exchange([("PING",)]) == [b"OK"]
            cluster = Cluster([("127.0.0.1", node.port)], {}, lambda: None)
            own = Connection(f"redis://127.0.0.1:{node.port}")
            monkeypatch.setattr(aioredis.Connection, "send_packed_command", refuse)
            for _ in range(2):  # on an open connection, then on a new one
                with pytest.raises(RedisConnectionError, match="closed"):
                    await connections.exchange([("PING",)])
            with pytest.raises(RedisConnectionError, match="no node of the cluster answers"):
                await cluster.find()
            async with keep_awake(own.pipeline):
                await asyncio.sleep(0.01)
            await cluster.close()
            await own.close()

    asyncio.run(main())


def test_a_blocking_read_that_a_library_cancelled_is_begun_again() -> None:
    """Its cancellation must not end the task that waits for all reads."""
    reads = 0

    class Cut:
        def pipeline(self) -> Any:
            return Connection("redis://127.0.0.1:1").pipeline()

        async def run_each(self, pipe: object) -> list[Any]:
            nonlocal reads
            reads += 1
            if reads == 1:
                raise asyncio.CancelledError
            return [{b"stream": []}]

    async def main() -> None:
        waiting: Any = ClusterReads(Cut())  # type: ignore[arg-type]
        streams = {"run": {"stream": "0-0"}}
        assert await waiting.wait(streams, WITHIN_S) == []
        assert await waiting.wait(streams, WITHIN_S) == ["run"]
        await waiting.close()

    asyncio.run(main())


@pytest.mark.parametrize("silent", ["HELLO", "GET"])
def test_a_cut_fails_those_who_wait_for_a_silent_node_at_once(silent: str) -> None:
    """Also in the handshake of a new connection; the next command uses another connection."""

    async def main() -> None:
        async with FakeNode(**{silent: b""}).running() as node, connections_to(node) as connections:
            waiting = asyncio.create_task(connections.exchange([("GET", "key")]))
            await asyncio.wait_for(node.silent.wait(), WITHIN_S)
            connections.cut()
            with pytest.raises(RedisConnectionError, match="were cut"):
                async with asyncio.timeout(WITHIN_S / 2):
                    await waiting
            node.replies[silent] = GREETING.get(silent, b"+OK\r\n")
            before = node.connections
            assert await connections.exchange([("GET", "key")]) == [b"OK"]
            assert node.connections == before + 1
            connections.cut()
            assert await connections.exchange([("GET", "key")]) == [b"OK"]
            assert node.connections == before + 2, "an idle connection was used after a cut"

    asyncio.run(main())


def test_a_task_that_cuts_connections_as_it_connects_is_not_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """It notices the switch of the primary itself; cancelled at a later wait, background work would end for good."""

    async def main() -> None:
        async with FakeNode().running() as node, connections_to(node) as connections:

            async def notice_switch(pool: object) -> None:
                connections.cut()
                raise RedisConnectionError("the primary is down")

            with monkeypatch.context() as patch, pytest.raises(RedisConnectionError, match="the primary is down"):
                patch.setattr(aioredis.ConnectionPool, "get_connection", notice_switch)
                await connections.exchange([("PING",)])
            await asyncio.sleep(0)
            assert await connections.exchange([("PING",)]) == [b"OK"]

    asyncio.run(main())


@pytest.mark.parametrize("cut", [False, True], ids=["alone", "with a cut"])
def test_a_cancelled_caller_of_a_silent_node_stays_cancelled(cut: bool) -> None:
    """A cut cancels it too, in the same turn: an error of the connection would swallow the caller's own end."""

    async def main() -> None:
        async with FakeNode(GET=b"").running() as node, connections_to(node) as connections:
            waiting = asyncio.create_task(connections.exchange([("GET", "key")]))
            await node.silent.wait()
            if cut:
                connections.cut()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert await connections.exchange([("PING",)]) == [b"OK"]

    asyncio.run(main())


def test_a_cut_ends_the_read_of_a_thread_at_once() -> None:
    """Payloads are read by threads, which wait for a silent node in a call of the system."""
    failures: list[Exception] = []

    async def main() -> None:
        async with FakeNode(GET=b"").running() as node:
            with redis.Redis(port=node.port, socket_timeout=WITHIN_S) as client:

                def read() -> None:
                    try:
                        read_values(client, ["key"], ("PING",))
                    except RedisConnectionError as error:
                        failures.append(error)

                thread = threading.Thread(target=read)
                thread.start()
                await asyncio.wait_for(node.silent.wait(), WITHIN_S)
                client.connection_pool.disconnect()
                await asyncio.to_thread(thread.join, WITHIN_S / 2)
                assert not thread.is_alive() and failures

    asyncio.run(main())


def test_a_thread_whose_socket_goes_between_two_steps_has_lost_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """redis-py then raises an AttributeError, which nobody waits for."""

    def send(connection: redis.Connection, *_: Any, **__: Any) -> None:
        connection.disconnect()  # type: ignore[no-untyped-call]
        None.sendall  # type: ignore[attr-defined]  # noqa: B018 - as redis-py does

    async def main() -> None:
        async with FakeNode().running() as node:
            with redis.Redis(port=node.port, socket_timeout=WITHIN_S) as client:
                await asyncio.to_thread(client.ping)
                monkeypatch.setattr(redis.Connection, "send_packed_command", send)
                with pytest.raises(RedisConnectionError, match="were cut"):
                    await asyncio.to_thread(read_values, client, ["key"], ("PING",))

    asyncio.run(main())
