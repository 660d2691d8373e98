"""The run's bound on staleness, read again while generating: an operator may change the run's strategy."""

from __future__ import annotations

import logging
from collections.abc import Callable

from replaybuf.errors import Invalid
from replaybuf.generator.fleet import Fleet
from replaybuf.generator.inflight import InFlight
from replaybuf.kernel.strategy.plugin_set import build_strategy
from replaybuf.wire.run_status import RunFacts

logger = logging.getLogger(__name__)

READ_EVERY_S = 10.0
"""A late change only costs generated groups: the service checks every group against its own bound."""


def max_staleness(facts: RunFacts) -> int | None:
    """Return the largest staleness at which the run's strategy uses a group; None = unbounded or unknown.

    It is unknown where the strategy is not installed here; then no group is given up for its age.
    """
    try:
        return build_strategy(facts.strategy.name, facts.strategy.options).max_staleness
    except Invalid as error:
        logger.warning("cannot check the staleness of groups in flight: %s", error.detail)
        return None


class StalenessBound:
    """Follower that sets `Fleet.max_staleness`; `facts` are those of the start, whose bound is already set."""

    def __init__(self, facts: RunFacts) -> None:
        self._strategy = facts.strategy

    async def follow(self, inflight: InFlight, fleet: Fleet, published: Callable[[], int | None]) -> None:
        """Loop: read the run and apply a changed strategy. Ends at a stop; raises as `InFlight.retry`."""
        while not await inflight.until(lambda: inflight.stopping, READ_EVERY_S):
            status = await inflight.retry("run", inflight.client.get_run)
            if status is None:
                return
            facts = status.facts()
            if facts.strategy != self._strategy:
                self._strategy, fleet.max_staleness = facts.strategy, max_staleness(facts)
                logger.info("the run's strategy is now %s; max_staleness %s", facts.strategy.name, fleet.max_staleness)
