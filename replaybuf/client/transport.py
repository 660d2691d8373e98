"""How the clients send a request and read its reply: by sockets to http and unix addresses, else by httpx.

One write and as few reads as the kernel allows. httpx takes ten times as many calls for a small request, and copies a
large body several times in pieces of 64 KiB. It knows TLS, proxies and passwords in addresses: for them it is imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import time
import urllib.request
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlencode, urlsplit

from replaybuf.client.addresses import base_url, socket_path
from replaybuf.client.http_reply import LateReply, NoReply, Received, Reply, receive

if TYPE_CHECKING:
    import httpx

_KEEPALIVE_S = 2.0
"""Below the 5 s after which uvicorn closes an idle connection, so that no request is sent on a closing one."""
_MAX_IDLE = 8
"""Maximum number of idle connections."""
_MAX_CONNECTIONS = 32
"""Maximum number of connections of an asyncio client to one address; further requests wait for one."""
_JOINED_BYTES = 256 << 10
"""A body up to this size is copied behind its headers: one write costs less than two."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """A request to send: `path` below the address, with its query; `headers` beside those of the client.

    `connect_s` bounds the wait for a connection, `read_s` the one between two arrivals of bytes.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    content: bytes
    connect_s: float
    read_s: float


class Transport(Protocol):
    """Sends the requests of a blocking client to one address. Threads may share it."""

    def send(self, request: Sending) -> Reply:
        """Send a request and read its whole reply. Raises `NoReply`, `LateReply`."""

    def close(self) -> None:
        """Close the idle connections."""


class AsyncTransport(Protocol):
    """Sends the requests of an asyncio client to one address."""

    async def send(self, request: Sending) -> Reply:
        """Send a request and read its whole reply. Raises `NoReply`, `LateReply`."""

    async def aclose(self) -> None:
        """Close the idle connections."""


def transport_to(address: str, headers: Mapping[str, str]) -> Transport:
    """Return the transport of a blocking client that sends these headers with each request."""
    return HttpxTransport(address, headers) if _needs_httpx(address) else SocketTransport(address, headers)


def async_transport_to(address: str, headers: Mapping[str, str]) -> AsyncTransport:
    """Return the transport of an asyncio client that sends these headers with each request."""
    return AsyncHttpxTransport(address, headers) if _needs_httpx(address) else AsyncSocketTransport(address, headers)


def path_with(path: str, query: Mapping[str, str | int]) -> str:
    """Return a path with its query."""
    return f"{path}?{urlencode(query)}" if query else path


# ---------------------------------------------------------------------- by sockets


class _Sockets:
    """The idle connections to one address, and the requests in the form of HTTP/1.1."""

    def __init__(self, address: str, headers: Mapping[str, str], keepalive_s: float = _KEEPALIVE_S) -> None:
        self._base, self._uds, self._keepalive_s = base_url(address), socket_path(address), keepalive_s
        parts = urlsplit(self._base)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._prefix = parts.path
        self._common = "".join(f"{name}: {value}\r\n" for name, value in {"host": parts.netloc, **headers}.items())
        self._idle: deque[tuple[float, socket.socket]] = deque()

    def _pieces(self, request: Sending) -> tuple[bytes, ...]:
        """Return a request as the pieces that are written one after the other."""
        own = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
        length = f"content-length: {len(request.content)}\r\n" if request.content or request.method != "GET" else ""
        line = f"{request.method} {self._prefix}{request.path} HTTP/1.1\r\n"
        head = f"{line}{self._common}{own}{length}\r\n".encode("latin-1")
        return (head + request.content,) if len(request.content) <= _JOINED_BYTES else (head, request.content)

    def _reuse(self) -> socket.socket | None:
        """Return the newest idle connection that is still open; close the others that are not."""
        while self._idle:
            try:
                since_s, connection = self._idle.pop()
            except IndexError:  # another thread took the last one
                break
            if time.monotonic() - since_s < self._keepalive_s and _is_quiet(connection):
                return connection
            connection.close()
        return None

    def _finish(self, connection: socket.socket, received: Received, request: Sending) -> Reply:
        """Keep or close a connection after its reply."""
        if received.is_reusable and len(self._idle) < _MAX_IDLE:
            self._idle.append((time.monotonic(), connection))
        else:
            connection.close()
        return Reply(
            method=request.method,
            url=self._base + request.path,
            status_code=received.status_code,
            headers=received.headers,
            content=received.content,
        )

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread took the last one
                self._idle.pop()[1].close()


class SocketTransport(_Sockets):
    """Blocking sockets to one address, http or unix."""

    def send(self, request: Sending) -> Reply:
        """Send a request and read its whole reply. Raises `NoReply`, `LateReply`."""
        connection = None
        try:
            connection = self._reuse() or self._connect(request.connect_s)
            connection.settimeout(request.read_s)
            received = _exchange(connection, self._pieces(request))
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(error, OSError):
                raise _no_reply(error) from error
            raise
        return self._finish(connection, received, request)

    def _connect(self, timeout_s: float) -> socket.socket:
        if not self._uds:
            connection = socket.create_connection((self._host, self._port), timeout_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout_s)
        try:
            connection.connect(self._uds)
        except OSError:
            connection.close()
            raise
        return connection


def _exchange(connection: socket.socket, pieces: tuple[bytes, ...]) -> Received:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # an early refusal has an answer
        for piece in pieces:
            connection.sendall(piece)
    reading = receive()
    try:
        count = connection.recv_into(next(reading))
        while True:  # without a name for the view: the body is copied if it is still exported at its end
            count = connection.recv_into(reading.send(count))
    except StopIteration as end:
        received: Received = end.value
        return received


class AsyncSocketTransport(_Sockets):
    """Sockets of the running event loop to one address, http or unix."""

    def __init__(self, address: str, headers: Mapping[str, str], keepalive_s: float = _KEEPALIVE_S) -> None:
        super().__init__(address, headers, keepalive_s)
        self._free = asyncio.Semaphore(_MAX_CONNECTIONS)

    async def send(self, request: Sending) -> Reply:
        """Send a request and read its whole reply. Raises `NoReply`, `LateReply`."""
        connection = None
        try:
            async with self._free:  # each holder waits for a bounded time
                async with asyncio.timeout(request.connect_s):
                    connection = self._reuse() or await self._connect()
                received = await _exchange_async(connection, self._pieces(request), request.read_s)
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(error, OSError):
                raise _no_reply(error) from error
            raise
        return self._finish(connection, received, request)

    async def aclose(self) -> None:
        """Close the idle connections."""
        self.close()

    async def _connect(self) -> socket.socket:
        loop = asyncio.get_running_loop()
        if self._uds:
            return await _connected(socket.AF_UNIX, self._uds)
        failure: OSError | None = None
        for family, _, _, _, place in await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM):
            try:
                connection = await _connected(family, place)
            except OSError as error:
                failure = error
                continue
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        raise failure or OSError(f"{self._host} has no address")


async def _connected(family: int, place: str | tuple[Any, ...]) -> socket.socket:
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(connection, place)
    except BaseException:
        connection.close()
        raise
    return connection


async def _exchange_async(connection: socket.socket, pieces: tuple[bytes, ...], read_s: float) -> Received:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(read_s) as waiting:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # an early refusal has an answer
            for piece in pieces:
                await loop.sock_sendall(connection, piece)
        reading = receive()
        try:
            count = await loop.sock_recv_into(connection, next(reading))
            while True:
                waiting.reschedule(loop.time() + read_s)
                count = await loop.sock_recv_into(connection, reading.send(count))
        except StopIteration as end:
            received: Received = end.value
            return received


def _is_quiet(idle: socket.socket) -> bool:
    """Check that nothing arrived on an idle connection: anything that arrives there is its end."""
    idle.setblocking(False)
    try:
        idle.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _no_reply(error: Exception) -> NoReply:
    return (LateReply if isinstance(error, TimeoutError) else NoReply)(str(error) or type(error).__name__)


# ---------------------------------------------------------------------- by httpx


class HttpxTransport:
    """httpx, for a blocking client."""

    def __init__(self, address: str, headers: Mapping[str, str]) -> None:
        import httpx  # 0.1 s, for addresses that need it

        self._base = base_url(address)
        self._http = httpx.Client(headers=headers, limits=_limits(), verify=needs_certificates([address]))

    def send(self, request: Sending) -> Reply:
        """Send a request and read its whole reply. Raises `NoReply`, `LateReply`."""
        import httpx

        try:
            return _reply_of(self._http.send(_httpx_request(self._http, self._base, request)))
        except httpx.TransportError as error:
            raise _httpx_error(error) from error

    def close(self) -> None:
        """Close the connections."""
        self._http.close()


class AsyncHttpxTransport:
    """httpx, for an asyncio client."""

    def __init__(self, address: str, headers: Mapping[str, str]) -> None:
        import httpx

        self._base = base_url(address)
        self._http = httpx.AsyncClient(headers=headers, limits=_limits(), verify=needs_certificates([address]))

    async def send(self, request: Sending) -> Reply:
        """Send a request and read its whole reply. Raises `NoReply`, `LateReply`."""
        import httpx

        try:
            return _reply_of(await self._http.send(_httpx_request(self._http, self._base, request)))
        except httpx.TransportError as error:
            raise _httpx_error(error) from error

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()


def _limits() -> httpx.Limits:
    import httpx

    return httpx.Limits(
        max_connections=_MAX_CONNECTIONS, max_keepalive_connections=_MAX_IDLE, keepalive_expiry=_KEEPALIVE_S
    )


def _httpx_request(client: httpx.Client | httpx.AsyncClient, base: str, request: Sending) -> httpx.Request:
    import httpx

    return client.build_request(
        request.method,
        base + request.path,
        content=request.content or None,
        headers=request.headers,
        timeout=httpx.Timeout(request.read_s, connect=request.connect_s),
    )


def _reply_of(response: httpx.Response) -> Reply:
    return Reply(
        method=response.request.method,
        url=str(response.request.url),
        status_code=response.status_code,
        headers=response.headers,
        content=response.content,
    )


def _httpx_error(error: httpx.TransportError) -> NoReply:
    import httpx

    return (LateReply if isinstance(error, httpx.TimeoutException) else NoReply)(str(error) or type(error).__name__)


def _needs_httpx(address: str) -> bool:
    """Check for what sockets alone do not do: TLS, a proxy, a password in the address."""
    return not socket_path(address) and (needs_certificates([address]) or "@" in urlsplit(address).netloc)


def needs_certificates(addresses: Iterable[str]) -> bool:
    """Return whether any address uses TLS or a proxy, for `httpx.Client(verify=)`.

    Without certificates a client starts 0.1 s faster.
    """
    return _is_proxied() or any(urlsplit(base_url(address)).scheme == "https" for address in addresses)


def _is_proxied() -> bool:
    """Check whether the environment names a proxy for http."""
    return bool(urllib.request.getproxies().keys() & {"http", "all"})
