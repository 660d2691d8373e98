"""Calls of the public client, with their outcome; options of the loads beside the producers and trainers."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
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
    sent_s, outcome, detail, result = now_s(), OK, "", None
    try:
        result = call()
    except ReplaybufError as error:
        outcome, detail = error.slug, error.detail
    seen = {"run": run, "sent_s": sent_s, "at_s": now_s(), "server": client.address, "outcome": outcome}
    return Outcome(seen | {"detail": detail}, result)


def load_options() -> argparse.Namespace:
    """Read the options that `Cluster.start_load` gives."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True, help="servers, with commas between")
    parser.add_argument("--name", required=True)
    parser.add_argument("--history", required=True, type=Path)
    parser.add_argument("--run", default="")
    parser.add_argument("--attack", default="")
    return parser.parse_args()
