"""When to ask Redis for the lease of one run again.

A leader renews three times per lease. A follower asks as often, and at the moment the leader's lease ends. Renewals due
within `TOGETHER_S` share one request, so a server of many runs asks a few times a second, not once per run.
Times are monotonic: a process that was stopped finds its lease ended when it continues.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LEASE_S = 3.0
RENEWAL_S = LEASE_S / 3
TOGETHER_S = RENEWAL_S / 2
MARGIN_S = 0.02
"""Redis has dropped another server's lease so long after its end by our clock."""
EXPECTING_S = 0.25
"""A server that is to get a lease asks so often."""
LEFT_S = 0.5
"""For so long a free lease is left to the server that should lead the run; then anybody takes it."""


class LeaseTimer:
    """End of the current lease, ours or another server's, and the next time to ask. Hold `asking` while asking.

    `holder`: who has the lease, or had it last; "" = not known. `asks_at_s`: when to ask next. `may_ask_at_s`: when
    a renewal may share the request of another one.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.asking = asyncio.Lock()
        self.now_s = clock
        self.holder = ""
        self._free_since_s: float | None = None
        self._ends_s = -float("inf")
        self._renew_at_s = -float("inf")
        self.asks_at_s = self.may_ask_at_s = -float("inf")

    def extend(self, left_s: float, asked_s: float | None = None, ask_in_s: float = RENEWAL_S) -> None:
        """Record an answer of Redis: the lease lasts `left_s` from `asked_s` (default now)."""
        now_s = self.now_s() if asked_s is None else asked_s
        self._ends_s = now_s + left_s
        self._renew_at_s = now_s + ask_in_s
        ended_at_s = self._ends_s + MARGIN_S
        self.asks_at_s = min(self._renew_at_s, ended_at_s)
        self.may_ask_at_s = min(self._renew_at_s - TOGETHER_S, ended_at_s)
        self._free_since_s = None

    def leave(self, asked_s: float) -> bool:
        """Leave a free lease to another server, and ask again later; False after `LEFT_S`."""
        since_s = self._free_since_s if self._free_since_s is not None else asked_s
        if asked_s >= since_s + LEFT_S:
            return False
        self.extend(since_s + LEFT_S - asked_s, asked_s)
        self._free_since_s = since_s
        return True

    def ended(self) -> bool:
        """Return whether the lease has ended by our clock."""
        return self.now_s() >= self._ends_s

    def due(self, early_s: float = 0.0) -> bool:
        """Return whether to ask now. `early_s` allows an early renewal, never an early request for an ended lease."""
        return self.now_s() >= min(self._renew_at_s - early_s, self._ends_s + MARGIN_S)

    def due_in_s(self) -> float:
        """Return the seconds until the next request."""
        return self.asks_at_s - self.now_s()
