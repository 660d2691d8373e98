"""Transport of the blocking client: whole bodies, reused connections, errors of httpx."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import zstandard

from replaybuf.client.transport import WholeBodies, mounts_of, needs_certificates

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
        self.port = 0 if uds else self._listener.getsockname()[1]
        self.accepted = 0
        self.requests: list[bytes] = []
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
                else:
                    connection.recv(1)  # wait until the client disconnects
            self.hung_up.release()

    def _request(self, connection: socket.socket) -> bytes:
        """Read the headers and a short body."""
        request = connection.recv(4096)
        found = re.search(rb"content-length: (\d)\r\n", request)
        return request if request.endswith(b"sent") or not found else request + connection.recv(int(found[1]))


def answer_with(body: bytes, *headers: bytes) -> bytes:
    """Build an answer with a body."""
    lines = [b"HTTP/1.1 200 OK", b"content-length: %d" % len(body), *headers, b"", b""]
    return b"\r\n".join(lines) + body


@pytest.fixture
def connect_to() -> Iterator[Callable[..., httpx.Client]]:
    """Make clients of a scripted server and close them at the end."""
    made: list[httpx.Client] = []

    def make(server: Scripted, keepalive_s: float = 60.0, timeout_s: float = 10.0) -> httpx.Client:
        transport = WholeBodies("127.0.0.1", server.port, None, keepalive_s)
        made.append(httpx.Client(transport=transport, base_url="http://server", timeout=timeout_s))
        return made[-1]

    yield make
    for client in made:
        client.close()


def test_a_large_body_is_read_whole_and_its_connection_is_reused(connect_to: Callable[..., httpx.Client]) -> None:
    with Scripted((answer_with(BODY), OK)) as server, connect_to(server) as client:
        assert client.get("/a?b=c", headers={"x": "y"}).content == BODY
        assert client.post("/d", content=b"sent").content == b"ok"
    assert server.accepted == 1
    assert server.requests[0].startswith(b"GET /a?b=c HTTP/1.1\r\n") and b"\r\nx: y\r\n" in server.requests[0]
    assert server.requests[1].endswith(b"sent")


def test_a_compressed_body_is_decompressed(connect_to: Callable[..., httpx.Client]) -> None:
    packed = zstandard.ZstdCompressor().compress(BODY)
    with Scripted((answer_with(packed, b"content-encoding: zstd"),)) as server, connect_to(server) as client:
        assert client.get("/").content == BODY


def test_a_closed_or_expired_connection_is_not_reused(
    connect_to: Callable[..., httpx.Client],
) -> None:
    """A request on it could not be retried: the server may have handled it."""
    with Scripted((OK, HANG_UP), (OK, HANG_UP)) as server, connect_to(server) as client:
        assert client.post("/").content == b"ok"
        assert server.hung_up.acquire(timeout=10)
        assert client.post("/").content == b"ok"
    with Scripted((OK,), (OK,)) as server, connect_to(server, keepalive_s=0.0) as client:
        assert [client.post("/").content for _ in range(2)] == [b"ok", b"ok"]
        assert server.accepted == 2


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ((answer_with(BODY)[:-1], HANG_UP), httpx.RemoteProtocolError),
        ((HANG_UP,), httpx.TransportError),
        ((b"SSH-2.0\r\n\r\n", HANG_UP), httpx.RemoteProtocolError),
        ((b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nfour",), httpx.ReadTimeout),
    ],
    ids=["cut off", "no answer", "not HTTP", "silent"],
)
def test_transport_errors_are_errors_of_httpx(
    connect_to: Callable[..., httpx.Client], answers: tuple[bytes, ...], error: type[Exception]
) -> None:
    """The client converts them to `ServiceUnavailable`. The connection is not reused."""
    with Scripted(answers, (OK,)) as server, connect_to(server, timeout_s=0.5) as client:
        with pytest.raises(error):
            client.get("/")
        assert client.get("/").content == b"ok"


def test_a_port_without_a_server_is_a_connect_error(connect_to: Callable[..., httpx.Client]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        transport = WholeBodies("127.0.0.1", free.getsockname()[1], None, 1.0)
        with httpx.Client(transport=transport) as client, pytest.raises(httpx.ConnectError):
            client.get("http://server/")


def test_an_answer_is_read_though_the_request_was_not_sent_whole(tmp_path: Path) -> None:
    """The service rejects a large group by its length. On a unix socket sending the rest then fails."""
    rejection = b"HTTP/1.1 413 Too Large\r\ncontent-length: 3\r\nconnection: close\r\n\r\nwhy"
    transport = WholeBodies("named.unix", 80, str(tmp_path / "s"), 1.0)
    with Scripted((rejection, READ_NO_MORE), uds=tmp_path / "s") as server, httpx.Client(transport=transport) as client:
        reply = client.post("http://named.unix/", content=bytes(50_000_000))
        assert (reply.status_code, reply.content, server.accepted) == (413, b"why", 1)


def test_a_unix_socket_is_opened_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "s"
    transport = WholeBodies("named.unix", 80, str(path), 1.0)
    with Scripted((OK,), uds=path) as server, httpx.Client(transport=transport) as client:
        assert client.get("http://named.unix/").content == b"ok"
    assert b"host: named.unix\r\n" in server.requests[0].lower()


def test_httpx_handles_tls_and_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = ["http://a:1", "https://b:2", "unix:/s"]
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert [httpx.URL(name).port for name in mounts_of(addresses, 1.0)] == [1, None]
    monkeypatch.setenv("http_proxy", "http://proxy:3")
    assert [httpx.URL(name).host.endswith(".unix") for name in mounts_of(addresses, 1.0)] == [True]


def test_only_tls_and_proxies_need_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert not needs_certificates(["http://one:1", "unix:/there.sock"])
    assert needs_certificates(["http://one:1", "https://two:2"])
    monkeypatch.setenv("all_proxy", "https://proxy:3")
    assert needs_certificates(["http://one:1"])
