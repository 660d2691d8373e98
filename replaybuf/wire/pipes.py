"""Numbered messages between a process and its child, over the child's standard streams.

A frame is the length of its body and the number of the request (4 bytes each, little-endian), then the body in
msgpack. An answer has the number of its request; number 0 is the process itself.

A child may run in an interpreter without replaybuf and load this file alone, so it imports only the standard library
and msgspec.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from typing import BinaryIO, TypeVar

import msgspec

_HEAD = struct.Struct("<II")

T = TypeVar("T")


def framed(number: int, message: msgspec.Struct) -> bytes:
    """Encode a message."""
    body = msgspec.msgpack.encode(message)
    return _HEAD.pack(len(body), number) + body


def received(stream: BinaryIO, decoder: msgspec.msgpack.Decoder[T]) -> Iterator[tuple[int, T]]:
    """Yield numbers and messages until the stream ends; an incomplete last one is ignored."""
    while len(head := stream.read(_HEAD.size)) == _HEAD.size:
        length, number = _HEAD.unpack(head)
        body = stream.read(length)
        if len(body) < length:
            return
        yield number, decoder.decode(body)


def claim_pipes() -> tuple[BinaryIO, Callable[[int, msgspec.Struct], None]]:
    """Return this process's standard input, and a function that sends a message to its standard output.

    Afterwards, prints go to standard error.
    """
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def send(number: int, message: msgspec.Struct) -> None:
        answers.write(framed(number, message))
        answers.flush()

    return requests, send
