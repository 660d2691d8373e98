"""Was this machine held up? Tests look at clocks; a host that takes its processors away makes any of them late.

A test that failed while it was held up is run again (tests/conftest.py); one that failed on a steady machine is not.
"""

from __future__ import annotations

import threading
from pathlib import Path
from time import monotonic
from typing import NamedTuple

HELD_UP_S = 0.5
"""So much late is a thread that sleeps, on a machine that stood still."""
STOLEN_SHARE = 0.1
"""Of the time of its processors, given to other machines by the host."""
_PERIOD_S = 0.05
_STAT = Path("/proc/stat")
_STOLEN = 7
"""Where `cpu` of /proc/stat has the time that the host gave to others."""


class Ticks(NamedTuple):
    """Time of all processors since the start: stolen by the host, and all of it."""

    stolen: int
    all_of_it: int

    @classmethod
    def read(cls) -> Ticks:
        """Read them; none where the system does not tell."""
        if not _STAT.exists():
            return cls(0, 0)
        return cls.of(_STAT.read_text())

    @classmethod
    def of(cls, stat: str) -> Ticks:
        """Take them from the text of /proc/stat."""
        ticks = [int(word) for word in stat.split("\n", 1)[0].split()[1 : _STOLEN + 2]]
        return cls(ticks[_STOLEN], sum(ticks))


class Steadiness:
    """Watches this machine from `begin` on, by a clock of its own: a test may replace those of `time`."""

    def __init__(self) -> None:
        self.latest_s = 0.0
        self._before = Ticks(0, 0)
        self._never = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="steadiness", daemon=True)

    def begin(self) -> None:
        """Forget what was before."""
        if self._thread.ident is None:
            self._thread.start()
        self.latest_s = 0.0
        self._before = Ticks.read()

    def disturbed(self) -> bool:
        """Say whether the machine stood still since then, or its processors were elsewhere."""
        return was_disturbed(self.latest_s, self._before, Ticks.read())

    def _watch(self) -> None:
        while True:
            began_s = monotonic()
            self._never.wait(_PERIOD_S)
            self.latest_s = max(self.latest_s, monotonic() - began_s - _PERIOD_S)


def was_disturbed(latest_s: float, before: Ticks, after: Ticks) -> bool:
    """Judge by how late a sleeper was, and by the share of stolen time."""
    return latest_s > HELD_UP_S or after.stolen - before.stolen > STOLEN_SHARE * (after.all_of_it - before.all_of_it)
