"""Groups that no batch may use any more, found and written down: what came too late, does not fit, or is filtered."""

from __future__ import annotations

import contextlib

from replaybuf.errors import StrategyFault
from replaybuf.kernel.index import Numbers
from replaybuf.kernel.selection import Selector
from replaybuf.service.run.journal import Journal
from replaybuf.wire.ledger import DeadLetterRecord, EvictRecord


class Eviction:
    """Evictions of a run: groups are judged when they arrive, and all of them when what they are judged by changes."""

    def __init__(self, journal: Journal, selector: Selector) -> None:
        self._journal = journal
        self._selector = selector

    async def of_arrivals(self, numbers: Numbers) -> None:
        """Evict what arrived too late, too large, or is filtered; the common case, nothing to evict, takes no lock."""
        if self._journal.state.state != "running":
            return  # they are judged when it runs again; a plug-in that failed is not asked on
        try:
            due = bool(self._selector.evictable(numbers) or self._selector.unfit(numbers))
        except StrategyFault:
            due = True  # asked again within a decision, which pauses the run with it
        if due:
            with contextlib.suppress(StrategyFault):
                async with self._journal.decision():
                    await self.judge(numbers)

    async def of_unsettled(self) -> None:
        """Judge arrivals that are folded and not settled yet, before a batch may take them. Within a decision."""
        for chunk in tuple(self._journal.unsettled):
            await self.judge(chunk.numbers)

    async def judge_inherited(self) -> None:
        """Judge every live group that an older leader may not have judged. While taking over."""
        if self._journal.state.state == "running":
            try:
                await self.judge(filtered=True)
            except StrategyFault as fault:
                await self._journal.pause(fault)

    async def judge_all(self) -> None:
        """Judge every live group anew, by strategy and filters. A plug-in that fails pauses the run."""
        if self._journal.state.state == "running":
            with contextlib.suppress(StrategyFault):  # the decision has paused the run with it
                async with self._journal.decision():
                    await self.judge(filtered=True)

    async def judge(self, only: Numbers | None = None, *, filtered: bool = False) -> None:
        """Record which live groups no batch from the next step on, or none at all, may use. Within a decision.

        `filtered`: the filters are asked about all of them, not only about arrivals.
        """
        journal = self._journal
        unfit = self._selector.unfit(only)
        if unfit:
            await journal.append(DeadLetterRecord(numbers=unfit, at_s=journal.clock()))
        by_reason = self._selector.evictable(only, filtered=filtered)
        if by_reason:
            await self.record(by_reason)

    async def record(self, by_reason: dict[str, list[int]]) -> None:
        """Write down that no batch from the next step on uses these groups. Within a decision."""
        journal = self._journal
        await journal.append(EvictRecord(step=journal.state.next_step, numbers=by_reason, at_s=journal.clock()))
