"""Bounds on what a client sends before a handler reads it: heads, bodies, connections."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from replaybuf.service.http.guard import connection
from replaybuf.service.http.guard.connection import MAX_HEADERS, MAX_PIPELINED, Connection
from replaybuf.service.http.guard.connection_table import ConnectionLimits, ConnectionTable
from replaybuf.service.http.guard.gates import READ_AT_ONCE
from replaybuf.service.options import ServeOptions
from replaybuf.service.traffic import Traffic
from tests.conftest import ServeProcess, Starter
from tests.service.test_server import metric
from tests.waiting import until

KIB = 1 << 10
HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
LIMITS = ConnectionLimits.of(ServeOptions(max_head_bytes=8 * KIB, max_connections=8, max_half_heads=3))

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Server:
    """A server in this process whose time tests count; its application returns the length of the body."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.traffic = Traffic()
        self.table = ConnectionTable(limits, self.traffic)
        self.state = ServerState()
        self.port = 0
        self.calls = 0
        self._writers: list[asyncio.StreamWriter] = []
        self.gate = asyncio.Event()
        """Requests for /wait are answered when it is set."""

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request: /early without reading its body, /wait at the gate, /large with 64 MiB."""
        self.calls += 1
        size, more = 0, scope["path"] != "/early"
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            size += len(message["body"])
            more = message["more_body"]
        if scope["path"] == "/wait":
            await self.gate.wait()
        body = bytes(64 << 20) if scope["path"] == "/large" else b"%d" % size
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body"})

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Listen on a free port."""
        config = uvicorn.Config(
            self.app, timeout_keep_alive=75, interface="asgi3", lifespan="off", log_config=None, ws="none"
        )
        config.load()
        factory = functools.partial(Connection, self.table, config=config, server_state=self.state, app_state={})
        async with await asyncio.get_running_loop().create_server(factory, "127.0.0.1", 0) as server:
            self.port = server.sockets[0].getsockname()[1]
            try:
                yield
            finally:
                self.gate.set()
                for protocol in list(self.state.connections):
                    protocol.transport.abort()
                for writer in self._writers:
                    writer.close()
                    with contextlib.suppress(ConnectionError):
                        await writer.wait_closed()
                await asyncio.gather(*self.state.tasks)

    async def connect(self, *sent: bytes) -> Stream:
        """Open a connection and send bytes; the server has accepted it when this returns."""
        opened = self.traffic.connections + self.traffic.refused.total() + 1
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._writers.append(writer)
        await until(lambda: self.traffic.connections + self.traffic.refused.total() >= opened)
        for piece in sent:
            await send(writer, piece)
        return reader, writer


async def send(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Send bytes; a server that has closed is no fault of the sender."""
    with contextlib.suppress(ConnectionError):
        writer.write(data)
        await writer.drain()


async def status(stream: Stream) -> int:
    """Read the status of the next answer; 0 if the connection ended without one."""
    with contextlib.suppress(ConnectionError):
        line = await stream[0].readline()
        return int(line.split()[1]) if line else 0
    return 0


async def answer(stream: Stream) -> tuple[int, bytes]:
    """Read one answer with its body."""
    code, length = await status(stream), 0
    while code and (line := await stream[0].readline()).strip():
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    return code, await stream[0].readexactly(length)


def serve(test: Callable[[Server], Coroutine[Any, Any, None]], **limits: Any) -> None:
    """Run a test against a server, at most a minute."""

    async def main() -> None:
        server = Server(dataclasses.replace(LIMITS, **limits))
        async with asyncio.timeout(60), server.serving():
            await test(server)

    asyncio.run(main())


# ---------------------------------------------------------------------- heads

ENDLESS = {
    "one header": [HEAD + b"X: ", b"a" * KIB],
    "short lines": [HEAD, b"a:b\r\n"],
    "a URL": [b"GET /", b"a" * KIB],
    "blank lines": [HEAD + b"\r\n", b"\r\n" * KIB],
    "a trailer": [CHUNKED + b"1\r\n[\r\n0\r\nX: ", b"a" * KIB],
    "short trailers": [CHUNKED + b"1\r\n[\r\n0\r\n", b"a:b\r\n"],
    "a chunk extension": [CHUNKED + b"1;x=", b"a" * KIB],
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_an_endless_head_is_refused_at_its_bound(kind: str) -> None:
    """The answer says why, and bytes that follow are read without being kept."""

    async def test(server: Server) -> None:
        start, repeated = ENDLESS[kind]
        stream = await server.connect(start)
        if kind == "blank lines":
            assert await answer(stream) == (200, b"0")
        for _ in range(64 * KIB // len(repeated)):
            await send(stream[1], repeated)
        code, body = await answer(stream)
        assert (code, b"head-too-large" in body) == (431, True)
        assert server.traffic.refused == {"head_too_large": 1}

    serve(test)


def test_a_head_up_to_its_bounds_is_answered() -> None:
    """Counted to the byte and to the line."""

    async def test(server: Server) -> None:
        bound = LIMITS.max_head_bytes
        for extra, expected in ((0, 200), (1, 431)):
            padding = b"a" * (bound - len(HEAD) - len(b"X: \r\n\r\n") + extra)
            assert await status(await server.connect(HEAD + b"X: " + padding + b"\r\n\r\n")) == expected
        for lines, expected in ((MAX_HEADERS - 1, 200), (MAX_HEADERS, 431)):  # beside `Host`
            assert await status(await server.connect(HEAD + b"a:b\r\n" * lines + b"\r\n")) == expected

    serve(test)


def test_a_slow_head_is_answered_408_and_an_unused_connection_closes() -> None:
    """The time of a first head begins with the connection, of later heads with their first byte."""

    async def test(server: Server) -> None:
        begun, unused = await server.connect(HEAD), await server.connect()
        again = await server.connect(HEAD + b"\r\n")
        assert await answer(again) == (200, b"0")
        server.table.count_time(9.5)
        await send(again[1], b"G")
        await send(begun[1], b"X: still coming\r\n")
        await until(lambda: server.table._half.keys() >= server.state.connections)
        server.table.count_time(0.5)
        assert await status(begun) == 408
        assert await status(unused) == 0
        server.table.count_time(9.0)
        assert server.traffic.refused == {"head_timeout": 2}
        server.table.count_time(0.5)
        assert await status(again) == 408

    serve(test)


def test_bytes_that_are_not_http_get_a_problem_document() -> None:
    async def test(server: Server) -> None:
        code, body = await answer(await server.connect(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"))
        assert (code, b"malformed" in body) == (400, True)
        assert (server.calls, server.traffic.refused) == (0, {"malformed": 1})

    serve(test)


def test_a_request_for_another_protocol_is_answered_as_plain_and_then_closes() -> None:
    """Bytes behind it may be of that protocol: they are never read as a request."""

    async def test(server: Server) -> None:
        upgrade = HEAD + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
        stream = await server.connect(upgrade + HEAD + b"\r\n", HEAD + b"\r\n")
        assert await answer(stream) == (200, b"0")
        assert await status(stream) == 0
        assert server.calls == 1

    serve(test)


def test_requests_may_queue_behind_one_in_progress_up_to_a_bound() -> None:
    """Answers come in order; a connection that sends more is dropped, and starts no handler for them."""

    async def test(server: Server) -> None:
        server.gate.set()
        queued = await server.connect((HEAD + b"\r\n") * (1 + MAX_PIPELINED))
        for _ in range(1 + MAX_PIPELINED):
            assert await answer(queued) == (200, b"0")
        calls = server.calls
        assert await status(await server.connect((HEAD + b"\r\n") * 10_000)) == 0
        await until(lambda: server.traffic.refused["pipelined"] == 1)
        assert server.calls <= calls + 1

    serve(test)


# ---------------------------------------------------------------------- bodies


def moved(client: Connection, before_bytes: int) -> bool:
    """Return whether the connection read more of a body, or ended."""
    return client._ended or client._window_bytes != before_bytes


@pytest.mark.parametrize(("piece_bytes", "expected"), [(0, 408), (100, 408), (4096, 200)])
def test_a_body_that_stands_still_or_trickles_is_cut(piece_bytes: int, expected: int) -> None:
    """One that brings its minimum, 1 KiB/s over 30 s, takes as long as it needs."""

    async def test(server: Server) -> None:
        length = 1 + 100 * 4096
        stream = await server.connect(POST + b"Content-Length: %d\r\n\r\n[" % length)
        (connected,) = server.state.connections
        assert isinstance(connected, Connection)
        await until(lambda: connected._window_bytes == 1)
        for _ in range(100):
            before = connected._window_bytes
            await send(stream[1], b"[" * piece_bytes)
            if piece_bytes:
                await until(functools.partial(moved, connected, before))
            server.table.count_time(3.0)
            if server.traffic.refused:
                break
        assert await status(stream) == expected
        assert server.traffic.refused == ({"body_timeout": 1} if expected == 408 else {})

    serve(test)


def test_a_body_that_the_service_does_not_read_is_not_slow() -> None:
    """A handler may wait for room; the client cannot send meanwhile."""

    async def test(server: Server) -> None:
        stream = await server.connect(POST.replace(b"/", b"/early", 1) + b"Content-Length: 400000\r\n\r\n")
        assert await answer(stream) == (200, b"0")
        await send(stream[1], b"[" * 400_000)
        (connected,) = server.state.connections
        await until(lambda: connected in server.table._idle)
        await send(stream[1], POST + b"Content-Length: 400000\r\n\r\n")
        await until(lambda: server.calls == 2)
        assert isinstance(connected, Connection)
        connected.flow.pause_reading()
        server.table.count_time(300.0)
        connected.flow.resume_reading()
        await send(stream[1], b"[" * 400_000)
        assert await answer(stream) == (200, b"400000")

    serve(test)


def test_the_rest_of_a_body_that_was_answered_early_is_not_read_for_ever() -> None:
    async def test(server: Server) -> None:
        stream = await server.connect(POST.replace(b"/", b"/early", 1) + b"Content-Length: 10000000\r\n\r\n")
        assert await answer(stream) == (200, b"0")
        for _ in range(10):
            await send(stream[1], b"[" * 65536)
            server.table.count_time(3.0)
        assert await status(stream) == 0
        assert server.traffic.refused == {"body_timeout": 1}

    serve(test)


def test_a_client_that_waits_for_100_continue_gets_its_answer_and_a_close() -> None:
    """It may leave its body out: what follows cannot be told from the next request."""

    async def test(server: Server) -> None:
        expecting = b"Expect: 100-continue\r\nContent-Length: 10\r\n\r\n"
        early = await server.connect(POST.replace(b"/", b"/early", 1) + expecting)
        assert await answer(early) == (200, b"0")
        assert await status(early) == 0
        read = await server.connect(POST + expecting)
        assert await status(read) == 100
        await send(read[1], b"[" * 10)
        await read[0].readline()
        assert await answer(read) == (200, b"10")

    serve(test)


def test_many_tiny_chunks_in_one_read_are_refused() -> None:
    """Each is a call of the parser, and a read of 256 kB could hold 40,000."""

    async def test(server: Server) -> None:
        stream = await server.connect(CHUNKED, b"1\r\n[\r\n" * 40_000)
        assert await status(stream) == 400
        few = await server.connect(CHUNKED, b"40\r\n" + b"[" * 64 + b"\r\n0\r\n\r\n")
        assert await answer(few) == (200, b"64")

    serve(test)


def test_a_client_that_reads_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection would hold a body in memory for as long as it likes."""
    monkeypatch.setattr(connection, "STALL_TIMEOUT_S", 0.1)

    async def test(server: Server) -> None:
        with socket.create_connection(("127.0.0.1", server.port)) as unread:
            unread.sendall(HEAD.replace(b"/", b"/large", 1) + b"\r\n")
            await until(lambda: server.calls == 1 and not server.state.tasks)

    serve(test)


# ---------------------------------------------------------------------- connections


def test_a_new_connection_takes_the_place_of_the_oldest_half_head() -> None:
    """Then of the one that was idle longest; requests in progress stay, and without a place the answer is 503."""

    async def test(server: Server) -> None:
        idle = [await server.connect(HEAD + b"\r\n") for _ in range(2)]
        for stream in idle:
            assert await answer(stream) == (200, b"0")
        waiting = HEAD.replace(b"/", b"/wait", 1) + b"\r\n"
        busy = [await server.connect(waiting) for _ in range(5)]
        half = await server.connect(HEAD)
        await until(lambda: server.calls == 7)

        assert await answer(await server.connect(HEAD + b"\r\n")) == (200, b"0")
        assert await status(half) == 0
        busy += [await server.connect(waiting) for _ in range(2)]
        await until(lambda: server.calls == 10)
        assert [await status(stream) for stream in idle] == [0, 0]
        busy.append(await server.connect(waiting))
        await until(lambda: server.calls == 11)
        code, body = await answer(await server.connect())
        assert (code, b"--max-connections" in body) == (503, True)
        assert server.traffic.connections == LIMITS.max_connections
        assert server.traffic.refused == {"too_many_connections": 5}
        server.gate.set()
        for stream in busy:
            assert await answer(stream) == (200, b"0")

    serve(test)


@pytest.mark.parametrize(("bound", "left"), [(3, 3), (0, 6)])
def test_one_address_keeps_its_newest_half_heads(bound: int, left: int) -> None:
    """Those that came within the last period may be on their way, and are not counted."""

    async def test(server: Server) -> None:
        half = [await server.connect(HEAD) for _ in range(6)]
        server.table.count_time(0.5)
        assert server.traffic.connections == 6
        server.table.count_time(0.5)
        await until(lambda: server.traffic.connections == left)
        for stream in half[6 - left :]:
            await send(stream[1], b"\r\n")
            assert await answer(stream) == (200, b"0")
        assert server.traffic.refused["too_many_half_heads"] == 6 - left

    serve(test, max_half_heads=bound)


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [(100, 20_000, "8192 10496"), (100, 1024, "768 1024"), (15_000, 20_000, "8192 15000")],
)
def test_the_limit_of_open_files_is_raised_or_bounds_the_connections(soft: int, hard: int, expected: str) -> None:
    """Files and Redis keep 256 of them."""
    program = f"""if True:
        import resource
        from replaybuf.service.http.guard.connection_table import ConnectionLimits, raise_descriptor_limit
        from replaybuf.service.options import ServeOptions
        resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
        limits = raise_descriptor_limit(ConnectionLimits.of(ServeOptions()), 2048)
        print(limits.max_connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    """
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == expected


# ---------------------------------------------------------------------- a whole service


def peak_bytes(pid: int) -> int:
    """Read the most memory that a process has had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_a_service_under_attack_keeps_its_memory_and_answers(tmp_path: Path, started: Starter) -> None:
    """64 MiB of header, of short lines and of a trailer, then more half heads than there may be connections."""
    server = started(ServeProcess(tmp_path / "data", "--max-connections", "40"))
    host, _, port = server.url.removeprefix("http://").partition(":")
    before = peak_bytes(server.pid)
    attacks = [ENDLESS[kind] for kind in ("one header", "short lines", "a trailer")]
    for start, repeated in attacks:
        with socket.create_connection((host, int(port)), timeout=60) as raw, contextlib.suppress(ConnectionError):
            raw.sendall(start.replace(b"Host: x", b"Host: localhost"))
            for _ in range(64):
                raw.sendall(repeated * (1024 * KIB // len(repeated)))
    assert peak_bytes(server.pid) < before + (32 << 20)
    with contextlib.ExitStack() as held:
        for _ in range(80):
            held.enter_context(socket.create_connection((host, int(port)), timeout=60)).sendall(HEAD)
        text = httpx.get(f"{server.url}/metrics", timeout=60).text
    assert metric(text, "replaybuf_connections") <= 40
    assert metric(text, "replaybuf_requests_refused_total", reason="too_many_connections") >= 41
    assert metric(text, "replaybuf_requests_refused_total", reason="head_too_large") >= 3


# ---------------------------------------------------------------------- bursts


def test_requests_that_arrive_at_once_are_read_a_few_per_turn() -> None:
    """The loop goes on in between, and each request is answered with all of its bytes."""
    clients = 4 * READ_AT_ONCE

    async def test(server: Server) -> None:
        streams = [await server.connect() for _ in range(clients)]
        for number, (_, writer) in enumerate(streams):
            writer.write(POST + b"Content-Length: %d\r\n\r\n" % (number + 1))
        began = [0]
        while began[-1] < clients:
            await asyncio.sleep(0)
            began.append(server.calls)
        assert max(later - before for before, later in itertools.pairwise(began)) <= READ_AT_ONCE
        for number, (_, writer) in enumerate(streams):
            writer.write(b"x" * number)
            await asyncio.sleep(0)
            writer.write(b"x")
        answers = [await answer(stream) for stream in streams]
        assert answers == [(200, b"%d" % (number + 1)) for number in range(clients)]

    serve(test, max_connections=clients, max_half_heads=0)


def test_requests_that_wait_for_their_turn_are_neither_half_heads_nor_idle() -> None:
    """Their bytes have come: the service is slow, not the client. So a new connection takes no place of theirs."""
    clients = 4 * READ_AT_ONCE

    async def test(server: Server) -> None:
        streams = [await server.connect(HEAD + b"\r\n") for _ in range(clients // 2)]
        assert [await answer(stream) for stream in streams] == [(200, b"0")] * (clients // 2)
        streams += [await server.connect() for _ in range(clients // 2)]
        for _, writer in streams:
            writer.write(HEAD + b"\r\n")
        server.calls = 0
        late = socket.create_connection(("127.0.0.1", server.port))
        while server.calls < clients:
            if server.calls:  # the others have sent their bytes too
                server.table.count_time(0.5)
            await asyncio.sleep(0)
        assert [await answer(stream) for stream in streams] == [(200, b"0")] * clients
        assert server.traffic.refused.keys() <= {"too_many_connections"}
        late.close()

    serve(test, max_connections=clients, max_half_heads=3)


def test_a_connection_that_closes_before_its_turn_holds_up_nobody() -> None:
    async def test(server: Server) -> None:
        clients = 4 * READ_AT_ONCE
        streams = [await server.connect() for _ in range(clients)]
        for number, (_, writer) in enumerate(streams):
            writer.write(HEAD + b"\r\n")
            if number % 2:
                writer.transport.abort()
        answers = [await answer(stream) for stream in streams[::2]]
        assert answers == [(200, b"0")] * (clients // 2)

    serve(test, max_connections=4 * READ_AT_ONCE, max_half_heads=0)
