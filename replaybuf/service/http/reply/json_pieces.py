"""Answers in JSON: problem documents (RFC 9457), and large answers in pieces that do not hold the event loop.

A call to the encoder takes 5 ms per MB: 0.3 s for a group of 60 MB.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from replaybuf.errors import ReplaybufError

PIECE_ITEMS = 4096
"""Items of a list that are encoded at once."""
PIECE_BYTES = 64 << 10
"""Bytes that are sent at once; other calls are served between two pieces."""
MEDIA_TYPE = "application/problem+json"
CYCLE = "replaybuf.cycle"
"""State of a request that came on a connection of ours: uvicorn's of request and response."""
OWN_HEADERS = 2
"""Further headers are not ours: uvicorn checks their bytes."""


class JsonResponse(Response):
    """starlette's response with a JSON body, without three calls that work out its headers."""

    def __init__(self, body: bytes, status: int, headers: Mapping[str, str] | None) -> None:
        self.status_code, self.body, self.background = status, body, None
        self.raw_headers = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]
        if headers:
            self.headers.update(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, in one write if the connection is ours and takes it at once."""
        cycle: RequestResponseCycle | None = scope.get("state", {}).get(CYCLE)
        if cycle is None or cycle.disconnected or cycle.flow.write_paused or len(self.raw_headers) > OWN_HEADERS:
            await super().__call__(scope, receive, send)
        else:
            self._write(cycle)

    def _write(self, cycle: RequestResponseCycle) -> None:
        """As `cycle.send`, which writes head and body apart: a system call each, and another wake-up of the client."""
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        pieces: list[bytes | memoryview] = [STATUS_LINE[self.status_code]]
        for name, value in (*cycle.default_headers, *self.raw_headers):
            pieces += name, b": ", value, b"\r\n"
        pieces.append(b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n")
        if cycle.scope["method"] != "HEAD":
            pieces.append(self.body)
        cycle.transport.write(b"".join(pieces))
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()


async def json_in_pieces(value: dict[str, Any]) -> Response:
    """Encode an answer; one of more than `PIECE_BYTES` is encoded while it is sent."""
    pieces = _joined(encode_pieces(value))
    first = next(pieces)
    second = next(pieces, None)
    if second is None:
        return Response(first, media_type="application/json")
    return StreamingResponse(_unhurried(first, second, pieces), media_type="application/json")


async def _unhurried(first: bytes, second: bytes, rest: Iterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    yield second
    for piece in rest:
        yield piece
        await asyncio.sleep(0)


def encode_pieces(value: Any) -> Iterator[bytes]:
    """Encode a value in small pieces: it opens dicts, lists and arrays, but no structs and no lists of numbers."""
    match value:
        case dict() if value:
            start = b"{"
            for name, inner in value.items():
                yield start + msgspec.json.encode(name) + b":"
                yield from encode_pieces(inner)
                start = b","
            yield b"}"
        case np.ndarray():
            yield from _list_pieces(value)
        case list() if value and isinstance(value[0], dict):
            start = b"["
            for inner in value:
                yield start
                yield from encode_pieces(inner)
                start = b","
            yield b"]"
        case list() if len(value) > PIECE_ITEMS:
            yield from _list_pieces(value)
        case _:
            yield msgspec.json.encode(value)


def _list_pieces(values: Sequence[Any] | np.ndarray[Any, Any]) -> Iterator[bytes]:
    start = b"["
    for place in range(0, len(values), PIECE_ITEMS):
        items = values[place : place + PIECE_ITEMS]
        listed = items.tolist() if isinstance(items, np.ndarray) else items
        yield start + msgspec.json.encode(listed)[1:-1]
        start = b","
    yield b"]" if len(values) else b"[]"


def _joined(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Join pieces to parts of about `PIECE_BYTES`."""
    part = bytearray()
    for piece in pieces:
        part += piece
        if len(part) >= PIECE_BYTES:
            yield bytes(part)
            part.clear()
    yield bytes(part)


def error_response(error: ReplaybufError, request: str = "") -> Response:
    """Render an error, with the headers that belong to its status; `request`: id of the request, as the log has it."""
    headers = {"X-Request-Id": request} if request else {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return document_response(error.problem(), headers)


def document_response(document: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    """Render a problem document; its `status` is the status of the response."""
    return Response(msgspec.json.encode(document, enc_hook=str), document["status"], headers, media_type=MEDIA_TYPE)
