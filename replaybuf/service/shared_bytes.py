"""Bytes in a file in memory: they grow without a copy, and another process can read them."""

from __future__ import annotations

import mmap
import os
import tempfile

MESSAGE_BYTES = 1 << 16
"""Longest message to or from a process beside the service; what is longer goes through a file."""


class SharedBytes:
    """A file in memory, or a temporary file where the system has none in memory. Views outlive this object."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = _new_file() if fd is None else fd

    def __del__(self) -> None:
        os.close(self.fd)

    def append(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self.fd, rest) :]

    def view(self) -> memoryview:
        """Return all bytes, read-only. They must not change any more."""
        size = os.fstat(self.fd).st_size
        return memoryview(mmap.mmap(self.fd, size, prot=mmap.PROT_READ)) if size else memoryview(b"")


def _new_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("replaybuf")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
