"""Preparation of decoders for threads: msgspec builds its data about a type when it is first decoded."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_preparing = threading.Lock()
_prepared: set[Any] = set()


def prepared(shape: type[T]) -> type[T]:
    """Return a shape after msgspec has built its data about it, in one thread at a time.

    msgspec 0.22 builds the data when a shape is first decoded, and crashes if two threads do that at once.
    """
    if shape not in _prepared:
        with _preparing:
            msgspec.json.Decoder(shape)
            _prepared.add(shape)
    return shape
