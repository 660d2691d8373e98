"""Time of a training loop by phase, to see what a step spends its time on."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

Phase: TypeAlias = Literal[
    "wait", "forward", "backward", "optimizer", "ack", "weights", "publish", "evaluate", "checkpoint"
]


class Stopwatch:
    """Seconds per phase; exactly one phase runs at any time, so the phases add up to the whole time."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: defaultdict[Phase, float] = defaultdict(float)
        self._phase: Phase = "wait"
        self._since = clock()

    def enter(self, phase: Phase) -> None:
        """End the running phase and begin another."""
        now = self._clock()
        self._seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    @property
    def phase(self) -> Phase:
        """The running phase."""
        return self._phase

    def take(self) -> dict[Phase, float]:
        """Return the seconds of each phase since the last call; the running phase goes on from 0."""
        self.enter(self._phase)
        taken = dict(self._seconds)
        self._seconds.clear()
        return taken


def shares(seconds: Mapping[Any, float]) -> str:
    """Format the share of each phase, the largest first, without shares below 1 %: "backward 61 %, wait 30 %"."""
    total = sum(seconds.values()) or 1.0
    percent = {phase: round(100 * taken / total) for phase, taken in seconds.items()}
    order = sorted(percent.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{phase} {share} %" for phase, share in order if share)
