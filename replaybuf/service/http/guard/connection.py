"""One HTTP connection: uvicorn's protocol, with bounds on all bytes that no handler has read yet.

Phases: HEAD (also before the first byte) -> BODY -> DONE -> HEAD of the next request. A request that breaks a bound is
answered with a problem document, and the connection closes.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from http import HTTPStatus
from typing import Any, NoReturn, Self

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from replaybuf.errors import HeadTooLarge, Malformed, ReplaybufError, RequestTimeout, ServiceUnavailable
from replaybuf.service.http.guard.connection_table import Client, ConnectionTable
from replaybuf.service.http.reply.json_pieces import CYCLE, MEDIA_TYPE

logger = logging.getLogger(__name__)

SLOWEST_BODY_S = 600.0
"""Time for a whole body at the slowest pace, which is in proportion to what it declares: 112 kB/s for 64 MiB."""
STALL_TIMEOUT_S = 60.0
"""A connection whose client reads nothing for so long is closed, which frees the memory of its response."""
LINGER_S = 2.0
"""Time to read on after a refusal: a connection that closes with unread bytes may lose the answer."""
MAX_HEADERS = 128
MAX_PIPELINED = 16
"""Maximum number of requests of a connection that wait for the one in progress."""
MAX_CHUNKS = 4096
"""Maximum number of chunks in one read of at most 256 kB: 40,000 tiny ones would hold the event loop for 30 ms."""


class Phase(enum.Enum):
    """What the client sends next."""

    HEAD = enum.auto()
    BODY = enum.auto()
    DONE = enum.auto()


class _Refused(Exception):
    """A bound was broken in a callback of the parser."""


class Connection(HttpToolsProtocol):
    """One connection of a client.

    head bytes <= `max_head_bytes` within `head_timeout_s`; a body brings at least `min_body_bytes_per_s`, and the
    `SLOWEST_BODY_S`th part of what it declares per second, on average over each `body_timeout_s`, while the service
    reads it.
    """

    def __init__(self, table: ConnectionTable, *, handshake: Client | None = None, **arguments: Any) -> None:
        """`handshake`: what had the place of this connection in the table before."""
        super().__init__(**arguments)
        self._table = table
        self._handshake = handshake
        self._limits = table.limits
        self._phase = Phase.HEAD
        self._waited_s = 0.0
        """Time since the phase began, or since the last byte of the body."""
        self._head_bytes = 0
        self._window_s, self._window_bytes = 0.0, 0
        """Time and bytes of the body in the present window of `body_timeout_s`."""
        self._declared_bytes = 0
        self._framing_bytes = 0
        """Bytes since the last byte of a body: chunk extensions, trailers."""
        self._chunks = 0
        self._read_bytes = 0
        """Bytes of bodies in the piece that is parsed; `_chunks` counts their chunks."""
        self._broken: tuple[ReplaybufError, str] | None = None
        self._ended = False
        """Whether all further bytes are ignored."""
        self._lingering = False
        self._held: list[bytes] = []
        """Bytes that wait for their turn at the gate; the connection reads no more meanwhile."""
        self._stalling: asyncio.TimerHandle | None = None

    @property
    def address(self) -> str | None:
        """Address of the peer; None on a unix socket."""
        return self.client[0] if self.client else None

    # ------------------------------------------------------------------ bytes of the client

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Open the connection if there is room."""
        super().connection_made(transport)
        if self._handshake:
            self._table.forget(self._handshake)
            self._handshake = None
        if not self._table.admit(self):
            self._ended = True
            most = self._limits.max_connections
            detail = f"{most} connections have a request in progress; that is the maximum (serve --max-connections)"
            transport.write(_render(ServiceUnavailable(detail, name="connections", value=most, bound=most)))
            transport.close()

    def data_received(self, data: bytes) -> None:
        """Parse what the client sent, now or in a later turn of the event loop."""
        if self._held:
            self._held.append(data)  # of a read that had begun
        elif self._ended:
            return
        elif self._table.gate.enter(self._read_held):
            self._read(data)
        else:
            self._held.append(data)
            self.transport.pause_reading()
            self._table.mark_busy(self)  # it is not the client that is slow

    def _read_held(self) -> None:
        data, self._held = b"".join(self._held), []
        if not data or self.transport.is_closing():
            return
        if not self.flow.read_paused:
            self.transport.resume_reading()
        if self._phase is Phase.HEAD:
            self._table.mark_half(self)
        self._read(data)

    def _read(self, data: bytes) -> None:
        """Parse bytes; those of a head never pass its bound."""
        if self._ended:
            return
        if self._phase is Phase.BODY or len(data) <= self._limits.max_head_bytes - self._head_bytes:  # almost always
            self._parse(data)
            return
        left, room = memoryview(data), self._room(len(data))
        if (end := data.find(b"\r\n\r\n", 0, room)) >= 0:  # the body behind it comes in one piece: no copy is made
            room = end + 4
        while left and not self._ended:
            self._parse(left[:room])
            left = left[room:]
            room = self._room(len(left)) if left else 0

    def _room(self, size_bytes: int) -> int:
        if self._phase is Phase.BODY:
            return size_bytes
        return max(1, self._limits.max_head_bytes - self._head_bytes)

    def _parse(self, piece: bytes | memoryview) -> None:
        self._read_bytes = self._chunks = 0
        was_body, was_idle = self._phase is Phase.BODY, self._phase is Phase.DONE and self.cycle.response_complete
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            # The request is answered as one without an upgrade; what follows may be of another protocol.
            self.cycle.keep_alive, self._ended = False, True
            return
        except httptools.HttpParserError as error:
            fault = Malformed(f"the request is not valid HTTP/1.1: {error}", name="request")
            self._refuse(*(self._broken or (fault, "malformed")))
            return
        if self._phase is Phase.BODY and was_body:
            self._framing_bytes = 0 if self._read_bytes else self._framing_bytes + len(piece)
        elif self._phase is Phase.HEAD:
            self._head_bytes += len(piece) - self._read_bytes
        elif was_idle and self._is_idle():  # blank lines between two requests
            self._begin_head(len(piece))
        size, bound = max(self._head_bytes, self._framing_bytes), self._limits.max_head_bytes
        if self._phase is not Phase.DONE and size >= bound:
            detail = f"the request head has at least {size} bytes; the maximum is {bound} (serve --max-head-bytes)"
            self._refuse(HeadTooLarge(detail, name="head", value=size, bound=bound), "head_too_large")
        elif self.headers and len(self.headers) > MAX_HEADERS:
            self._refuse(_too_many_headers(len(self.headers)), "head_too_large")

    # ------------------------------------------------------------------ callbacks of the parser

    def on_message_begin(self) -> None:
        """Begin a head."""
        if self._phase is not Phase.HEAD:
            self._begin_head(0)
        super().on_message_begin()

    def _begin_head(self, size_bytes: int) -> None:
        self._phase, self._waited_s, self._head_bytes = Phase.HEAD, 0.0, size_bytes
        self._table.mark_half(self)

    def on_headers_complete(self) -> None:
        """Start the handler of the request, or queue it behind the one in progress."""
        if len(self.headers) > MAX_HEADERS:
            self._break(_too_many_headers(len(self.headers)), "head_too_large")
        if len(self.pipeline) >= MAX_PIPELINED:
            detail = f"{MAX_PIPELINED} requests wait for the one in progress; wait for answers before you send more"
            self._break(Malformed(detail, name="pipeline", bound=MAX_PIPELINED), "pipelined")
        super().on_headers_complete()
        self._declared_bytes = 0
        for name, value in self.headers:
            if name == b"content-length":
                self._declared_bytes = int(value) if value.isdigit() else 0
                break
        self.scope["state"][CYCLE], self.headers = self.cycle, []  # headers of trailers are ignored
        self._phase, self._waited_s, self._window_s = Phase.BODY, 0.0, 0.0
        self._head_bytes = self._window_bytes = self._framing_bytes = 0
        self._table.mark_busy(self)

    def on_body(self, body: bytes) -> None:
        """Hand bytes to the handler."""
        self._waited_s = 0.0
        self._window_bytes += len(body)
        self._read_bytes += len(body)
        self._chunks += 1
        if self._chunks > MAX_CHUNKS:
            detail = f"the body has more than {MAX_CHUNKS} chunks in 256 kB; send larger chunks"
            self._break(Malformed(detail, name="chunks", bound=MAX_CHUNKS), "malformed")
        cycle = self.cycle
        if not cycle.response_complete:
            if cycle.body:  # the handler has not taken the last piece yet
                self.flow.pause_reading()
            else:  # uvicorn's own, of which a copy is made
                cycle.body = RequestBody()  # type: ignore[assignment]
            cycle.body += body
            cycle.message_event.set()

    def on_message_complete(self) -> None:
        """End the body."""
        self._phase, self._waited_s = Phase.DONE, 0.0
        super().on_message_complete()
        if self.cycle.response_complete:
            self._table.mark_idle(self)

    def on_response_complete(self) -> None:
        """Go on with the next request, or wait for one."""
        if self.pipeline or self.transport.is_closing():
            super().on_response_complete()
        else:  # without uvicorn's timer of an idle connection: `wait_longer` closes it
            self.server_state.total_requests += 1
            self.flow.resume_reading()
        if not self.cycle.response_complete:
            return
        self._waited_s = 0.0
        if self._phase is Phase.DONE:
            self._table.mark_idle(self)
        elif self._phase is Phase.BODY and self.expect_100_continue:
            self.transport.close()  # the client may leave its body out: the next bytes could be either

    def _break(self, error: ReplaybufError, reason: str) -> NoReturn:
        self._broken = error, reason
        raise _Refused

    # ------------------------------------------------------------------ time

    def wait_longer(self, seconds: float) -> None:
        """Count time that passed in the present phase, and end a request that takes too long."""
        if self._held:
            return  # its bytes wait for us
        self._waited_s += seconds
        if self._lingering:
            if self._waited_s >= LINGER_S:
                self.transport.abort()
        elif self._ended:
            return
        elif self._phase is Phase.HEAD:
            if self._waited_s >= self._limits.head_timeout_s:
                self._end_head()
        elif self._phase is Phase.BODY:
            self._check_body(seconds)
        elif self._is_idle() and self._waited_s >= self.timeout_keep_alive:
            self.transport.close()

    def _end_head(self) -> None:
        if self._head_bytes == 0:  # opened and never used: nobody waits for an answer
            self.drop("head_timeout")
            return
        bound = self._limits.head_timeout_s
        detail = f"the request head is not complete after {bound:g} s (serve --head-timeout-s)"
        self._refuse(RequestTimeout(detail, name="head_timeout_s", value=bound, bound=bound), "head_timeout")

    def _check_body(self, seconds: float) -> None:
        timeout_s = self._limits.body_timeout_s
        if self.flow.read_paused and not self.cycle.response_complete:
            self._waited_s -= seconds  # the handler is busy with the bytes before
            return
        self._window_s += seconds
        least_bytes = max(self._limits.min_body_bytes_per_s, self._declared_bytes / SLOWEST_BODY_S) * timeout_s
        if self._window_s >= timeout_s and self.cycle.response_complete:
            self.drop("body_timeout")  # the rest of a body that was answered early
        elif self._waited_s >= timeout_s or (self._window_s >= timeout_s and self._window_bytes < least_bytes):
            detail = (
                f"{self._window_bytes} bytes of the body came within {self._window_s:g} s, none in the last "
                f"{self._waited_s:g} s; the minimum is {least_bytes:g} bytes within {timeout_s:g} s "
                f"(serve --body-timeout-s, --min-body-bytes-per-s; a whole body within {SLOWEST_BODY_S:g} s)"
            )
            error = RequestTimeout(detail, name="body", value=self._window_bytes, bound=least_bytes)
            self._refuse(error, "body_timeout")
        elif self._window_s >= timeout_s:
            self._window_s, self._window_bytes = 0.0, 0

    # ------------------------------------------------------------------ ends

    def _refuse(self, error: ReplaybufError, reason: str) -> None:
        """Answer a request that breaks a bound and close; without an answer if another one is in progress."""
        if self.pipeline or (self._answering() and (self._phase is Phase.HEAD or self.cycle.response_started)):
            self.drop(reason)
            return
        self._table.traffic.refused[reason] += 1
        logger.debug("request refused client=%s reason=%s: %s", self.client, reason, error.detail)
        self._ended, self._lingering, self._waited_s = True, True, 0.0
        self._table.mark_half(self)
        self._end_handler()
        self.transport.write(_render(error))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()

    def drop(self, reason: str) -> None:
        """Close the connection at once."""
        if not self._lingering:
            self._table.traffic.refused[reason] += 1
            logger.debug("connection dropped client=%s reason=%s", self.client, reason)
        self._ended = True
        self._end_handler()
        self.transport.abort()

    def _is_idle(self) -> bool:
        return self._phase is Phase.DONE and self.cycle.response_complete

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _end_handler(self) -> None:
        if self._answering():
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Release what the connection holds."""
        self._table.forget(self)
        self._held.clear()
        self._stop_timer()
        super().connection_lost(exc)

    # ------------------------------------------------------------------ answers

    def pause_writing(self) -> None:
        """Start the timer: the client does not keep up."""
        super().pause_writing()
        self._stalling = self.loop.call_later(STALL_TIMEOUT_S, self._abort)

    def resume_writing(self) -> None:
        """Stop the timer: the client has read everything."""
        self._stop_timer()
        super().resume_writing()

    def _stop_timer(self) -> None:
        if self._stalling:
            self._stalling.cancel()
            self._stalling = None

    def _abort(self) -> None:
        logger.warning("client stalled client=%s seconds=%g", self.client, STALL_TIMEOUT_S)
        self.transport.abort()


def _too_many_headers(count: int) -> HeadTooLarge:
    detail = f"the request has at least {count} header lines; the maximum is {MAX_HEADERS}"
    return HeadTooLarge(detail, name="headers", value=count, bound=MAX_HEADERS)


def _render(error: ReplaybufError) -> bytes:
    """Render a whole response: there may be no request to answer through the application."""
    body = msgspec.json.encode(error.problem(), enc_hook=str)
    lines = [
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        f"content-type: {MEDIA_TYPE}",
        f"content-length: {len(body)}",
        "connection: close",
    ]
    if error.retry_after_s is not None:
        lines.append(f"retry-after: {max(1, round(error.retry_after_s))}")
    return "\r\n".join([*lines, "", ""]).encode() + body


class RequestBody:
    """Pieces that the handler has not received: uvicorn's `bytearray`, in the operations that uvicorn uses.

    A `bytearray` copies each piece, also when it grows, and once more for the handler: four of seven copies of a body.
    """

    def __init__(self) -> None:
        self._size_bytes = 0
        self._pieces: list[bytes] = []

    def __iadd__(self, piece: bytes) -> Self:
        self._size_bytes += len(piece)
        self._pieces.append(piece)
        return self

    def __len__(self) -> int:
        return self._size_bytes

    def __bytes__(self) -> bytes:
        return b"".join(self._pieces)  # a single piece is not copied
