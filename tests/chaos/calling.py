"""Calls of the public client, with what becomes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from replaybuf.client.client import Client
from replaybuf.errors import ReplaybufError
from tests.chaos.history import OK, now_s

T = TypeVar("T")

TIMEOUT_S = 1.5
"""Bounds a call to a server that stands still, so that the other one is asked soon."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """What a call came to: `result`, or None with the slug of the error in `seen["outcome"]`.

    `seen` are the fields that every event of a call has.
    """

    seen: dict[str, Any]
    result: T | None


def observed(run: str, client: Client, call: Callable[[], T]) -> Outcome[T]:
    """Make a call and tell when it was sent and answered, by whom, and how."""
    sent_s, outcome, result = now_s(), OK, None
    try:
        result = call()
    except ReplaybufError as error:
        outcome = error.slug
    return Outcome(
        {"run": run, "sent_s": sent_s, "at_s": now_s(), "server": client.address, "outcome": outcome}, result
    )
