"""Fuzz target for request heads: raw bytes to one connection of the server, with an application behind it."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from replaybuf.service.http.guard.connection import Connection
from replaybuf.service.http.guard.connection_table import ConnectionLimits, ConnectionTable
from replaybuf.service.traffic import Traffic

MAX_HEAD_BYTES = 512
"""Small, so that a fuzzer sees when the bound is not kept."""
LIMITS = ConnectionLimits(
    max_connections=4,
    max_half_heads=2,
    max_head_bytes=MAX_HEAD_BYTES,
    head_timeout_s=10.0,
    body_timeout_s=10.0,
    min_body_bytes_per_s=1,
)
TURNS = 16
"""Turns of the event loop after which an application with all its bytes has answered."""
LONG_S = 1000.0
HEAD = b"POST /v1/runs/r/groups HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
SEEDS = [
    b"\x20GET /healthz HTTP/1.1\r\nhost: h\r\n\r\n" * 2,
    b"\x07" + HEAD + b"content-length: 4\r\n\r\n[{}]GET / HTTP/1.1\r\n\r\n",
    b"\x40" + HEAD + b"transfer-encoding: chunked\r\n\r\n2;x=y\r\n[]\r\n0\r\nt: 1\r\n\r\n",
    b"\xff" + HEAD + b"expect: 100-continue\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}",
    b"\x10GET / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\nmore",
    b"\x80GET / HTTP/1.1\r\nx-long: " + b"a" * 2000,
    b"\x80GET / HTTP/1.1\r\n" + b"x: y\r\n" * 200 + b"\r\n",
]

_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


class Transport(asyncio.Transport):
    """Keeps what the server writes."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Read the whole body, then answer 200."""
    assert sum(len(name) + len(value) for name, value in scope["headers"]) <= MAX_HEAD_BYTES
    while (message := await receive())["type"] == "http.request" and message["more_body"]:
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


_config = uvicorn.Config(application, log_config=None, access_log=False, lifespan="off", ws="none")
_loop = asyncio.new_event_loop()


def head(data: bytes) -> None:
    """Feed a connection; the first byte is the length of the pieces."""
    _loop.run_until_complete(_feed(data[1:], data[0] + 1 if data else 1))


async def _feed(data: bytes, length: int) -> None:
    table = ConnectionTable(LIMITS, Traffic())
    state, transport = ServerState(), Transport()
    connection = Connection(table, config=_config, server_state=state, app_state={})
    connection.connection_made(transport)
    fed = 0
    for piece in _pieces(data, length):
        if transport.closed:
            break
        if not statuses_of(transport):
            fed += len(piece)
        connection.data_received(piece)
        assert sum(len(name) + len(value) for name, value in connection.headers or []) <= MAX_HEAD_BYTES
        await asyncio.sleep(0)
    for _ in range(TURNS):
        await asyncio.sleep(0)
    for _ in range(2):  # once to refuse what is incomplete, once to end the connection
        table.count_time(LONG_S)
        await asyncio.sleep(0)
    assert transport.closed, "a connection is still open after all its time"
    connection.connection_lost(None)
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*state.tasks)
    assert table.traffic.connections == 0
    statuses = statuses_of(transport)
    assert statuses <= {100, 200, 400, 408, 431}, transport.written
    if b"\n\r\n" not in data and b"\n\n" not in data:  # no head ended
        assert fed <= MAX_HEAD_BYTES + length, f"{fed} bytes of one head were taken"


def statuses_of(transport: Transport) -> set[int]:
    """Return the status of each answer so far."""
    return {int(status) for status in _STATUS.findall(transport.written)}


def _pieces(data: bytes, length: int) -> Iterator[bytes]:
    for start in range(0, len(data), length):
        yield data[start : start + length]
