"""Settle stored groups: remove tickets, evict groups that came too late."""

from __future__ import annotations

import asyncio
import logging

import numpy as np

from replaybuf.kernel.rows.index import NO_PROMPT_INDEX
from replaybuf.kernel.strategy.rates import Rates
from replaybuf.service.run.append.eviction import Eviction
from replaybuf.service.run.journal import Journal
from replaybuf.service.run.tickets import Tickets
from replaybuf.store import IndexChunk

logger = logging.getLogger(__name__)


class Arrivals:
    """Reads new groups of one run from the index stream and settles them, on the leader and on followers.

    `tokens`: of the groups that arrived while this server led.
    """

    def __init__(self, journal: Journal, tickets: Tickets, eviction: Eviction, rates: Rates) -> None:
        self._journal = journal
        self._tickets = tickets
        self._eviction = eviction
        self._rates = rates
        self._settling = asyncio.Lock()
        self._measured_after = journal.state.stored
        self.tokens = 0

    async def pull(self) -> None:
        """Read new groups that others published."""
        await self._journal.pull()
        await self.settle()

    async def read_streams(self) -> None:
        """Read what the leader wrote to both streams."""
        await self._journal.catch_up()
        await self.settle()
        self._journal.notify()

    async def settle(self) -> None:
        """Settle all unsettled groups; groups that meet trouble with Redis stay for the next call."""
        journal = self._journal
        unsettled = journal.unsettled
        if not unsettled:
            return
        # Without the lock as long as nothing is awaited: nearly all groups are kept.
        while unsettled and journal.leading and not self._settling.locked() and self._eviction.keeps(unsettled[0]):
            self._count(unsettled[0])
            unsettled.popleft()
        if unsettled:
            async with self._settling:
                while unsettled:
                    if journal.token and not journal.leading:
                        return  # the takeover may have read the tickets before these groups came: the leader does it
                    chunk = unsettled[0]
                    self._count(chunk)
                    if journal.leading:
                        await self._eviction.of_arrivals(chunk)
                    unsettled.popleft()
        journal.notify()

    def _count(self, chunk: IndexChunk) -> None:
        """Remove the tickets of new groups and measure them, on the leader; log malformed entries."""
        journal, malformed = self._journal, np.logical_or.reduce(chunk.malformed)
        if malformed:
            bad = chunk.numbers[chunk.malformed].tolist()
            logger.error("malformed index entries run=%s numbers=%s", journal.name, bad)
        if not journal.leading:
            return
        if np.maximum.reduce(chunk.values["prompt_index"]) > NO_PROMPT_INDEX:
            self._tickets.complete([chunk])
        # Groups stored before this server measured are history, not speed.
        first = int(chunk.numbers.searchsorted(self._measured_after, "right"))
        recent = len(chunk.numbers) - first
        if recent:
            journal.presence.record_producer()  # of another server, or one that writes directly
        self._rates.record_stored(journal.clock.monotonic(), recent)
        fit = ~chunk.malformed[first:] if malformed else True
        self.tokens += int(np.add.reduce(chunk.values["tokens"][first:], dtype=np.int64, where=fit))
