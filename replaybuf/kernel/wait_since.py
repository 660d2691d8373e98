"""Since when a run waits for its present reason.

The reason follows from both streams, from tickets and from time. So it is looked at after each change, and its start is
a decision over two looks::

    look, the same reason   it goes on
    look, another reason    it began with the newest change since the last look, else now: time alone changed it
    first look              it began with the newest change of the streams, at the latest

The last rule makes a restart honest: both streams have not changed since, so the reason has held at least that long.
"""

from __future__ import annotations


class WaitSince:
    """Start of the present reason, None = the next batch is ready; times are of one clock that does not jump."""

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
