"""HTTP/1.1 for the blocking client: an answer of many MB is read in one go, into the bytes that are returned.

httpx stays the client. Its own transport passes a body on in pieces of 64 KiB, each copied several times: for 17 MB it
takes 38 ms of processor time, six times as long as this.
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

_IDLE = 8
"""Connections that are kept open while nobody uses them."""


class WholeBodies(httpx.BaseTransport):
    """Requests to one server at `host` and `port`, or at the unix socket `uds`. Threads may share it.

    A connection that was idle for `keepalive_s`, or that the server has closed, is not used again. Raises httpx's
    errors: `ConnectError`, `ConnectTimeout`, `ReadTimeout` (no byte for so long), `ReadError`, `RemoteProtocolError`.
    """

    def __init__(self, host: str, port: int, uds: str | None, keepalive_s: float) -> None:
        self._host, self._port, self._uds, self._keepalive_s = host, port, uds, keepalive_s
        self._idle: deque[tuple[float, HTTPConnection]] = deque()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and read all of its answer."""
        timeouts = request.extensions.get("timeout", {})
        connection = self._kept() or self._connected(timeouts.get("connect"))
        try:
            connection.sock.settimeout(timeouts.get("read"))
            target = request.url.raw_path.decode("ascii")
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # who refuses it early says why
                connection.request(request.method, target, request.read() or None, dict(request.headers.items()))
            reply = connection.getresponse()
            headers, content = reply.getheaders(), reply.read()
        except TimeoutError as error:
            connection.close()
            raise httpx.ReadTimeout(str(error), request=request) from error
        except HTTPException as error:  # cut off or none of HTTP; a server that is gone raises both kinds
            connection.close()
            raise httpx.RemoteProtocolError(str(error) or repr(error), request=request) from error
        except OSError as error:
            connection.close()
            raise httpx.ReadError(str(error), request=request) from error
        if reply.will_close or len(self._idle) >= _IDLE:
            connection.close()
        else:
            self._idle.append((time.monotonic(), connection))
        return httpx.Response(reply.status, headers=headers, content=content, request=request)

    def close(self) -> None:
        """Close the connections that nobody uses."""
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread took the last one
                self._idle.pop()[1].close()

    def _kept(self) -> HTTPConnection | None:
        """Return the connection used last that still stands, and let go of those that do not."""
        while self._idle:
            try:
                since_s, connection = self._idle.pop()
            except IndexError:  # another thread took the last one
                break
            if time.monotonic() - since_s < self._keepalive_s and _is_quiet(connection.sock):
                return connection
            connection.close()
        return None

    def _connected(self, timeout_s: float | None) -> HTTPConnection:
        connection = _Connection(self._host, self._port, self._uds, timeout_s)
        try:
            connection.connect()
        except TimeoutError as error:
            raise httpx.ConnectTimeout(str(error)) from error
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
        return connection


class _Connection(HTTPConnection):
    """A connection by TCP, or to a unix socket."""

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
        except BaseException:
            connecting.close()
            raise
        self.sock = connecting


def _is_quiet(idle: socket.socket) -> bool:
    """Say whether nothing came on an idle connection: whatever comes there is its end."""
    idle.setblocking(False)
    try:
        idle.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def needs_certificates(addresses: Iterable[str]) -> bool:
    """Say, for `httpx.Client(verify=)`, whether any address is asked by TLS or by a proxy.

    Where none is, a client need not load the certificates, which takes it 0.1 s of processor time.
    """
    return _is_proxied() or any(httpx.URL(base_url(address)).scheme == "https" for address in addresses)


def mounts_of(addresses: Iterable[str], keepalive_s: float) -> dict[str, httpx.BaseTransport | None]:
    """Say for `httpx.Client(mounts=)` which of these addresses are asked so: unix sockets, and http without a proxy."""
    mounts: dict[str, httpx.BaseTransport | None] = {}
    for address in addresses:
        url = httpx.URL(base_url(address))
        uds = socket_path(address)
        if uds or (url.scheme == "http" and not _is_proxied()):
            mounts[base_url(address)] = WholeBodies(url.host, url.port or 80, uds or None, keepalive_s)
    return mounts


def _is_proxied() -> bool:
    """Say whether the environment names a proxy for http."""
    return bool(urllib.request.getproxies().keys() & {"http", "all"})
