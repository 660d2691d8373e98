"""Settle stored groups: make payloads permanent, remove tickets, evict groups that came too late."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable

import numpy as np

from replaybuf.kernel.rates import Rates
from replaybuf.service.run.eviction import Eviction
from replaybuf.service.run.journal import Journal
from replaybuf.service.run.tickets import Tickets
from replaybuf.store import keys
from replaybuf.store.entries import EntryStrings

logger = logging.getLogger(__name__)

ADOPTED_AT_ONCE = 2_000
"""Payloads that a new leader makes permanent per tick."""


class Arrivals:
    """Reads new groups of one run from the index stream and settles them, on the leader and on followers."""

    def __init__(self, journal: Journal, tickets: Tickets, eviction: Eviction, rates: Rates) -> None:
        self._journal = journal
        self._tickets = tickets
        self._eviction = eviction
        self._rates = rates
        self._settling = asyncio.Lock()
        self._permanent: set[int] = set()
        self._to_adopt: deque[tuple[int, int]] = deque()
        self._measured_after = journal.state.stored

    async def pull(self, through: int | None = None) -> None:
        """Read new groups, whoever wrote them; `through` is the last confirmed group number."""
        await self._journal.pull(through)
        await self.settle()

    async def follow(self) -> None:
        """Read what the leader wrote to both streams."""
        await self._journal.catch_up()
        await self.settle()
        await self._journal.notify()

    def mark_permanent(self, numbers: Iterable[int]) -> None:
        """Skip these groups in `settle`: their append made the payloads permanent, a quarter of all commands."""
        self._permanent.update(number for number in numbers if number > self._journal.state.stored)

    async def settle(self) -> None:
        """Settle all unsettled groups; groups that meet trouble with Redis stay for the next call."""
        unsettled = self._journal.unsettled
        if not unsettled:
            return
        async with self._settling:
            while unsettled:
                chunk = unsettled[0]
                if chunk.malformed.any():
                    bad = chunk.numbers[chunk.malformed].tolist()
                    logger.error("malformed index entries run=%s numbers=%s", self._journal.name, bad)
                numbers = chunk.numbers.tolist()
                pairs = zip(numbers, chunk.strings, strict=True)
                await self._adopt(strings for number, strings in pairs if number not in self._permanent)
                self._permanent.difference_update(numbers)
                if self._journal.leading:
                    await self._tickets.complete([chunk])
                    # Groups stored before this server measured are history, not speed.
                    recent = chunk.numbers > self._measured_after
                    self._rates.record_stored(self._journal.clock.monotonic(), int(recent.sum()))
                    await self._eviction.of_arrivals(chunk.numbers)
                unsettled.popleft()
        await self._journal.notify()

    def find_recent(self) -> None:
        """List groups whose payload may still have a TTL: the producer may have died before it removed the TTL."""
        index = self._journal.state.index
        arrival_s = index["arrival_s"]
        # Not the clock alone: after a jump of the wall clock, groups of the last second may look old.
        now_s = min(self._journal.clock.wall(), float(np.max(arrival_s, initial=-np.inf)))
        recent = index["number"][arrival_s > now_s - keys.ORPHAN_TTL_S]
        pieces = [recent[start : start + ADOPTED_AT_ONCE] for start in range(0, len(recent), ADOPTED_AT_ONCE)]
        self._to_adopt = deque((int(piece[0]), int(piece[-1])) for piece in pieces)

    async def adopt_recent(self) -> None:
        """Make the next `ADOPTED_AT_ONCE` of these payloads permanent."""
        if self._to_adopt:
            await self._adopt(await self._journal.store.groups.read_strings(self._journal.name, *self._to_adopt[0]))
            self._to_adopt.popleft()

    async def _adopt(self, entries: Iterable[EntryStrings]) -> None:
        await self._journal.store.groups.persist_payloads([entry.payload_key for entry in entries if entry.payload_key])
