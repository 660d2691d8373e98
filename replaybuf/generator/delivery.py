"""From scored groups to stored ones: append what is ready together, hold what is not published yet.

::

    put ──► ready ──► append ──► stored | duplicate
     │        ▲         ├──────► given back (rejected, lost_lineage)
     │        │         └──────► ready again while the service is away
     └──► held┘ published
           └──────────► given back (ticket's life over, version taken back)
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence

from replaybuf.errors import Invalid, Malformed, ReplaybufError, RunFinished, TooLarge
from replaybuf.generator.inflight import Flight, Work
from replaybuf.wire.contract import AppendResult, Policy

logger = logging.getLogger(__name__)

APPEND_GROUPS = 64
"""So many groups go in one append at most."""
ABOVE_PUBLISHED = "version_above_published"
LOST_LINEAGE = "lost_lineage"
_EARLY_ANSWER = 0.9
_EARLY_PAUSE_S = 0.2
_UNKNOWN = -1


class Delivery:
    """Brings groups into the buffer. `ready` and `held` are bounded by the slots of the flight.

    `heed` is told the published version whenever an answer has one.
    """

    def __init__(
        self,
        flight: Flight,
        heed: Callable[[int], None],
        *,
        poll_wait_ms: int,
        compress: bool = False,
        adapter: str = "",
    ) -> None:
        self._flight = flight
        self._heed = heed
        self._poll_wait_ms = poll_wait_ms
        self._compress = compress
        self._adapter = adapter
        self._published = _UNKNOWN
        self._ready: deque[Work] = deque()
        self._held: list[Work] = []

    @property
    def published(self) -> int | None:
        """The published version; None where it is not known."""
        return None if self._published == _UNKNOWN else self._published

    @property
    def holding(self) -> bool:
        """Whether groups wait for their version to be published."""
        return bool(self._held)

    def learn_published(self, version: int) -> None:
        """Take in what an answer said; within one history versions only grow, and answers overtake each other.

        So a rewind is heard of from `follow_policy` alone, whose answers come one after another.
        """
        self._published = max(self._published, version)
        self._heed(self._published)

    def lose_above(self, version: int) -> None:
        """Mark what is in flight: the same numbers will mean other weights, so versions above this one are lost.

        What is held is given back with the next answer to `follow_policy`.
        """
        for work in self._flight.works.values():
            work.rewound_to = version if work.rewound_to is None else min(version, work.rewound_to)

    async def put(self, works: Sequence[Work]) -> None:
        """Queue groups for append; those of a version not published yet are held, not sent in vain."""
        for work in works:
            newest = work.scored.policy_version_max
            if work.rewound_to is not None and newest > work.rewound_to:
                how = f"holds tokens of version {newest}; those after {work.rewound_to} were taken back"
                await self._flight.give_back(work, LOST_LINEAGE, how)
            else:
                (self._held if newest > self._published else self._ready).append(work)
        await self._flight.wake()

    # ------------------------------------------------------------------ append

    async def append_ready(self) -> None:
        """Loop: append what is ready, together. Ends where a stop comes while the service is away."""
        flight, clock, going, last_s = self._flight, asyncio.get_running_loop().time, True, -math.inf
        while going:
            await flight.until(lambda: bool(self._ready))
            await flight.gather(lambda: len(self._ready), lambda: len(flight.works), last_s)
            going = await self._append([self._ready.popleft() for _ in range(min(len(self._ready), APPEND_GROUPS))])
            last_s = clock()

    async def _append(self, works: list[Work]) -> bool:
        """Append groups, however long the service is away; say False where a stop came first."""
        flight, groups = self._flight, [work.scored for work in works]
        try:
            results = await flight.patiently("append", lambda: flight.client.append(groups, compress=self._compress))
        except RunFinished as error:
            logger.info("%d groups came too late: %s", len(works), error)
            flight.no_more_tickets = True
            await flight.forget(works)
            return True
        except (Invalid, Malformed, TooLarge) as error:
            return await self._append_singly(works, error)
        if results is None:
            return False
        settled = list(zip(works, results, strict=True))
        there = [(work, result) for work, result in settled if result.status != "rejected"]
        for work, result in there:
            self._count(work, result)
        await flight.forget([work for work, _ in there])
        for work, result in settled:
            if result.status == "rejected":
                await self._refused(work, result)
        return True

    async def _append_singly(self, works: list[Work], error: ReplaybufError) -> bool:
        """Find the group that made the service refuse them all."""
        if len(works) == 1:
            await self._flight.give_back(works[0], "append_refused", error.detail)
            return True
        for work in works:
            if not await self._append([work]):
                return False
        return True

    def _count(self, work: Work, result: AppendResult) -> None:
        progress = self._flight.progress
        if result.status == "stored":
            progress.stored(work.scored, asyncio.get_running_loop().time() - work.taken_at_s)
        else:
            progress.duplicates += 1

    async def _refused(self, work: Work, result: AppendResult) -> None:
        if result.reason == ABOVE_PUBLISHED:
            # It was published when it was sent, so the run has been rewound: only that lowers a version.
            how = f"version {work.scored.policy_version_max} is not published any more"
            await self._flight.give_back(work, LOST_LINEAGE, how)
        elif result.reason == LOST_LINEAGE:
            await self._flight.give_back(work, LOST_LINEAGE, result.detail or "")
        else:
            await self._flight.give_back(work, f"rejected_{result.reason}", result.detail or "")

    # ------------------------------------------------------------------ policy

    async def follow_policy(self) -> None:
        """Loop: hear of publications, and release held groups when their version is published.

        The trainer loads the engines first and announces the version after, so groups of the next version are normal.
        """
        flight, clock = self._flight, asyncio.get_running_loop().time
        while True:
            asked_s, known = clock(), self._published
            policy = await flight.patiently("policy", self._ask_policy)
            if policy is None:
                return
            if policy.version < known:
                self._rewind(known, policy.version)
            self.learn_published(policy.version)
            await self._release(clock())
            if policy.version <= known and clock() - asked_s < _EARLY_ANSWER * self._poll_wait_ms / 1000:
                await asyncio.sleep(_EARLY_PAUSE_S)

    async def _ask_policy(self) -> Policy:
        after = None if self._published == _UNKNOWN else self._published
        return await self._flight.client.get_policy(after, self._poll_wait_ms, self._adapter)

    def _rewind(self, before: int, version: int) -> None:
        logger.warning("the run was rewound: the published version fell from %d to %d", before, version)
        self._published = version
        self.lose_above(version)

    async def _release(self, now_s: float) -> None:
        """Pass on the held groups whose version is published now; give back those whose ticket has run out."""
        held, self._held = self._held, []
        late = [w for w in held if w.expires_at_s <= now_s and w.scored.policy_version_max > self._published]
        for work in late:
            await self._flight.give_back(work, ABOVE_PUBLISHED, "not published within the ticket's life")
        await self.put([work for work in held if work not in late])
