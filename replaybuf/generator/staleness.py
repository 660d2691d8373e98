"""Staleness of groups in flight: the run's bound, and groups that are aborted because they are too old for every batch.

The bound is read again while generating: an operator may change the strategy.

An engine does not report the version of a token before its request ends. But when no request waits in any engine, each
one sent before has begun, by weights that are not newer than the engine's now. That version bounds the oldest token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from replaybuf.errors import Invalid
from replaybuf.generator.fleet import Fleet
from replaybuf.generator.fleet.publication import SUPERSEDED, too_old
from replaybuf.generator.inflight import InFlight, Job
from replaybuf.kernel.strategy.plugin_set import build_strategy
from replaybuf.wire.answer.run_status import RunFacts

logger = logging.getLogger(__name__)

READ_EVERY_S = 10.0
"""A late change only costs generated groups: the service checks every group against its own bound."""
LOOK_EVERY_S = 5.0
"""Pause between two looks at the engines' queues; there is one only while a group in flight has no bound."""


def max_staleness(facts: RunFacts) -> int | None:
    """Return the largest staleness at which the run's strategy uses a group; None = unbounded or unknown.

    It is unknown where the strategy is not installed here, and where the run masks old tokens: the newest one decides.
    Then no group is given up for its age.
    """
    policies = {facts.on_stale} if isinstance(facts.on_stale, str) else {*facts.on_stale.values()}
    if "mask" in policies:
        return None
    try:
        return build_strategy(facts.strategy.name, facts.strategy.options).max_staleness
    except Invalid as error:
        logger.warning("cannot check the staleness of groups in flight: %s", error.detail)
        return None


class StalenessBound:
    """Follower that sets `Fleet.max_staleness`; `facts` are those of the start, whose bound is already set."""

    def __init__(self, facts: RunFacts) -> None:
        self._rules = facts.strategy, facts.on_stale

    async def follow(self, inflight: InFlight, fleet: Fleet, published: Callable[[], int | None]) -> None:
        """Loop: read the run, and apply a changed strategy or policy. Ends at a stop; raises as `InFlight.retry`."""
        while not await inflight.until(lambda: inflight.stopping, READ_EVERY_S):
            status = await inflight.retry("run", inflight.client.get_run)
            if status is None:
                return
            facts = status.facts()
            if (facts.strategy, facts.on_stale) != self._rules:
                self._rules, fleet.max_staleness = (facts.strategy, facts.on_stale), max_staleness(facts)
                logger.info("the run's strategy is now %s; max_staleness %s", facts.strategy.name, fleet.max_staleness)


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
