"""Prompt functions of a user, named by MODULE:FUNCTION in tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any


def finite(count: int = 3) -> Iterator[dict[str, Any]]:
    """Yield some rows."""
    return ({"prompt": "abc"[: number + 1], "level": number} for number in range(count))


def endless() -> Iterator[dict[str, Any]]:
    """Yield different rows without end."""
    return ({"prompt": f"{chr(97 + number % 26)}>", "prompt_id": f"e{number}"} for number in itertools.count())


class _Numbered:
    def __getitem__(self, number: int) -> dict[str, Any]:
        if number == 20:
            raise KeyError("no twentieth")
        return {"prompt": "" if number == 21 else "abc", "prompt_id": f"n{number}"}


def numbered() -> _Numbered:
    """Return rows by number; some are missing, some are wrong."""
    return _Numbered()


def nothing() -> None:
    """Return something that is not iterable."""


def broken() -> Iterator[dict[str, Any]]:
    """Raise."""
    raise RuntimeError("the network is away")


def breaking() -> Iterator[dict[str, Any]]:
    """Yield a row, then raise."""
    yield {"prompt": "abc"}
    raise RuntimeError("the connection was reset")


def unwritable() -> Iterator[dict[str, Any]]:
    """Yield a row with metadata that a group cannot hold."""
    yield {"prompt": "abc", "source": object()}
