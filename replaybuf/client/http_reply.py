"""Replies of a service, read as HTTP/1.1 without I/O: the caller brings the bytes, from a socket or an event loop."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Generator, Mapping
from typing import TypeAlias, TypeVar

import zstandard

T = TypeVar("T")

BUFFER_BYTES = 64 << 10
"""Bound of the status line and the headers of a reply, and of one line of a chunked body."""

LARGEST_BODY_BYTES = 64 << 30
"""Bound of a body, or of one chunk of it."""

_HEAD_ENDS, _LINE_ENDS = b"\r\n\r\n", b"\r\n"
_STATUSES_WITHOUT_BODY = (204, 304)
_FIRST_FINAL_STATUS = 200


class NoReply(Exception):
    """A request without an answer: the connection failed, ended, or brought something else than HTTP."""


class LateReply(NoReply):
    """A request without an answer in time."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The answer to `method` at `url`. Names of headers are in lower case; `content` is decompressed."""

    method: str
    url: str
    status_code: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def is_success(self) -> bool:
        """Whether the status is 2xx."""
        return self.status_code // 100 == 2


@dataclasses.dataclass(frozen=True, slots=True)
class Received:
    """What arrived: status, headers, body, and whether the connection can serve another request."""

    status_code: int
    headers: dict[str, str]
    content: bytes
    is_reusable: bool


Reading: TypeAlias = Generator[memoryview, int, T]
"""Yields where the next bytes belong, takes how many arrived there (0: the other side closed), returns the result."""


def receive() -> Reading[Received]:
    """Read one reply to a request that is not a HEAD. Raises `NoReply` for its early end and for other protocols."""
    incoming = _Incoming()
    status = 0
    while status < _FIRST_FINAL_STATUS:  # the others announce the one that counts
        head = yield from incoming.until(_HEAD_ENDS)
        version, status, headers = _parse_head(head)
    keeps = version == b"HTTP/1.1" and headers.get("connection", "").lower() != "close"
    if status in _STATUSES_WITHOUT_BODY:
        content = b""
    elif "transfer-encoding" in headers:
        content = yield from _chunks(incoming)
    elif "content-length" in headers:
        content = yield from incoming.exactly(_number(headers["content-length"], 10))
    else:
        keeps = False
        content = yield from incoming.rest()
    if headers.get("content-encoding") == "zstd":
        content = zstandard.ZstdDecompressor().stream_reader(content, read_across_frames=True).readall()
    return Received(status, headers, content, keeps and incoming.is_empty)


def _parse_head(head: bytes) -> tuple[bytes, int, dict[str, str]]:
    first, *lines = head.split(_LINE_ENDS)
    version, _, rest = first.partition(b" ")
    if not version.startswith(b"HTTP/1.") or not rest[:3].isdigit():
        raise NoReply(f"not a reply of HTTP/1.1: {first[:80]!r}")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.decode("latin-1").partition(":")
        if not colon:
            raise NoReply(f"not a header of HTTP/1.1: {line[:80]!r}")
        headers[name.lower()] = value.strip()
    return version, int(rest[:3]), headers


def _chunks(incoming: _Incoming) -> Reading[bytes]:
    """Read a chunked body, which a proxy may send; the lines after the last chunk are of no use."""
    chunks: list[bytes] = []
    while size := _number((yield from incoming.until(_LINE_ENDS)).split(b";")[0].decode("latin-1"), 16):
        chunks.append((yield from incoming.exactly(size)))
        yield from incoming.until(_LINE_ENDS)
    while (yield from incoming.until(_LINE_ENDS)):
        pass
    return b"".join(chunks)


def _number(text: str, base: int) -> int:
    try:
        number = int(text, base)
    except ValueError:
        number = -1
    if not 0 <= number <= LARGEST_BODY_BYTES:
        raise NoReply(f"the reply has the length {text[:80]!r}; it must be in 0..{LARGEST_BODY_BYTES}")
    return number


class _Incoming:
    """The bytes of a reply that have arrived and were not taken yet."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._start = self._end = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing has arrived beyond the reply."""
        return self._start == self._end

    def until(self, ending: bytes) -> Reading[bytes]:
        """Take the bytes before `ending`, and drop the ending. Raises `NoReply` if they do not fit the buffer."""
        buffer: bytearray = self._buffer.obj  # type: ignore[assignment]
        while (place := buffer.find(ending, self._start, self._end)) < 0:
            if self._start:
                waiting = bytes(self._buffer[self._start : self._end])
                self._start, self._end = 0, len(waiting)
                self._buffer[: self._end] = waiting
            if self._end == BUFFER_BYTES:
                raise NoReply(f"the reply has headers or a line of over {BUFFER_BYTES} bytes, the maximum")
            self._end += _arrived((yield self._buffer[self._end :]), self._end)
        taken = bytes(self._buffer[self._start : place])
        self._start = place + len(ending)
        return taken

    def exactly(self, size: int) -> Reading[bytes]:
        """Take `size` bytes."""
        here = min(size, self._end - self._start)
        first = self._buffer[self._start : self._start + here]
        self._start += here
        if here == size:
            return bytes(first)
        # Only BytesIO gives out the bytes that it was filled with: a bytearray would be copied, megabytes of a batch.
        whole = io.BytesIO()
        whole.seek(size - 1)
        whole.write(b"\0")
        with whole.getbuffer() as view:
            view[:here] = first
            while here < size:
                here += _arrived((yield view[here:]), here, size)
        return whole.getvalue()

    def rest(self) -> Reading[bytes]:
        """Take everything until the other side closes."""
        parts = [bytes(self._buffer[self._start : self._end])]
        while arrived := (yield self._buffer):
            parts.append(bytes(self._buffer[:arrived]))
        self._start = self._end = 0
        return b"".join(parts)


def _arrived(count: int, before: int, of: int | None = None) -> int:
    """Return how many bytes arrived. Raises `NoReply` if it is none."""
    if not count:
        raise NoReply(f"the connection ended after {before} bytes of the reply{f', of {of}' if of else ''}")
    return count
