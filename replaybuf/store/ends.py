"""How far the streams of each run are known to reach: a Redis that holds less has lost acknowledged data."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Ends:
    """Where the streams of a run end: number of the newest ledger entry and of the newest group; 0 = none.

    `payload_key`: key of that group's payload, "" if unknown. It is random, so it identifies the history: an older
    Redis on which others went on has another group under the same number.
    """

    entry: int
    group: int
    payload_key: str = ""


NO_ENDS = Ends(0, 0)


class KnownEnds:
    """The furthest ends by run that this process has seen confirmed. They never move back, except by `forget`."""

    def __init__(self) -> None:
        self._ends: dict[str, Ends] = {}

    def of(self, run: str) -> Ends:
        """Return how far the streams of a run are known to reach."""
        return self._ends.get(run, NO_ENDS)

    def advance(self, run: str, ends: Ends) -> None:
        """Record that both streams reach at least these ends."""
        known = self.of(run)
        newest = ends if (ends.group, ends.payload_key) > (known.group, known.payload_key) else known
        self._ends[run] = Ends(max(known.entry, ends.entry), newest.group, newest.payload_key)

    def forget(self, run: str) -> None:
        """Forget a run that was deleted, or that continues from what a relaxed Redis has kept."""
        self._ends.pop(run, None)
