"""When the trainer and the producers of a run last called this server."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from replaybuf.errors import counted
from replaybuf.kernel.figures.histograms import MOST_SOURCES
from replaybuf.kernel.state.producers import Producers
from replaybuf.wire.contract import MissingClient, WaitingAnswer, summarize_failure

MOST_NAMED = 10
"""Producers that one answer to wait names."""


class Presence:
    """Last calls of one run's clients since this server opened the run; times are monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # A trainer that attached before this server opened the run counts as seen then, and not as never seen.
        self._trainer_s = clock()
        self._producer_s: float | None = None
        self.producers = Producers(clock())
        self.sources: dict[str, None] = {}
        """Names of the sources of groups that were stored here, in order: the index has only their hashes."""

    def record_source(self, name: str) -> None:
        """Record the source of a stored group."""
        if name not in self.sources and len(self.sources) < MOST_SOURCES:
            self.sources[name] = None

    def record_trainer(self) -> None:
        """Record a call of the attached trainer."""
        self._trainer_s = self._clock()

    def record_producer(self, name: str | None = None) -> None:
        """Record a call of a producer; an append has no name."""
        self._producer_s = self._clock()
        if name is not None:
            self.producers.see(name, self._producer_s)

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
        """Number of producers that called within an hour."""
        return self.producers.count_known(self._clock())

    def name_missing(self, waits: WaitingAnswer, *, attached: bool) -> WaitingAnswer:
        """Add to an answer who is waited for: the trainer, or the producers that are gone; the newest of these.

        And how producers fail, if they are waited for.
        """
        missing, waits = [], self.explain(waits)
        if waits.blocked_on == "trainer" and attached:
            missing = [MissingClient(name="trainer", last_seen_s=round(self.trainer_s, 3))]
        elif waits.blocked_on == "producers":
            now_s, gone = self._clock(), self.producers.list_gone()
            missing = [
                MissingClient(name=producer.name, last_seen_s=round(now_s - producer.seen_s, 3)) for producer in gone
            ]
        return msgspec.structs.replace(waits, missing=missing[-MOST_NAMED:]) if missing else waits

    def explain(self, waits: WaitingAnswer) -> WaitingAnswer:
        """Add to the detail of an answer how producers fail, if they are waited for."""
        failing = self.producers.list_failing() if waits.blocked_on == "producers" else []
        if not failing:
            return waits
        (name, failure), others = failing[-1], len(failing) - 1
        text = f"producer {name} fails, {self._clock() - failure.at_s:.0f} s ago: {summarize_failure(failure.report)}"
        text += f"; {counted(others, 'other producer')} failed too" if others else ""
        return msgspec.structs.replace(waits, detail=f"{waits.detail}; {text}" if waits.detail else text)
