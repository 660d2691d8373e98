"""HTTP/1.1 transport of the blocking client: it reads a large body at once, into the bytes that it returns.

httpx's own transport copies a body several times in pieces of 64 KiB: 38 ms of CPU time for 17 MB, six times as much.
"""

from __future__ import annotations

import contextlib
import socket
import time
import urllib.request
from collections import deque
from collections.abc import Iterable
from http.client import HTTPConnection, HTTPException

import httpx

from replaybuf.client.addresses import base_url, socket_path

_MAX_IDLE = 8
"""Maximum number of idle connections."""


class WholeBodies(httpx.BaseTransport):
    """Transport to one server at `host` and `port`, or at the unix socket `uds`. Threads may share it.

    It drops a connection that was idle for `keepalive_s` or that the server has closed. Raises httpx's errors:
    `ConnectError`, `ConnectTimeout`, `ReadTimeout` (between two bytes), `ReadError`, `RemoteProtocolError`.
    """

    def __init__(self, host: str, port: int, uds: str | None, keepalive_s: float) -> None:
        self._host, self._port, self._uds, self._keepalive_s = host, port, uds, keepalive_s
        self._idle: deque[tuple[float, HTTPConnection]] = deque()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and read its whole answer."""
        timeouts = request.extensions.get("timeout", {})
        connection = self._reuse() or self._connect(timeouts.get("connect"))
        try:
            connection.sock.settimeout(timeouts.get("read"))
            target = request.url.raw_path.decode("ascii")
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # an early refusal has an answer
                connection.request(request.method, target, request.read() or None, dict(request.headers.items()))
            reply = connection.getresponse()
            headers, content = reply.getheaders(), reply.read()
        except TimeoutError as error:
            connection.close()
            raise httpx.ReadTimeout(str(error), request=request) from error
        except HTTPException as error:  # incomplete or not HTTP; a server that stopped raises both kinds
            connection.close()
            raise httpx.RemoteProtocolError(str(error) or repr(error), request=request) from error
        except OSError as error:
            connection.close()
            raise httpx.ReadError(str(error), request=request) from error
        if reply.will_close or len(self._idle) >= _MAX_IDLE:
            connection.close()
        else:
            self._idle.append((time.monotonic(), connection))
        return httpx.Response(reply.status, headers=headers, content=content, request=request)

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread took the last one
                self._idle.pop()[1].close()

    def _reuse(self) -> HTTPConnection | None:
        """Return the newest idle connection that is still open; close the others that are not."""
        while self._idle:
            try:
                since_s, connection = self._idle.pop()
            except IndexError:  # another thread took the last one
                break
            if time.monotonic() - since_s < self._keepalive_s and _is_quiet(connection.sock):
                return connection
            connection.close()
        return None

    def _connect(self, timeout_s: float | None) -> HTTPConnection:
        connection = _Connection(self._host, self._port, self._uds, timeout_s)
        try:
            connection.connect()
        except TimeoutError as error:
            raise httpx.ConnectTimeout(str(error)) from error
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
        return connection


class _Connection(HTTPConnection):
    """A connection over TCP or to a unix socket."""

    def __init__(self, host: str, port: int, uds: str | None, timeout_s: float | None) -> None:
        super().__init__(host, port, timeout=timeout_s)
        self._uds = uds

    def connect(self) -> None:
        """Connect."""
        if self._uds is None:
            super().connect()
            return
        connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connecting.settimeout(self.timeout)
        try:
            connecting.connect(self._uds)
        except OSError:
            connecting.close()
            raise
        self.sock = connecting


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


def needs_certificates(addresses: Iterable[str]) -> bool:
    """Return whether any address uses TLS or a proxy, for `httpx.Client(verify=)`.

    Without certificates a client starts 0.1 s faster.
    """
    return _is_proxied() or any(httpx.URL(base_url(address)).scheme == "https" for address in addresses)


def mounts_of(addresses: Iterable[str], keepalive_s: float) -> dict[str, httpx.BaseTransport | None]:
    """Return `mounts` for `httpx.Client`: this transport for unix sockets and for http without a proxy."""
    mounts: dict[str, httpx.BaseTransport | None] = {}
    for address in addresses:
        url = httpx.URL(base_url(address))
        uds = socket_path(address)
        if uds or (url.scheme == "http" and not _is_proxied()):
            mounts[base_url(address)] = WholeBodies(url.host, url.port or 80, uds or None, keepalive_s)
    return mounts


def _is_proxied() -> bool:
    """Check whether the environment names a proxy for http."""
    return bool(urllib.request.getproxies().keys() & {"http", "all"})
