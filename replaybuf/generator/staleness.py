"""The run's bound on staleness, read again while generating: an operator may give the run another strategy."""

from __future__ import annotations

import logging

from replaybuf.generator.fleet import Fleet
from replaybuf.generator.inflight import Flight
from replaybuf.generator.preflight import max_staleness
from replaybuf.wire.run_status import RunFacts

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 10.0
"""A bound that is known later costs generated groups, never one that is used: the service judges each by its own."""


class StalenessBound:
    """Tells the engines how old a group may get; `facts` are those of the start, which they have been told."""

    def __init__(self, facts: RunFacts) -> None:
        self._strategy = facts.strategy

    async def follow(self, flight: Flight, engine: Fleet) -> None:
        """Loop: read the run, heed a strategy that changed. Ends where a stop comes; raises as `Flight.patiently`."""
        while not await flight.until(lambda: flight.stopping, LOOK_EVERY_S):
            status = await flight.patiently("run", flight.client.get_run)
            if status is None:
                return
            facts = status.facts()
            if facts.strategy != self._strategy:
                self._strategy, engine.max_staleness = facts.strategy, max_staleness(facts)
                logger.info("the run's strategy is now %s; max_staleness %s", facts.strategy.name, engine.max_staleness)
