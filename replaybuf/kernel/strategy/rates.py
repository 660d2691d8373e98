"""Measured rates of groups and trainer steps, for admission. Memory is constant; a restart begins empty."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable
from statistics import fmean
from typing import NamedTuple

MINUTE_S = 60.0
STEPS = 16
"""Acked steps that the trainer's rates cover: not a time, since a step may take a second or an hour."""
GROUPS = 256
"""Groups that the mean time from ticket to stored group covers."""


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredRates:
    """Measured rates; 0 = unknown.

    - `groups_per_s`: groups stored per second, over the last minute
    - `steps_per_s`: acked steps per second, over the last 16 steps
    - `step_s`: seconds of work of the trainer per step, over these steps, without its waits
    - `group_s`: mean seconds from ticket to stored group, over the last 256 groups
    - `waited`: share of the time of these steps in which the trainer waited
    - `too_stale`: groups evicted unused as too stale / groups stored, during these steps
    """

    groups_per_s: float = 0.0
    steps_per_s: float = 0.0
    step_s: float = 0.0
    group_s: float = 0.0
    waited: float = 0.0
    too_stale: float = 0.0


class _Ack(NamedTuple):
    """Totals when a step was acked."""

    at_s: float
    waited_s: float
    stored: int
    too_stale: int


class Rates:
    """Measures from `since_s` on; the caller gives all times, from one clock that does not jump."""

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self._seconds: deque[tuple[int, int]] = deque()
        self._took_s: deque[float] = deque(maxlen=GROUPS)
        self._group_s = 0.0
        self._acks: deque[_Ack] = deque(maxlen=STEPS + 1)

    def record_stored(self, now_s: float, groups: int) -> None:
        """Record that `groups` groups were stored."""
        second = int(now_s)
        if self._seconds and self._seconds[-1][0] >= second:
            last, before = self._seconds.pop()
            self._seconds.append((last, before + groups))
        else:
            self._seconds.append((second, groups))
        self._forget(now_s)

    def record_durations(self, seconds: Iterable[float]) -> None:
        """Record the seconds from ticket to stored group of some groups."""
        self._took_s.extend(max(0.0, each) for each in seconds)
        self._group_s = fmean(self._took_s) if self._took_s else 0.0  # here: `measure` is called more often

    def record_ack(self, now_s: float, *, waited_s: float, stored: int, too_stale: int) -> None:
        """Record an ack, with totals so far: seconds that the trainer waited, groups stored, groups too stale."""
        self._acks.append(_Ack(now_s, waited_s, stored, too_stale))

    def forget_steps(self) -> None:
        """Forget the steps of the last trainer: the time until the next one attaches belongs to no step."""
        self._acks.clear()

    def measure(self, now_s: float) -> MeasuredRates:
        """Return the rates up to now."""
        self._forget(now_s)
        over_s = min(MINUTE_S, max(1.0, now_s - self.since_s))
        groups_per_s = sum(groups for _, groups in self._seconds) / over_s
        if len(self._acks) < 2:
            return MeasuredRates(groups_per_s=groups_per_s, group_s=self._group_s)
        first, last, steps = self._acks[0], self._acks[-1], len(self._acks) - 1
        # A rewind undoes evictions and a clock may be set back, so differences may be negative.
        seconds = max(1e-9, last.at_s - first.at_s)
        waited_s = min(seconds, max(0.0, last.waited_s - first.waited_s))
        stored = max(1, last.stored - first.stored)
        return MeasuredRates(
            groups_per_s=groups_per_s,
            group_s=self._group_s,
            steps_per_s=steps / max(seconds, now_s - first.at_s),
            step_s=(seconds - waited_s) / steps,
            waited=waited_s / seconds,
            too_stale=max(0, last.too_stale - first.too_stale) / stored,
        )

    def _forget(self, now_s: float) -> None:
        while self._seconds and self._seconds[0][0] < now_s - MINUTE_S:
            self._seconds.popleft()
