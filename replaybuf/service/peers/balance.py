"""Which run a server hands over next, to the server that should lead it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from replaybuf.service.peers.living_servers import LivingServers
from replaybuf.service.run.served_run import Run
from replaybuf.service.turns import in_turns

SHARE_PERIOD_S = 1.0
"""A server hands at most one run over in this time: each handover costs the clients of the run a moment."""
AGAIN_S = 60.0
"""A run that came back is not offered to the same server again for so long: it may be unable to lead this run."""


class Offer(NamedTuple):
    """When a run was last offered to a server, and in which term of ours."""

    at_s: float
    term: int


NO_OFFER = Offer(-math.inf, -1)


class Balance:
    """Chooses which run of this server another one should lead."""

    def __init__(self, servers: LivingServers, clock: Callable[[], float]) -> None:
        self._servers = servers
        self._now_s = clock
        self._offers: dict[tuple[str, str], Offer] = {}

    async def next(self, runs: Iterable[Run]) -> tuple[Run, str] | None:
        """Say that this server lives; return a run to hand over and its next leader, None if all runs should stay."""
        await self._servers.announce()
        oldest_s = self._now_s() - AGAIN_S
        self._offers = {names: offer for names, offer in self._offers.items() if offer.at_s > oldest_s}
        chosen, last_s = None, math.inf
        async for run in in_turns(runs if self._servers.any else ()):
            successor = self._servers.successor(run.journal.name) if run.journal.leading else None
            if successor is None:
                continue
            offer = self._offers.get((run.name, successor), NO_OFFER)
            # In the same term nothing came of the offer: a decision took long. Runs that were not offered come first.
            if offer.at_s < last_s and offer.term in (NO_OFFER.term, run.journal.terms):
                chosen, last_s = (run, successor), offer.at_s
        if chosen:
            run, successor = chosen
            self._offers[run.name, successor] = Offer(self._now_s(), run.journal.terms)
        return chosen
