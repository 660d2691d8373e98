"""Which runs periodic work looks at: the busy ones each time, the quiet ones in turn, so that these cost little."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

from replaybuf.service.run.served_run import Run

TICK_ROUNDS, WATCH_ROUNDS = 40, 8
"""A quiet run is ticked every 10 s, and its ends are checked every 8 s, or at once when another Redis answers."""


class BusyRuns:
    """Runs that are not quiet. Each change adds its run; others are found when their turn comes in a `Rotation`."""

    def __init__(self) -> None:
        self._runs: dict[Run, None] = {}

    def watch(self, run: Run) -> None:
        """Add a run, now and at each of its changes."""
        self.add(run)
        run.journal.listeners.append(functools.partial(self.add, run))

    def add(self, run: Run) -> None:
        """Add a run until it is quiet."""
        self._runs[run] = None

    def __iter__(self) -> Iterator[Run]:
        return iter([*self._runs])

    def list(self) -> list[Run]:
        """List the runs that are busy still."""
        for run in [run for run in self._runs if run.journal.closed or run.quiet()]:
            del self._runs[run]
        return [*self._runs]


class Rotation:
    """Looks at every quiet run once in `rounds` rounds."""

    def __init__(self, busy: BusyRuns, rounds: int) -> None:
        self._busy = busy
        self._rounds = rounds
        self._round = 0

    def next(self, runs: Mapping[str, Run]) -> list[Run]:
        """Return the runs of the next round."""
        self._round = (self._round + 1) % self._rounds
        quiet: list[Run] = []
        for run in [*runs.values()][self._round :: self._rounds]:
            if run.quiet():
                quiet.append(run)
            else:
                self._busy.add(run)
        return quiet + self._busy.list()
