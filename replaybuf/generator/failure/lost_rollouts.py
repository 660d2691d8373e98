"""Rollouts that a group lost to faults: the others are a group if they are enough.

An engine or an environment may fail for some rollouts of a prompt, after all retries. With `min_group_size` of the run
the rest is stored, and the group records what it lost. Faults that concern the whole group (an abort, tokens that are
too old, an unfit engine) end it as before.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from replaybuf.errors import EngineFault, EngineUnfit, RewardFault, counted, first_error
from replaybuf.kernel.state.return_reasons import is_failure

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOST_ROLLOUTS = "lost_rollouts"
"""Key in the metadata of a partial group: number of lost rollouts by reason."""


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
