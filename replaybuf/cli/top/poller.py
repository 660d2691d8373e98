"""Asks the service in a thread every few seconds, so that keys and ages go on while it does not answer."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Sequence
from typing import Self

from replaybuf.cli.fetch import fetch, fetch_first
from replaybuf.errors import ReplaybufError
from replaybuf.wire.answer.overview import Flow, Overview
from replaybuf.wire.contract import ProducerList, ProducerStatus


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """What the service answered last: all runs, or with `run` the flow of that run and its producers.

    `at_s`: when, of a clock that does not jump; 0 = never. `error`: why the newest attempt failed; `failing_s`: since.
    """

    run: str = ""
    overview: Overview | None = None
    flow: Flow | None = None
    producers: Sequence[ProducerStatus] = ()
    at_s: float = 0.0
    error: str = ""
    failing_s: float = 0.0


def ask(addresses: Sequence[str], token: str | None, run: str) -> Frame:
    """Ask once. Raises the service's errors, `ServiceUnavailable` without an answer."""
    if not run:
        _, overview = fetch_first(addresses, "/v1/overview", token, Overview)
        return Frame(overview=overview, at_s=time.monotonic())
    address, flow = fetch_first(addresses, f"/v1/runs/{run}/flow", token, Flow)
    try:
        producers = fetch(address, f"/v1/runs/{run}/producers", token, ProducerList).producers
    except ReplaybufError:  # a server that follows does not know them
        producers = []
    return Frame(run, flow=flow, producers=producers, at_s=time.monotonic())


class Poller:
    """Asks for the runs, or for the flow of one run, every `every_s`. `frame` is the newest answer.

    `wake`: a descriptor that can be read after each answer; `clear_wake` empties it.
    """

    def __init__(self, addresses: Sequence[str], token: str | None, run: str, every_s: float) -> None:
        self.frame = Frame(run)
        self.wake, self._waker = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(self._waker, False)
        self._addresses, self._token, self._every_s = addresses, token, every_s
        self._run = run
        self._turn = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="poller", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._turn.set()

    def show(self, run: str) -> None:
        """Ask for another run from now on, "" = for all."""
        if run != self._run:
            self._run = run
            self.frame = Frame(run)
            self._turn.set()

    def clear_wake(self) -> None:
        """Empty the descriptor that woke the reader."""
        try:
            os.read(self.wake, 1024)
        except BlockingIOError:
            return

    def _work(self) -> None:
        while not self._closed:
            run = self._run
            frame = self._ask(run)
            if run == self._run:
                self.frame = frame
                self._notify()
                self._turn.wait(self._every_s)
            self._turn.clear()

    def _ask(self, run: str) -> Frame:
        before = self.frame
        try:
            return ask(self._addresses, self._token, run)
        except ReplaybufError as error:
            since_s = before.failing_s if before.error else time.monotonic()
            return dataclasses.replace(before, error=error.detail, failing_s=since_s)

    def _notify(self) -> None:
        try:
            os.write(self._waker, b"\0")
        except BlockingIOError:
            return  # nobody has read for long; what is in the pipe wakes as well
