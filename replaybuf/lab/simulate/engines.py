"""Engines that slow down under load: groups that generate, and when each of them will have generated.

With n of the slots generating, all of them work at one speed::

    speed = 1 / (1 - load_share * (1 - n / slots))

in seconds of work per second, so a group that takes `work_s` with all slots busy takes less with few. Each start and
end changes when the others end. So groups are ordered by the work that is done when they end, which nothing changes.
"""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

T = TypeVar("T")


class Engines(Generic[T]):
    """Groups that generate, on `slots` of engines."""

    def __init__(self, slots: int, load_share: float) -> None:
        self._slots = slots
        self._load_share = load_share
        self._generating: list[tuple[float, int, T]] = []
        self._done_s = 0.0
        self._at_s = 0.0
        self._started = 0

    def __len__(self) -> int:
        """Return how many groups generate."""
        return len(self._generating)

    @property
    def _speed(self) -> float:
        return 1 / (1 - self._load_share * (1 - len(self._generating) / self._slots))

    def _advance(self, now_s: float) -> None:
        if self._generating:
            self._done_s += (now_s - self._at_s) * self._speed
        self._at_s = now_s

    def start(self, now_s: float, work_s: float, group: T) -> None:
        """Start a group that takes `work_s` with all slots busy."""
        self._advance(now_s)
        self._started += 1
        heapq.heappush(self._generating, (self._done_s + work_s, self._started, group))

    def next_end_s(self) -> float | None:
        """Return when the next group ends if none starts before; None without groups."""
        if not self._generating:
            return None
        return self._at_s + (self._generating[0][0] - self._done_s) / self._speed

    def finish(self, now_s: float, until_s: float) -> list[tuple[float, T]]:
        """Return the groups that end until `until_s`, at most half a round after now: each with its end, by start."""
        self._advance(now_s)
        speed, ended = self._speed, list[tuple[int, float, T]]()
        while self._generating and self._generating[0][0] <= self._done_s + (until_s - now_s) * speed:
            work_s, number, group = heapq.heappop(self._generating)
            ended.append((number, now_s + (work_s - self._done_s) / speed, group))
        return [(end_s, group) for _, end_s, group in sorted(ended, key=lambda each: each[0])]
