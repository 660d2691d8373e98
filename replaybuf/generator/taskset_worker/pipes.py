"""Messages between a process and its child: msgpack behind a length (4 bytes, little-endian), over standard streams."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import msgspec

_LENGTH = struct.Struct("<I")


def framed(message: msgspec.Struct) -> bytes:
    """Encode a message behind its length."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def received(stream: BinaryIO, kind: Any) -> Iterator[Any]:
    """Yield the messages of a stream, of type `kind`, until it ends; an incomplete last one is ignored."""
    while len(head := stream.read(_LENGTH.size)) == _LENGTH.size:
        (length,) = _LENGTH.unpack(head)
        body = stream.read(length)
        if len(body) < length:
            return
        yield msgspec.msgpack.decode(body, type=kind)


def claim_pipes() -> tuple[BinaryIO, Callable[[msgspec.Struct], None]]:
    """Return this process's standard input, and a function that sends a message to its standard output.

    Afterwards, prints go to standard error.
    """
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def send(message: msgspec.Struct) -> None:
        answers.write(framed(message))
        answers.flush()

    return requests, send
