"""Makes a failing schedule short: the fewest faults, and the shortest time, that still fail."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tests.simulation.plan import Plan
from tests.simulation.schedule import Outcome

MOST_TRIES = 80
AFTER_S = 0.3
"""Time of the fault phase behind its last fault."""


class Shrinker:
    """Leaves out faults while the schedule still fails. `run` simulates a plan; `outcome` is the shortest failure.

    A schedule without one of its faults is the same until that fault, and another one after it.
    """

    def __init__(self, outcome: Outcome, run: Callable[[Plan], Outcome]) -> None:
        self.outcome = outcome
        self._run, self._left = run, MOST_TRIES

    def shrink(self) -> Outcome:
        """Return the shortest failure that was found."""
        size = max(1, len(self.outcome.faults) // 2)
        while self._left and self.outcome.faults:
            if not self._leave_out(size):
                if size == 1:
                    break
                size = max(1, size // 2)
        last_s = max((at_s for at_s, _ in self.outcome.faults.values()), default=0.0)
        self._try(msgspec.structs.replace(self.outcome.plan, faults_s=round(last_s + AFTER_S, 1)))
        return self.outcome

    def _leave_out(self, size: int) -> bool:
        """Leave out `size` faults in turn, the last ones first; return whether one try failed as well."""
        numbers = sorted(self.outcome.faults)
        for end in range(len(numbers), 0, -size):
            kept = numbers[: max(0, end - size)] + numbers[end:]
            if self._try(msgspec.structs.replace(self.outcome.plan, only=tuple(kept))):
                return True
        return False

    def _try(self, plan: Plan) -> bool:
        """Run a plan; keep it if it fails, with the faults that happened in it."""
        if not self._left:
            return False
        self._left -= 1
        outcome = self._run(plan)
        if not outcome.violations:
            return False
        self.outcome = outcome
        return True
