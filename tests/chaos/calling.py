"""Calls of the public client, with their outcome; options, threads and end of the processes of the load."""

from __future__ import annotations

import argparse
import dataclasses
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from replaybuf.client.client import Client
from replaybuf.errors import ReplaybufError
from tests.chaos.history import OK, now_s
from tests.waiting import eventually

T = TypeVar("T")

TIMEOUT_S = 1.5
"""Timeout of a call to a stopped server: the client asks the other server soon."""

WAKE_S = 0.5
"""Longest time until a signal is noticed."""


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


def answered(within_s: float, call: Callable[[], T]) -> T:
    """Repeat a call until it is answered, and return its answer."""

    def answer() -> tuple[T, ...]:
        try:
            return (call(),)
        except ReplaybufError as error:
            print(f"{error.slug}: {error.detail}", flush=True)
            return ()

    return eventually(answer, within_s)[0]


def load_options() -> argparse.Namespace:
    """Read the options that `Cluster.start_load` gives."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True, help="servers, with commas between")
    parser.add_argument("--name", required=True)
    parser.add_argument("--history", required=True, type=Path)
    parser.add_argument("--run", default="")
    parser.add_argument("--attack", default="")
    parser.add_argument("--redis-url", default="")
    parser.add_argument("--folder", type=Path)
    return parser.parse_args()


def stop_event() -> threading.Event:
    """Return an event that SIGTERM and SIGINT set."""
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    return stopping


def run_threads(threads: Sequence[threading.Thread]) -> None:
    """Start all threads, and wait for their ends.

    In short waits: the kernel may give a signal to another thread, and only the main one runs handlers, once it wakes.
    """
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(WAKE_S)
