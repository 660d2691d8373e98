"""Transports of both clients by sockets: whole bodies, reused connections, errors."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.client.http_reply import BUFFER_BYTES, LateReply, NoReply, Received, Reply, receive
from replaybuf.client.transport import (
    AsyncHttpxTransport,
    AsyncSocketTransport,
    HttpxTransport,
    Sending,
    SocketTransport,
    async_transport_to,
    needs_certificates,
    transport_to,
)

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
HANG_UP = b""
"""Close the connection instead of answering."""
READ_NO_MORE = b"-"
"""Stop reading after the answer."""
BODY = bytes(range(256)) * 40_000


class Scripted:
    """A server with a list of answers for each connection."""

    def __init__(self, *connections: tuple[bytes, ...], uds: Path | None = None) -> None:
        family, where = (socket.AF_UNIX, str(uds)) if uds else (socket.AF_INET, ("127.0.0.1", 0))
        self._listener = socket.socket(family)
        self._listener.bind(where)
        self._listener.listen()
        self.address = f"unix:{uds}" if uds else f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.accepted = 0
        self.requests: list[bytes] = []
        self.answered = threading.Semaphore(0)
        self.hung_up = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._serve, args=(connections,))

    def __enter__(self) -> Scripted:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._thread.join(10)

    def _serve(self, connections: tuple[tuple[bytes, ...], ...]) -> None:
        for answers in connections:
            connection, _ = self._listener.accept()
            self.accepted += 1
            with connection:
                for answer in answers:
                    if answer == HANG_UP:
                        break
                    if answer == READ_NO_MORE:
                        connection.shutdown(socket.SHUT_RD)
                        break
                    self.requests.append(self._request(connection))
                    connection.sendall(answer)
                    self.answered.release()
                else:
                    connection.recv(1)  # wait until the client disconnects
            self.hung_up.release()

    def _request(self, connection: socket.socket) -> bytes:
        """Read the headers and a short body."""
        request = connection.recv(4096)
        match = re.search(rb"content-length: (\d)\r\n", request)
        return request if request.endswith(b"sent") or not match else request + connection.recv(int(match[1]))


def answer_with(body: bytes, *headers: bytes) -> bytes:
    """Build an answer with a body."""
    lines = [b"HTTP/1.1 200 OK", b"content-length: %d" % len(body), *headers, b"", b""]
    return b"\r\n".join(lines) + body


class Peer:
    """A transport of either kind that a test calls without awaiting; it closes at the end of the block."""

    def __init__(self, is_async: bool, address: str, timeout_s: float = 10.0, **options: float) -> None:
        self._timeout_s = timeout_s
        self._runner = asyncio.Runner()
        self._transport: SocketTransport | AsyncSocketTransport
        if is_async:
            self._transport = AsyncSocketTransport(address, {"a": "b"}, **options)
        else:
            self._transport = SocketTransport(address, {"a": "b"}, **options)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._transport.close()
        self._runner.close()

    def send(self, method: str, path: str = "/", content: bytes = b"", **headers: str) -> Reply:
        request = Sending(
            method=method,
            path=path,
            headers=headers,
            content=content,
            connect_s=self._timeout_s,
            read_s=self._timeout_s,
        )
        if isinstance(self._transport, SocketTransport):
            return self._transport.send(request)
        return self._runner.run(self._transport.send(request))


Connect = Callable[..., Peer]


@pytest.fixture(params=[False, True], ids=["blocking", "asyncio"])
def connect_to(request: pytest.FixtureRequest) -> Connect:
    """Make transports of one kind to a scripted server."""

    def make(server: Scripted, **options: float) -> Peer:
        return Peer(request.param, server.address, **options)

    return make


def test_a_large_body_is_read_whole_and_its_connection_is_reused(connect_to: Connect) -> None:
    with Scripted((answer_with(BODY), OK)) as server, connect_to(server) as peer:
        assert peer.send("GET", "/a?b=c", x="y").content == BODY
        assert peer.send("POST", "/d", b"sent").content == b"ok"
    assert server.accepted == 1
    first, second = server.requests
    assert first.startswith(b"GET /a?b=c HTTP/1.1\r\n") and b"\r\nx: y\r\n" in first and b"\r\na: b\r\n" in first
    assert second.endswith(b"sent")


def test_a_compressed_body_is_decompressed(connect_to: Connect) -> None:
    packed = zstandard.ZstdCompressor().compress(BODY)
    with Scripted((answer_with(packed, b"Content-Encoding: zstd"),)) as server, connect_to(server) as peer:
        assert peer.send("GET").content == BODY


def test_a_closed_or_expired_connection_is_not_reused(connect_to: Connect) -> None:
    """A request on it could not be retried: the server may have handled it."""
    with Scripted((OK, HANG_UP), (OK, HANG_UP)) as server, connect_to(server) as peer:
        assert peer.send("POST").content == b"ok"
        assert server.hung_up.acquire(timeout=10)
        assert peer.send("POST").content == b"ok"
    with Scripted((OK,), (OK,)) as server, connect_to(server, keepalive_s=0.0) as peer:
        assert [peer.send("POST").content for _ in range(2)] == [b"ok", b"ok"]
        assert server.accepted == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.0 200 OK\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok, and what nobody asked for",
    ],
    ids=["without length", "closed", "too much"],
)
def test_a_connection_that_cannot_serve_again_is_not_reused(connect_to: Connect, answer: bytes) -> None:
    with Scripted((answer, HANG_UP), (OK,)) as server, connect_to(server) as peer:
        assert peer.send("GET").content == b"ok"
        assert peer.send("GET").content == b"ok"
        assert server.accepted == 2


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ((answer_with(BODY)[:-1], HANG_UP), NoReply),
        ((HANG_UP,), NoReply),
        ((b"SSH-2.0\r\n\r\n", HANG_UP), NoReply),
        ((b"HTTP/1.1 200 OK\r\nno header\r\n\r\n", HANG_UP), NoReply),
        ((b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n", HANG_UP), NoReply),
        ((b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999999\r\n\r\n", HANG_UP), NoReply),
        ((b"HTTP/1.1 200 OK\r\nx: " + bytes(BUFFER_BYTES), HANG_UP), NoReply),
        ((b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nfour",), LateReply),
    ],
    ids=["cut off", "no answer", "not HTTP", "no header", "negative", "huge", "endless", "silent"],
)
def test_a_request_without_a_whole_reply_is_an_error(
    connect_to: Connect, answers: tuple[bytes, ...], error: type[NoReply]
) -> None:
    """The client converts them to `ServiceUnavailable`. The connection is not reused."""
    timeout_s = 1.0 if error is LateReply else 30.0  # only the silent server is to be too late
    with Scripted(answers, (OK,)) as server, connect_to(server, timeout_s=timeout_s) as peer:
        with pytest.raises(NoReply) as raised:
            peer.send("GET")
        assert type(raised.value) is error
        assert peer.send("GET").content == b"ok"


@pytest.mark.parametrize("is_async", [False, True])
def test_a_port_without_a_server_is_an_error(is_async: bool) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
        with Peer(is_async, address) as peer, pytest.raises(NoReply, match="111"):
            peer.send("GET")


@pytest.mark.parametrize("is_async", [False, True])
def test_an_answer_is_read_though_the_request_was_not_sent_whole(tmp_path: Path, is_async: bool) -> None:
    """The service rejects a large group by its length. On a unix socket sending the rest then fails."""
    rejection = b"HTTP/1.1 413 Too Large\r\ncontent-length: 3\r\nconnection: close\r\n\r\nwhy"
    with Scripted((rejection, READ_NO_MORE), uds=tmp_path / "s") as server, Peer(is_async, server.address) as peer:
        reply = peer.send("POST", "/", bytes(50_000_000))
        assert (reply.status_code, reply.content, server.accepted) == (413, b"why", 1)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_unix_socket_is_opened_by_its_path(tmp_path: Path, is_async: bool) -> None:
    with Scripted((OK,), uds=tmp_path / "s") as server, Peer(is_async, server.address) as peer:
        assert peer.send("GET").content == b"ok"


def test_a_cancelled_request_closes_its_connection() -> None:
    """Its reply would be taken for that of the next request."""

    async def cancel(server: Scripted) -> bytes:
        transport = AsyncSocketTransport(server.address, {})
        request = Sending(method="GET", path="/", headers={}, content=b"", connect_s=10.0, read_s=10.0)
        sent = asyncio.create_task(transport.send(request))
        await asyncio.to_thread(server.answered.acquire, timeout=10)
        sent.cancel()
        await asyncio.gather(sent, return_exceptions=True)
        content = (await transport.send(request)).content
        await transport.aclose()
        return content

    with Scripted((b"HTTP/1.1 200 OK\r\n",), (OK,)) as server:
        assert asyncio.run(cancel(server)) == b"ok"
        assert server.accepted == 2


def test_an_asyncio_client_holds_a_bounded_number_of_connections() -> None:
    """The other requests wait for one."""

    async def send_many() -> tuple[list[bytes], int]:
        serving: list[asyncio.Task[None] | None] = []
        full = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            serving.append(asyncio.current_task())
            if len(serving) == 32:
                full.set()
            await full.wait()
            with contextlib.suppress(asyncio.IncompleteReadError):
                while await reader.readuntil(b"\r\n\r\n"):
                    writer.write(OK)
            writer.close()
            await writer.wait_closed()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        transport = AsyncSocketTransport(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", {})
        request = Sending(method="GET", path="/", headers={}, content=b"", connect_s=10.0, read_s=10.0)
        replies = await asyncio.gather(*(transport.send(request) for _ in range(64)))
        await transport.aclose()
        server.close()
        await asyncio.gather(*filter(None, serving))
        return [reply.content for reply in replies], len(serving)

    contents, connected = asyncio.run(send_many())
    assert contents == [b"ok"] * 64
    assert 32 <= connected < 64


def read_in_pieces(data: bytes, sizes: list[int]) -> Received:
    """Read a reply that arrives in pieces of these sizes, then as much as fits."""
    reading = receive()
    view = next(reading)
    position = 0
    pieces = iter(sizes)
    try:
        while True:
            count = min(next(pieces, len(data)), len(view), len(data) - position)
            view[:count] = data[position : position + count]
            position += count
            view = reading.send(count)
    except StopIteration as end:
        received: Received = end.value
        return received


@given(
    body=st.binary(max_size=300),
    chunk=st.integers(1, 100),
    framing=st.sampled_from(["length", "chunked", "end"]),
    announced=st.booleans(),
    sizes=st.lists(st.integers(1, 50), max_size=60),
)
def test_a_reply_is_the_same_however_its_bytes_arrive(
    body: bytes, chunk: int, framing: str, announced: bool, sizes: list[int]
) -> None:
    early = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" if announced else b""
    if framing == "chunked":
        parts = [body[at : at + chunk] for at in range(0, len(body), chunk)]
        chunks = b"".join(b"%x;note\r\n%s\r\n" % (len(part), part) for part in parts)
        data = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\ntrailer: y\r\n\r\n"
    elif framing == "length":
        data = answer_with(body, b"x:  y ")
    else:
        data = b"HTTP/1.1 200 OK\r\n\r\n" + body
    received = read_in_pieces(early + data, sizes)
    assert (received.status_code, received.content, received.is_reusable) == (200, body, framing != "end")
    assert framing != "length" or received.headers["x"] == "y"


@pytest.fixture
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment that names no proxy."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_httpx_handles_tls_proxies_and_passwords(no_proxy: pytest.MonkeyPatch) -> None:
    def by_httpx(address: str) -> bool:
        blocking, awaiting = transport_to(address, {}), async_transport_to(address, {})
        blocking.close()
        asyncio.run(awaiting.aclose())
        assert isinstance(blocking, HttpxTransport) == isinstance(awaiting, AsyncHttpxTransport)
        return isinstance(blocking, HttpxTransport)

    addresses = ["http://a:1", "unix:/s", "https://b:2", "http://name:secret@c:3"]
    assert [by_httpx(address) for address in addresses] == [False, False, True, True]
    no_proxy.setenv("http_proxy", "http://proxy:3")
    assert [by_httpx(address) for address in addresses] == [True, False, True, True]


def test_only_tls_and_proxies_need_certificates(no_proxy: pytest.MonkeyPatch) -> None:
    assert not needs_certificates(["http://one:1", "unix:/there.sock"])
    assert needs_certificates(["http://one:1", "https://two:2"])
    no_proxy.setenv("all_proxy", "https://proxy:3")
    assert needs_certificates(["http://one:1"])
