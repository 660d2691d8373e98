"""Window of the newest ended prompts, and the share of them that failed for good.

A prompt ends with a stored group or as failed. The window holds the newest `WINDOW` ended prompts::

    share = failed / ended,  ended = min(WINDOW, groups stored + prompts failed since the last restart of the window)

The rule (`failed_rule`) acts where ended >= `LEAST_ENDED` and share > `tickets.max_failed_share`. Each failure is
recorded with the number of groups stored before it, so the window is the same after a restart. It starts anew when a
run that the rule stopped runs again; else that run would stop at once.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

WINDOW = 200
"""Ended prompts of the window."""
LEAST_ENDED = 20
"""With fewer ended prompts a share says little."""


class FailedShare(NamedTuple):
    """Ended prompts of the window, and how many of them failed."""

    failed: int
    ended: int

    @property
    def share(self) -> float:
        """Failed prompts among the ended ones; 0 before the first."""
        return self.failed / self.ended if self.ended else 0.0

    def exceeds(self, max_share: float) -> bool:
        """Return whether enough prompts have ended, and more than this share of them failed."""
        return self.ended >= LEAST_ENDED and self.share > max_share


@dataclasses.dataclass(slots=True)
class FailedWindow:
    """`after`: groups stored before each of the newest failures, oldest first; `start`: before the window began."""

    start: int = 0
    after: list[int] = dataclasses.field(default_factory=list)

    def add(self, stored: int | None) -> None:
        """Record a failed prompt after so many stored groups; None = the run has no rule for failed prompts."""
        if stored is not None:
            self.after = [*self.after[1 - WINDOW :], stored]

    def forgive(self, stored: int | None) -> None:
        """Take a failure back that was recorded after so many stored groups: its group came late."""
        if stored in self.after:
            self.after.remove(stored)

    def restart(self) -> None:
        """Begin a new window after the newest failure."""
        self.start, self.after = (self.after or [self.start])[-1], []

    def read(self, stored: int) -> FailedShare:
        """Return the share when so many groups are stored."""
        ago = (stored - before + place for place, before in enumerate(reversed(self.after), 1))
        failed = sum(prompts <= WINDOW for prompts in ago)
        return FailedShare(failed, min(WINDOW, stored - self.start + len(self.after)))
