"""Waits of a run: seconds that trainers waited, by reason, and since when the run waits for its present reason."""

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


class WaitSince:
    """Start of the present reason, None = the next batch is ready; times are of one clock that does not jump.

    The reason follows from both streams, from tickets and from time. So it is looked at after each change, and its
    start is a decision over two looks::

        look, the same reason   it goes on
        look, another reason    it began with the newest change since the last look, else now: time alone changed it
        first look              it began with the newest change of the streams, at the latest

    The last rule makes a restart honest: both streams have not changed since, so the reason has held at least that
    long.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.since_s = 0.0
        self._looked_s: float | None = None

    def look(self, reason: str | None, change_age_s: float | None, now_s: float) -> None:
        """Record the reason that holds now; `change_age_s`: age of the newest change, None = there was none."""
        changed_s = now_s if change_age_s is None else now_s - max(0.0, change_age_s)
        if self._looked_s is None:
            self.since_s = changed_s
        elif reason != self.reason:
            self.since_s = changed_s if changed_s >= self._looked_s else now_s
        self.reason, self._looked_s = reason, now_s
