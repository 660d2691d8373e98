"""Repetition of calls to a service or engines that are unreachable for a while: pauses, budgets, and a way to stop."""

from __future__ import annotations

import dataclasses
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from replaybuf.errors import ReplaybufError, ServiceUnavailable, UnsupportedServer

logger = logging.getLogger(__name__)

T = TypeVar("T")

LONGEST_PAUSE_S = 2.0
"""Between two tries of `Retries`, which no answer tells when to come back."""


@dataclasses.dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses between retries: `first_s`, then `factor` times the last one, at most `ceiling_s` seconds.

    Each is shortened at random by up to half, so that many clients do not return at once.
    """

    first_s: float = 0.1
    factor: float = 2.0
    ceiling_s: float = 5.0

    def pauses_s(self) -> Iterator[float]:
        """Yield the pauses, in seconds."""
        pause_s = self.first_s
        while True:
            yield pause_s * random.uniform(0.5, 1.0)
            pause_s = min(pause_s * self.factor, self.ceiling_s)


class Patience:
    """Retry budget of one request: `for_s` seconds from now."""

    def __init__(self, for_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends_s = clock() + for_s
        self._pauses_s = Backoff().pauses_s()

    def pause_s(self, error: ReplaybufError, *, elsewhere: bool = False) -> float:
        """Return the pause before the next try. Raises `error` if the budget is used up or a retry cannot help.

        `elsewhere`: the next try goes to a server that has not failed yet, without a pause.
        """
        if isinstance(error, UnsupportedServer):
            raise error
        pause_s = 0.0 if elsewhere else max(next(self._pauses_s), error.retry_after_s or 0.0)
        if self._clock() + pause_s > self._ends_s:
            raise error
        return pause_s


class Stopped(Exception):
    """`stop` was called while a call was repeated."""


class Retries:
    """Repeats calls for at most `timeout_s`; `stop`, from any thread or signal handler, ends the pauses."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._stopping = threading.Event()

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """Let the call in progress end, and raise `Stopped` where it would be repeated."""
        self._stopping.set()

    def call(self, call: Callable[[], T]) -> T:
        """Repeat a call while it raises `ServiceUnavailable`; after `timeout_s` raise that error. Raises `Stopped`."""
        deadline = time.monotonic() + self._timeout_s
        pauses_s = Backoff(ceiling_s=LONGEST_PAUSE_S).pauses_s()
        while True:
            try:
                return call()
            except ServiceUnavailable as error:
                if self._stopping.is_set():
                    raise Stopped from error
                if time.monotonic() > deadline:
                    raise
                logger.warning("retrying: %s", error.detail)
                self._stopping.wait(next(pauses_s))
