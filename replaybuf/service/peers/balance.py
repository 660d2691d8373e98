"""Which run a server hands over next, to the server that should lead it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from replaybuf.service.peers.living_servers import LivingServers
from replaybuf.service.run.served_run import Run
from replaybuf.service.turns import in_turns

SHARE_PERIOD_S = 1.0
"""A server hands at most one run over in this time: each handover costs the clients of the run a moment."""
AGAIN_S = 60.0
"""A run that came back is not offered to the same server again for so long: it may be unable to lead this run."""


class Balance:
    """Chooses which run of this server another one should lead. `enabled`: this server hands runs over."""

    def __init__(self, servers: LivingServers, clock: Callable[[], float], *, enabled: bool) -> None:
        self._servers = servers
        self._now_s = clock
        self._enabled = enabled
        self._offered_s: dict[tuple[str, str], float] = {}

    async def next(self, runs: Iterable[Run]) -> tuple[Run, str] | None:
        """Say that this server lives; return a run to hand over and its next leader, None if all runs should stay."""
        await self._servers.announce()
        now_s = self._now_s()
        self._offered_s = {offer: at_s for offer, at_s in self._offered_s.items() if now_s < at_s + AGAIN_S}
        async for run in in_turns(runs if self._enabled else ()):
            successor = self._servers.successor(run.name) if run.journal.leading else None
            if successor and (run.name, successor) not in self._offered_s:
                self._offered_s[run.name, successor] = now_s
                return run, successor
        return None
