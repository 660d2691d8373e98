"""The lease of one run as this server knows it: whose turn it is to ask again, and when.

A leader renews three times in a lease; a follower asks as often, and the moment the leader's lease ends. Renewals that
are due within `TOGETHER_S` are asked for together: a server of many runs asks a few times a second, not once per run.
Times are monotonic, so a process that was stopped finds its lease ended when it goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

LEASE_S = 3.0
RENEWAL_S = LEASE_S / 3
TOGETHER_S = RENEWAL_S / 4
MARGIN_S = 0.02
"""After the end of another's lease, by our clock, Redis has let it go."""


class Lease:
    """When the known lease ends, ours or another's, and when to ask for it again. `seeking` is held while asking."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.seeking = asyncio.Lock()
        self.now_s = clock
        self._ends_s = -float("inf")
        self._renew_at_s = -float("inf")

    def until(self, left_s: float, asked_s: float | None = None) -> None:
        """Take note of an answer: the lease lasts `left_s` from the moment it was asked for."""
        now_s = self.now_s() if asked_s is None else asked_s
        self._ends_s = now_s + left_s
        self._renew_at_s = now_s + RENEWAL_S

    def ended(self) -> bool:
        """Say whether the lease has ended by our clock."""
        return self.now_s() >= self._ends_s

    def due(self, early_s: float = 0.0) -> bool:
        """Say whether it is time to ask; `early_s` before it for a renewal, never before the end of a lease."""
        now_s = self.now_s()
        return now_s >= min(self._renew_at_s - early_s, self._ends_s + MARGIN_S)

    def due_in_s(self) -> float:
        """Return the time until the next asking."""
        return min(self._renew_at_s, self._ends_s + MARGIN_S) - self.now_s()
