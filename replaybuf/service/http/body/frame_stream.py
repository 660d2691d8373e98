"""Frames cut from a body while it arrives: memory holds one frame, not the body."""

from __future__ import annotations

from collections.abc import Iterator

from replaybuf.errors import BrokenFrame
from replaybuf.service.shared_bytes import SharedBytes
from replaybuf.wire.frame import PREFIX_BYTES, read_length

JOINED_BYTES = 1 << 20
"""A larger frame grows in shared memory: joining its parts would hold the event loop."""


class GrowingBytes:
    """Bytes that arrive in parts; more than `joined_bytes` are kept in shared memory."""

    def __init__(self, joined_bytes: int) -> None:
        self.nbytes = 0
        self._joined_bytes = joined_bytes
        self._parts: list[bytes | memoryview] = []
        self._shared: SharedBytes | None = None

    def append(self, part: bytes | memoryview) -> None:
        """Append a part."""
        self.nbytes += len(part)
        self._parts.append(part)
        if self.nbytes > self._joined_bytes:
            self._shared = self._shared or SharedBytes()
            for kept in self._parts:
                self._shared.append(kept)
            self._parts.clear()

    def collected(self) -> bytes | SharedBytes:
        """Return all bytes."""
        return self._shared or b"".join(self._parts)


class FrameStream:
    """Cuts a stream of bytes into frames. A frame of more than `largest_bytes` is skipped as it arrives."""

    def __init__(self, largest_bytes: int) -> None:
        self._largest_bytes = largest_bytes
        self._prefix = b""
        self._length = 0
        self._missing_bytes = 0
        self._frame: GrowingBytes | None = None

    def feed(self, part: bytes) -> Iterator[memoryview | int]:
        """Yield the frames that are complete with this part; of a frame that was skipped its length.

        Raises `BrokenFrame` if a frame has a wrong magic or length.
        """
        rest = memoryview(part)
        while rest:
            if not self._missing_bytes:
                if not self._prefix and (whole := self._take_whole(rest)):
                    yield whole
                    rest = rest[len(whole) :]
                    continue
                rest = self._begin(rest)
            taken, rest = rest[: self._missing_bytes], rest[self._missing_bytes :]
            self._missing_bytes -= len(taken)
            if self._frame:
                self._frame.append(taken)
            if self._length and not self._missing_bytes:
                yield self._complete()

    def end(self) -> None:
        """Raise `BrokenFrame` if the stream ended within a frame."""
        if self._prefix or self._missing_bytes:
            detail = f"the body ends within a frame of {self._length or 'unknown'} bytes"
            raise BrokenFrame(detail, name="length", value=self._length)

    def _take_whole(self, rest: memoryview) -> memoryview | None:
        """Return the frame that `rest` begins with, without a copy; None if it is not whole, or too large."""
        length = read_length(rest) if len(rest) >= PREFIX_BYTES else 0
        return rest[:length] if 0 < length <= min(len(rest), self._largest_bytes) else None

    def _begin(self, rest: memoryview) -> memoryview:
        """Read the start of a frame, as far as it is there; return the bytes behind it."""
        missing = PREFIX_BYTES - len(self._prefix)
        self._prefix += rest[:missing]
        if len(self._prefix) == PREFIX_BYTES:
            self._length = read_length(self._prefix)
            self._missing_bytes = self._length - PREFIX_BYTES
            if self._length <= self._largest_bytes:
                self._frame = GrowingBytes(JOINED_BYTES)
                self._frame.append(self._prefix)
            self._prefix = b""
        return rest[missing:]

    def _complete(self) -> memoryview | int:
        frame, self._frame = self._frame, None
        length, self._length = self._length, 0
        if frame is None:
            return length
        content = frame.collected()
        return content.view() if isinstance(content, SharedBytes) else memoryview(content)
