"""Groups that fail one after another: when the next one is tried, and when it is time to give up.

Groups in flight together fail together, by one stall of an engine or of a judge. So failures are counted by waves: one
counts only where its group began after the last one that counted. Until a group succeeds::

    0 ──failure──► 1 ──failure──► 2 ──► ... ──► FAULTS_IN_A_ROW: broken
    all slots      one group at a time, after pauses of FIRST_PAUSE_S * 2**(k - 2) from the second on
    ▲                             │
    └──────── a success ──────────┘

What a server did wrong brings the pauses alone, never the end: it is put aside, and waited for as one that is away.
"""

from __future__ import annotations

import logging
import math

from replaybuf.errors import ReplaybufError
from replaybuf.kernel.tickets import is_forgiven

logger = logging.getLogger(__name__)

FAULTS_IN_A_ROW = 64
"""So many groups failing, each begun after the one before had failed, mean that something is broken for good."""
FIRST_PAUSE_S = 0.5
PAUSE_CEILING_S = 10.0
SERVER_FAILED = ("engine_timeout", "engine_error", "engine_lost")
"""Reasons for which a fleet puts servers aside, but not at once."""


class Setbacks:
    """Failures since the last success; the caller has the clock, in seconds. Reasons that are forgiven are none."""

    def __init__(self) -> None:
        self.in_a_row = 0
        self._faults = 0
        self._last_s = -math.inf

    def succeeded(self) -> None:
        """Take in that a group was made."""
        self.in_a_row = self._faults = 0

    def failed(self, reason: str, detail: str, began_s: float, now_s: float) -> None:
        """Take in that a group failed, which began at `began_s`."""
        if is_forgiven(reason) or began_s < self._last_s:
            return
        self._last_s = now_s
        self.in_a_row += 1
        self._faults += not reason.endswith(SERVER_FAILED)  # a stage's too
        if self._pause_s:
            told = "%d groups in a row failed, so one at a time is tried, the next in %g s: %s"
            logger.warning(told, self.in_a_row, self._pause_s, detail)

    def check(self, detail: str) -> None:
        """Raise `ReplaybufError` where too many failed; `detail` of the last one."""
        if self._faults >= FAULTS_IN_A_ROW:
            raise ReplaybufError(f"{FAULTS_IN_A_ROW} groups in a row failed; the last: {detail}", name="faults")

    def rest_s(self, now_s: float) -> float:
        """Return how long to wait before the next group is tried, 0 or less for not at all."""
        return self._last_s + self._pause_s - now_s if self.in_a_row else 0.0

    @property
    def _pause_s(self) -> float:
        return min(FIRST_PAUSE_S * 2.0 ** (self.in_a_row - 2), PAUSE_CEILING_S) if self.in_a_row > 1 else 0.0
