"""The blocking client's transport: whole bodies, connections used again while they stand, httpx's errors."""

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
"""What a server says that closes the connection instead."""
READ_NO_MORE = b"-"
"""What a server says that has answered and takes nothing more."""
BODY = bytes(range(256)) * 40_000


class Scripted:
    """A server that answers, on each connection, one request after the other with the next of its `answers`."""

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
                    connection.recv(1)  # until the client goes
            self.hung_up.release()

    def _request(self, connection: socket.socket) -> bytes:
        """Read headers, and the rest of a body of a few bytes."""
        request = connection.recv(4096)
        found = re.search(rb"content-length: (\d)\r\n", request)
        return request if request.endswith(b"sent") or not found else request + connection.recv(int(found[1]))


def answered(body: bytes, *headers: bytes) -> bytes:
    """An answer with a body."""
    lines = [b"HTTP/1.1 200 OK", b"content-length: %d" % len(body), *headers, b"", b""]
    return b"\r\n".join(lines) + body


@pytest.fixture
def asking() -> Iterator[Callable[..., httpx.Client]]:
    """Make clients of a scripted server; they are closed at the end."""
    made: list[httpx.Client] = []

    def make(server: Scripted, keepalive_s: float = 60.0, timeout_s: float = 10.0) -> httpx.Client:
        transport = WholeBodies("127.0.0.1", server.port, None, keepalive_s)
        made.append(httpx.Client(transport=transport, base_url="http://server", timeout=timeout_s))
        return made[-1]

    yield make
    for client in made:
        client.close()


def test_a_large_body_comes_whole_and_its_connection_is_used_again(asking: Callable[..., httpx.Client]) -> None:
    with Scripted((answered(BODY), OK)) as server, asking(server) as client:
        assert client.get("/a?b=c", headers={"x": "y"}).content == BODY
        assert client.post("/d", content=b"sent").content == b"ok"
    assert server.accepted == 1
    assert server.requests[0].startswith(b"GET /a?b=c HTTP/1.1\r\n") and b"\r\nx: y\r\n" in server.requests[0]
    assert server.requests[1].endswith(b"sent")


def test_a_compressed_body_is_decompressed(asking: Callable[..., httpx.Client]) -> None:
    packed = zstandard.ZstdCompressor().compress(BODY)
    with Scripted((answered(packed, b"content-encoding: zstd"),)) as server, asking(server) as client:
        assert client.get("/").content == BODY


def test_a_connection_that_the_server_closed_or_that_is_too_old_is_not_used_again(
    asking: Callable[..., httpx.Client],
) -> None:
    """A request that met its end could not be repeated: it may have been done."""
    with Scripted((OK, HANG_UP), (OK, HANG_UP)) as server, asking(server) as client:
        assert client.post("/").content == b"ok"
        assert server.hung_up.acquire(timeout=10)
        assert client.post("/").content == b"ok"
    with Scripted((OK,), (OK,)) as server, asking(server, keepalive_s=0.0) as client:
        assert [client.post("/").content for _ in range(2)] == [b"ok", b"ok"]
        assert server.accepted == 2


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ((answered(BODY)[:-1], HANG_UP), httpx.RemoteProtocolError),
        ((HANG_UP,), httpx.TransportError),
        ((b"SSH-2.0\r\n\r\n", HANG_UP), httpx.RemoteProtocolError),
        ((b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nfour",), httpx.ReadTimeout),
    ],
    ids=["cut off", "no answer", "not HTTP", "silent"],
)
def test_what_goes_wrong_is_an_error_of_httpx(
    asking: Callable[..., httpx.Client], answers: tuple[bytes, ...], error: type[Exception]
) -> None:
    """Which the client turns into `ServiceUnavailable`; the connection is not used again."""
    with Scripted(answers, (OK,)) as server, asking(server, timeout_s=0.5) as client:
        with pytest.raises(error):
            client.get("/")
        assert client.get("/").content == b"ok"


def test_nobody_there_is_a_connect_error(asking: Callable[..., httpx.Client]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        transport = WholeBodies("127.0.0.1", free.getsockname()[1], None, 1.0)
        with httpx.Client(transport=transport) as client, pytest.raises(httpx.ConnectError):
            client.get("http://server/")


def test_an_answer_that_comes_before_all_is_sent_is_read(tmp_path: Path) -> None:
    """A service refuses a large group by its length alone; over a unix socket the rest cannot be sent, for certain."""
    refused = b"HTTP/1.1 413 Too Large\r\ncontent-length: 3\r\nconnection: close\r\n\r\nwhy"
    transport = WholeBodies("named.unix", 80, str(tmp_path / "s"), 1.0)
    with Scripted((refused, READ_NO_MORE), uds=tmp_path / "s") as server, httpx.Client(transport=transport) as client:
        reply = client.post("http://named.unix/", content=bytes(50_000_000))
        assert (reply.status_code, reply.content, server.accepted) == (413, b"why", 1)


def test_a_unix_socket_is_asked_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "s"
    transport = WholeBodies("named.unix", 80, str(path), 1.0)
    with Scripted((OK,), uds=path) as server, httpx.Client(transport=transport) as client:
        assert client.get("http://named.unix/").content == b"ok"
    assert b"host: named.unix\r\n" in server.requests[0].lower()


def test_what_goes_by_tls_or_through_a_proxy_is_left_to_httpx(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = ["http://a:1", "https://b:2", "unix:/s"]
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert [httpx.URL(name).port for name in mounts_of(addresses, 1.0)] == [1, None]
    monkeypatch.setenv("http_proxy", "http://proxy:3")
    assert [httpx.URL(name).host.endswith(".unix") for name in mounts_of(addresses, 1.0)] == [True]


def test_certificates_are_needed_for_tls_and_for_proxies_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert not needs_certificates(["http://one:1", "unix:/there.sock"])
    assert needs_certificates(["http://one:1", "https://two:2"])
    monkeypatch.setenv("all_proxy", "https://proxy:3")
    assert needs_certificates(["http://one:1"])
