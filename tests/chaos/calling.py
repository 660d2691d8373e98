"""Calls of the public client, with their outcome."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from replaybuf.client.client import Client
from replaybuf.errors import ReplaybufError
from tests.chaos.history import OK, now_s

T = TypeVar("T")

TIMEOUT_S = 1.5
"""Timeout of a call to a stopped server: the client asks the other server soon."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """Outcome of a call: `result`, or None with the slug of the error in `seen["outcome"]`.

    `seen` holds the fields that every event of a call has.
    """

    seen: dict[str, Any]
    result: T | None


def observed(run: str, client: Client, call: Callable[[], T]) -> Outcome[T]:
    """Make a call; return its result, both times, the server and the outcome."""
    sent_s, outcome, result = now_s(), OK, None
    try:
        result = call()
    except ReplaybufError as error:
        outcome = error.slug
    return Outcome(
        {"run": run, "sent_s": sent_s, "at_s": now_s(), "server": client.address, "outcome": outcome}, result
    )
