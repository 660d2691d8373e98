"""Count calls, connections and bodies, and measure how long the service works on each call.

Time that a call waits for a change on the caller's request (`wait_ms`) is not counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar

from replaybuf.kernel.figures.histograms import Histogram

TOOK_US = tuple(round(1e6 * s) for s in (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10))
"""Upper edges of the duration buckets, in microseconds."""

REFUSALS = (
    "head_too_large",
    "head_timeout",
    "body_timeout",
    "malformed",
    "pipelined",
    "too_many_connections",
    "too_many_half_heads",
    "no_body_room",
    "foreign_host",
    "foreign_page",
)
"""Reasons to refuse a request or a connection before any call."""


class Stopwatch:
    """Measures time since its creation, except what is excluded."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begun_s = clock()
        self._excluded_s = 0.0

    @property
    def seconds(self) -> float:
        """Measured seconds."""
        return self._clock() - self._begun_s - self._excluded_s

    def exclude(self, seconds: float) -> None:
        """Do not count these seconds."""
        self._excluded_s += seconds


_of_this_call: ContextVar[Stopwatch] = ContextVar("of_this_call")


def started() -> Stopwatch:
    """Start the stopwatch of this call."""
    watch = Stopwatch()
    _of_this_call.set(watch)
    return watch


def exclude_wait(seconds: float) -> None:
    """Do not count the seconds for which this call waited, if it is measured."""
    watch = _of_this_call.get(None)
    if watch:
        watch.exclude(seconds)


class Traffic:
    """Calls since the process started, by run ("" = unknown run) and name of the call.

    `answered`: count by status; `took`: histogram of the time until the answer began, in microseconds.
    `refused`: requests and connections that were refused before any call, by reason. `body_bytes`: bytes of request
    bodies in memory, without small ones. `connections`: open connections.
    """

    def __init__(self) -> None:
        self.answered: Counter[tuple[str, str, int]] = Counter()
        self.took: dict[tuple[str, str], Histogram] = {}
        self.refused: Counter[str] = Counter()
        self.body_bytes = 0
        self.connections = 0

    def count(self, run: str, call: str, status: int, seconds: float) -> None:
        """Count an answered call."""
        self.answered[run, call, status] += 1
        if (run, call) not in self.took:
            self.took[run, call] = Histogram(TOOK_US)
        self.took[run, call].add_one(max(0, round(1e6 * seconds)))

    def forget(self, run: str) -> None:
        """Drop the counts of a deleted run."""
        self.answered = Counter({key: count for key, count in self.answered.items() if key[0] != run})
        self.took = {key: histogram for key, histogram in self.took.items() if key[0] != run}
