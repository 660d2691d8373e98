"""When the trainer and the producers of a run last called this server."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

KNOWN_S = 3600.0
MOST_KNOWN = 1000


class Presence:
    """Last calls of one run's clients since this server opened the run; times are monotonic.

    The names of producers are kept for `KNOWN_S` after their last request for tickets, at most the newest `MOST_KNOWN`.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # A trainer that attached before this server opened the run counts as seen then, and not as never seen.
        self._trainer_s = clock()
        self._producer_s: float | None = None
        self._names: OrderedDict[str, float] = OrderedDict()

    def record_trainer(self) -> None:
        """Record a call of the attached trainer."""
        self._trainer_s = self._clock()

    def record_producer(self, name: str | None = None) -> None:
        """Record a call of a producer; an append has no name."""
        self._producer_s = self._clock()
        if name is not None:
            self._names[name] = self._producer_s
            self._names.move_to_end(name)
            if len(self._names) > MOST_KNOWN:
                self._names.popitem(last=False)

    @property
    def trainer_s(self) -> float:
        """Seconds since the trainer's last call."""
        return self._clock() - self._trainer_s

    @property
    def producers_s(self) -> float | None:
        """Seconds since the last call of any producer; None = no call yet."""
        return None if self._producer_s is None else self._clock() - self._producer_s

    @property
    def producers_known(self) -> int:
        """Number of producers that asked for tickets within `KNOWN_S`."""
        oldest_s = self._clock() - KNOWN_S
        while self._names and next(iter(self._names.values())) < oldest_s:
            self._names.popitem(last=False)
        return len(self._names)
