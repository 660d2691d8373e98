"""Failures of groups in a row: pauses before the next try, and the point of giving up.

Groups in flight together fail together, for example when an engine stalls. So failures count by waves: a failure counts
only where its group started after the last counted failure. Until a group succeeds::

    0 ──failure──► 1 ──failure──► 2 ──► ... ──► FAULTS_IN_A_ROW: give up
    all slots      one group at a time; from the second failure on after pauses of FIRST_PAUSE_S * 2**(k - 2)
    ▲                             │
    └──────── a success ──────────┘

A server's failures cause pauses but never the end: the fleet suspends that server and waits for it.

`report_failure` sends the failure that ends a process before, or without, heartbeats of its own.

A group may lose rollouts: an engine or an environment fails for some of a prompt, after all retries. With
`min_group_size` of the run the rest is stored, and the group records what it lost. Faults that concern the whole group
(an abort, tokens that are too old, an unfit engine) end it as before.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from replaybuf.client.client import AsyncClient
from replaybuf.client.producers.failures import describe_failure
from replaybuf.errors import EngineFault, EngineUnfit, ReplaybufError, RewardFault, counted, first_error
from replaybuf.kernel.state.return_reasons import is_failure, is_forgiven

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOST_ROLLOUTS = "lost_rollouts"
"""Key in the metadata of a partial group: number of lost rollouts by reason."""
FAULTS_IN_A_ROW = 64
"""After as many counted failures, something is broken that waiting does not repair."""
FIRST_PAUSE_S = 0.5
PAUSE_CEILING_S = 10.0
SERVER_FAILED = ("engine_timeout", "engine_error", "engine_lost")
"""Failures of a server that the fleet does not suspend at the first one."""
LAST_S = 1.5
"""Time limit of the last heartbeat of a process that ends with a failure."""
PRODUCER_FAULT = "producer_fault"
"""Reason of a failure that ends the process."""


class Failures:
    """Counts failures since the last success; the caller passes the time, in seconds. Forgiven reasons do not count."""

    def __init__(self) -> None:
        self.in_a_row = 0
        self._faults = 0
        self._last_s = -math.inf

    def record_success(self) -> None:
        """Record a finished group."""
        self.in_a_row = self._faults = 0

    def record_failure(self, reason: str, detail: str, started_s: float, now_s: float) -> None:
        """Record a failed group that started at `started_s`."""
        if is_forgiven(reason) or started_s < self._last_s:
            return
        self._last_s = now_s
        self.in_a_row += 1
        self._faults += not reason.endswith(SERVER_FAILED)  # `ref_engine_timeout` of a stage counts as well
        if self._pause_s:
            message = "%s in a row failed; trying one at a time, the next in %g s: %s"
            logger.warning(message, counted(self.in_a_row, "group"), self._pause_s, detail)

    def check(self, detail: str) -> None:
        """Raise `ReplaybufError` with the last failure's `detail` after too many failures."""
        if self._faults >= FAULTS_IN_A_ROW:
            raise ReplaybufError(f"{FAULTS_IN_A_ROW} groups in a row failed; the last: {detail}", name="faults")

    def rest_s(self, now_s: float) -> float:
        """Return the time until the next try; 0 or less means now."""
        return self._last_s + self._pause_s - now_s if self.in_a_row else 0.0

    @property
    def _pause_s(self) -> float:
        return min(FIRST_PAUSE_S * 2.0 ** (self.in_a_row - 2), PAUSE_CEILING_S) if self.in_a_row > 1 else 0.0


async def report_failure(url: str, run: str, token: str | None, producer: str, error: Exception) -> None:
    """Send the traceback of `error` to the service, within `LAST_S`; log it if the service does not take it."""
    failure = describe_failure(PRODUCER_FAULT, first_error(error))
    try:
        async with asyncio.timeout(LAST_S), AsyncClient(url, run, token=token) as client:
            await client.send_heartbeat(producer, failure=failure)
    except (ReplaybufError, TimeoutError) as fault:
        why = str(fault) or f"no answer within {LAST_S:g} s"
        logger.warning("the service did not take the traceback of %s: %s", producer, why)


class Losses:
    """Rollouts that one group, or a part of it, lost, by reason; invariant: their sum is at most `allowed`."""

    def __init__(self, allowed: int = 0) -> None:
        self.by_reason: Counter[str] = Counter()
        self._left = allowed
        self._last: EngineFault | RewardFault | None = None

    @property
    def metadata(self) -> dict[str, Any]:
        """Return what to record in the group's metadata; nothing if it is whole."""
        return {LOST_ROLLOUTS: dict(sorted(self.by_reason.items()))} if self.by_reason else {}

    def record(self, fault: EngineFault | RewardFault, rollouts: int) -> None:
        """Count rollouts as lost. Raises the fault if the group may not lose them."""
        if rollouts > self._left or isinstance(fault, EngineUnfit) or not is_failure(fault.reason):
            raise fault
        self._left -= rollouts
        self._last = fault
        self.by_reason[fault.reason] += rollouts

    async def gather_rest(self, works: Sequence[Callable[[], Awaitable[T]]], sizes: Sequence[int]) -> list[T]:
        """Do works side by side, each for `sizes[i]` rollouts; return the results of those that are not lost.

        Raises a fault if the group may not lose them, or if nothing is left; then none of them is counted, because the
        caller loses all rollouts. The other works are cancelled at once.
        """
        part = Losses(self._left)
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(part._keep(*work)) for work in zip(works, sizes, strict=True)]
        except BaseExceptionGroup as group:
            error = first_error(group)
            raise error from error.__cause__  # its traceback is shown to people
        results = [result for task in running for result in task.result()]
        if part._last is not None:
            self._add(part, part._last, nothing_left=not results)
        return results

    async def _keep(self, work: Callable[[], Awaitable[T]], rollouts: int) -> list[T]:
        try:
            return [await work()]
        except (EngineFault, RewardFault) as fault:
            self.record(fault, rollouts)
            logger.warning("lost %s of a group: %s: %s", counted(rollouts, "rollout"), fault.reason, fault.detail)
            return []

    def _add(self, part: Losses, fault: EngineFault | RewardFault, *, nothing_left: bool) -> None:
        lost = part.by_reason.total()
        if nothing_left or lost > self._left:  # another part has lost some meanwhile
            raise fault
        self._left -= lost
        self._last = fault
        self.by_reason += part.by_reason
