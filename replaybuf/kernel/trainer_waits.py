"""Seconds that trainers waited for batches, by reason of the answers that they got."""

from __future__ import annotations

from collections import defaultdict

LONGEST_GAP_S = 60.0
"""Longest time between two answers that counts: a trainer that asks later was busy or gone."""
_LEAST_S = 0.001


class TrainerWaits:
    """Counts the time from each answer to wait to the next answer; the caller passes a time that does not jump.

    `total_s`: since this server opened the run; `of_step_s`: since `end_step`.
    """

    def __init__(self) -> None:
        self.total_s: defaultdict[str, float] = defaultdict(float)
        self._before_s: dict[str, float] = {}
        self._last: tuple[str, float] | None = None

    def answer(self, reason: str | None, now_s: float) -> None:
        """Record that a trainer was answered: to wait for this reason, or None = it got its batch."""
        if self._last:
            last_reason, since_s = self._last
            self.total_s[last_reason] += max(0.0, min(now_s - since_s, LONGEST_GAP_S))
        self._last = (reason, now_s) if reason else None

    def forget_last(self) -> None:
        """Forget the last answer: another trainer asks from now on."""
        self._last = None

    def of_step_s(self) -> dict[str, float]:
        """Return the seconds since the step before ended, by reason."""
        spent = {reason: total - self._before_s.get(reason, 0.0) for reason, total in self.total_s.items()}
        return {reason: round(seconds, 3) for reason, seconds in sorted(spent.items()) if seconds >= _LEAST_S}

    def end_step(self) -> None:
        """Begin the next step."""
        self._before_s = dict(self.total_s)
