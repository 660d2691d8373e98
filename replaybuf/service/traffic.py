"""What this server was asked, how it answered, and how long it took over it itself.

A caller may ask to wait for a change (`wait_ms`): that time is the caller's wish, not work, and is not counted.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from replaybuf.kernel.histograms import Histogram

TOOK_US = tuple(round(1e6 * s) for s in (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10))
"""Upper edges of the buckets of the time that calls took, in microseconds."""


class Stopwatch:
    """Runs from the moment it is made, but for what is `waiting`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begun_s = clock()
        self._waited_s = 0.0

    @property
    def seconds(self) -> float:
        """Seconds it has run."""
        return self._clock() - self._begun_s - self._waited_s

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stand still for so long."""
        stopped_s = self._clock()
        try:
            yield
        finally:
            self._waited_s += self._clock() - stopped_s


_of_this_call: ContextVar[Stopwatch] = ContextVar("of_this_call")


def started() -> Stopwatch:
    """Start the stopwatch of this call."""
    watch = Stopwatch()
    _of_this_call.set(watch)
    return watch


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Stop the stopwatch of this call, if there is one, for as long as its caller waits."""
    watch = _of_this_call.get(None)
    with watch.stopped() if watch else contextlib.nullcontext():
        yield


class Traffic:
    """Calls since the process started, by run, or "" for none of ours, and by name.

    `answered` counts them by status too; `took` tells how long each took until its answer began, in microseconds.
    """

    def __init__(self) -> None:
        self.answered: Counter[tuple[str, str, int]] = Counter()
        self.took: dict[tuple[str, str], Histogram] = {}

    def count(self, run: str, call: str, status: int, seconds: float) -> None:
        """Count a call that is answered."""
        self.answered[run, call, status] += 1
        if (run, call) not in self.took:
            self.took[run, call] = Histogram(TOOK_US)
        self.took[run, call].add_one(max(0, round(1e6 * seconds)))
