"""Shapes that several threads may decode."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_preparing = threading.Lock()
_prepared: set[Any] = set()


def prepared(shape: type[T]) -> type[T]:
    """Return the shape, of which msgspec has built its data.

    msgspec 0.22 builds it when a shape is first decoded or converted to, and crashes if two threads do that at once.
    """
    if shape not in _prepared:
        with _preparing:
            msgspec.json.Decoder(shape)
            _prepared.add(shape)
    return shape
