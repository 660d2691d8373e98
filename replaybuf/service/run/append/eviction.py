"""Evict groups that no batch may use: too old, too large, or dropped by a filter."""

from __future__ import annotations

import contextlib

from replaybuf.errors import StrategyFault
from replaybuf.kernel.decide.eviction import decide_removals, keeps_all
from replaybuf.kernel.rows.index import Numbers
from replaybuf.kernel.state.tickets import TicketBook
from replaybuf.kernel.strategy.selection import Selector
from replaybuf.service.run.journal import Journal
from replaybuf.service.turns import in_turns
from replaybuf.store import IndexChunk
from replaybuf.wire.config import RunConfig


class Eviction:
    """Checks groups when they arrive, and all live groups when the rules or the history change.

    The prompts of some groups are then due again in the `book`.
    """

    def __init__(self, journal: Journal, selector: Selector, book: TicketBook) -> None:
        self._book = book
        self._journal = journal
        self._selector = selector
        self._checked: tuple[int, int] | None = None
        """Generation and step for which all live groups were checked last."""
        self._config: RunConfig | None = None
        """Rules by which they were checked, filters included."""

    def keeps(self, chunk: IndexChunk) -> bool:
        """Return whether the declared bounds alone keep all of these new groups."""
        state = self._journal.state
        if state.phase != "running":
            return True  # they are checked when the run resumes; a failed plug-in is not called before
        try:
            return keeps_all(state, self._selector, chunk.values)
        except StrategyFault:
            return False

    async def of_arrivals(self, chunk: IndexChunk) -> None:
        """Evict unusable groups of these; the common case, nothing to evict, takes no lock."""
        if self.keeps(chunk):
            return
        state, numbers = self._journal.state, chunk.numbers
        try:
            due = any(decide_removals(state, self._selector, 0.0, numbers))
        except StrategyFault:
            due = True  # called again within a decision, which pauses the run
        if due:
            with contextlib.suppress(StrategyFault):
                async with self._journal.decision():
                    await self.evict(numbers)

    async def before_batch(self) -> None:
        """Evict unusable groups that a batch may take, or for which others do not come. Called within a decision.

        A decision that failed after its record was written has left those that became unusable by it.
        """
        if self._config is not self._journal.state.config:
            await self.evict(filtered=True)
        elif self._checked != self._present():
            await self.evict()
        for chunk in tuple(self._journal.unsettled):
            await self.evict(chunk.numbers)

    async def take_over(self) -> None:
        """Evict what an older leader may have left unchecked. Called while taking over."""
        if self._journal.state.phase == "running":
            try:
                await self.evict(filtered=True)
            except StrategyFault as fault:
                await self._journal.pause(fault)

    async def evict_all(self) -> None:
        """Check every live group again, by strategy and filters. A plug-in that fails pauses the run."""
        if self._journal.state.phase == "running":
            with contextlib.suppress(StrategyFault):  # the decision has paused the run
                async with self._journal.decision():
                    await self.evict(filtered=True)

    async def evict(self, only: Numbers | None = None, *, filtered: bool = False) -> None:
        """Record which live groups (of `only`) no later batch may use. Called within a decision.

        `filtered`: call the filters for all live groups, not only for arrivals.
        """
        journal, present, config = self._journal, self._present(), self._journal.state.config
        removals = decide_removals(journal.state, self._selector, journal.clock.wall(), only, filtered=filtered)
        async for records in in_turns(removals):
            for record in records:
                await journal.append(record)
        if only is None:
            self._checked, self._config = present, config if filtered else self._config
        self._book.reissue(journal.state.reissues)

    def _present(self) -> tuple[int, int]:
        return self._journal.state.generation, self._journal.state.next_step
