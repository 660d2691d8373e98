"""Runs that cannot be read: left aside by name while the others are served, and tried again after growing pauses."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from replaybuf.errors import DataLost, LedgerGap

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
"""A leader's trimming that was met in the middle of reading is over by then."""
LONGEST_PAUSE_S = 60.0
"""To read a run takes seconds of a processor; who mends one does not wait longer than this."""


class UnreadableRuns:
    """What could not be read, and why: `reasons` by the name of the run."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._errors: dict[str, DataLost | LedgerGap] = {}
        self._pauses: dict[str, tuple[float, float]] = {}

    @property
    def reasons(self) -> dict[str, str]:
        """Why each of these runs is not served."""
        return {name: error.detail for name, error in sorted(self._errors.items())}

    def check(self, name: str) -> None:
        """Raise why a run could not be read, until it is time to try again."""
        if name in self._errors and self._clock() < self._pauses[name][0]:
            raise self._errors[name]

    def record_failure(self, name: str, error: DataLost | LedgerGap) -> DataLost | LedgerGap:
        """Take note that a run could not be read; return what its callers are told."""
        pause_s = min(2 * self._pauses[name][1], LONGEST_PAUSE_S) if name in self._pauses else FIRST_PAUSE_S
        told = type(error)(f"run {name} cannot be read: {error.detail}", name="run", value=name)
        if name not in self._errors or self._errors[name].detail != told.detail:
            logger.error("%s; it is tried again, the other runs are served", told.detail)
        self._errors[name], self._pauses[name] = told, (self._clock() + pause_s, pause_s)
        return told

    def record_success(self, name: str) -> None:
        """Take note that a run was read."""
        if self._errors.pop(name, None):
            del self._pauses[name]
            logger.warning("run can be read again run=%s", name)
