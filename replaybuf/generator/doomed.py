"""Groups in flight whose first tokens are too old for every batch to come: they are aborted while they are sampled.

An engine does not report the version of a token before its request ends. But when no request waits in any engine, each
one sent before has begun, by weights that are not newer than the engine's now. That version bounds the oldest token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from replaybuf.generator.fleet import Fleet
from replaybuf.generator.fleet.publication import SUPERSEDED, too_old
from replaybuf.generator.inflight import InFlight, Job

LOOK_EVERY_S = 5.0
"""Pause between two looks at the engines' queues; there is one only while a group in flight has no bound."""


class Doomed:
    """Follower that bounds the version of groups in flight, and aborts those that a publication makes too old."""

    async def follow(self, inflight: InFlight, fleet: Fleet, published: Callable[[], int | None]) -> None:
        """Loop: look at the engines, or wait for a publication. Ends at a stop."""
        while not inflight.stopping:
            await self._wait(inflight, published)
            if fleet.max_staleness is None:
                continue
            for job in inflight.sampling():
                if job.begun_by is not None and too_old(job.begun_by, published(), fleet.max_staleness):
                    detail = f"begun by version {job.begun_by} at most; published is {published()}"
                    inflight.abort(job, SUPERSEDED, detail)
            await self._bound(fleet, [job for job in inflight.sampling() if job.begun_by is None])

    async def _wait(self, inflight: InFlight, published: Callable[[], int | None]) -> None:
        before = published()
        await inflight.until(lambda: inflight.stopping or published() != before, LOOK_EVERY_S)

    async def _bound(self, fleet: Fleet, jobs: Sequence[Job]) -> None:
        """Bound the oldest token of jobs, if every engine is up, has gauges and an empty queue."""
        if not jobs:
            return
        loads = await fleet.read_loads()
        if len(loads) < len(fleet.status()) or any(load is None or load.waiting for load in loads):
            return
        await fleet.find_lost_versions()  # after the queues: weights may be loaded between
        for job in jobs:
            job.begun_by = fleet.newest_version
