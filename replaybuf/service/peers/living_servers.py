"""Servers that live, as each announces itself in Redis, and which of them should lead a run.

Servers of one release agree on the leader that is wanted, because all apply `wanted_leader` to the same names. The
fencing token alone decides who leads: a wrong view of who lives costs a handover or a moment's wait, and no data.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import secrets
from collections.abc import Callable, Sequence

from replaybuf.errors import ServiceUnavailable
from replaybuf.kernel.decide.rendezvous import Seniority, leading_release, wanted_leader
from replaybuf.plugins.entry_points import ADMISSIONS, FILTERS, STRATEGIES, installed
from replaybuf.service.clock import SYSTEM_CLOCK
from replaybuf.service.run.lease_timer import LEASE_S
from replaybuf.store import AnnouncedServer, Store
from replaybuf.version import __version__

logger = logging.getLogger(__name__)

MOST_APART_S = 1.0
"""Clocks of two servers that differ by more are reported."""
SILENT_S = 5.0
"""A server that was silent for longer counts as dead; each announces itself once a second."""
FRESH_S = 2.5
STEADY_S = 3 * LEASE_S
"""Runs are handed over to a server that was heard at most `FRESH_S` ago, and that has lived for `STEADY_S`."""


@functools.cache
def name_release() -> str:
    """Name this release with the plug-ins of runs: a server without one of them would pause a run that it gets."""
    entries = [entry for group in (STRATEGIES, FILTERS, ADMISSIONS) for entry in installed(group)]
    plugins = sorted(
        f"{entry.group} {entry.name} {entry.value} {entry.dist and entry.dist.version}" for entry in entries
    )
    return f"{__version__}+{hashlib.blake2b(repr(plugins).encode(), digest_size=4).hexdigest()}"


_FOLLOWS = "This server follows, and leads no run until that one has ended; upgrade all servers of one Redis together"
_IS_LED = "It follows, and leads no run while servers of our release live; upgrade all servers of one Redis together"


class LivingServers:
    """Servers of our release that live, ourselves included: `holder` names this server, and its leases.

    `alone`: no other server uses this Redis, or this one has no part in the sharing. It announces nothing, so no server
    waits for a run of it. `wall`: the clock of this server, which decides nothing here. `leads`: whether it may
    begin to lead runs; if not, a server of another release has lived longer.
    """

    def __init__(
        self, store: Store, url: str, *, alone: bool = False, wall: Callable[[], float] = SYSTEM_CLOCK.wall
    ) -> None:
        # Random: a restarted container has the same process id as before.
        self.holder = f"{secrets.token_hex(8)}@{url}"
        self._store, self._wall = store, wall
        self._alone = alone
        self._apart: dict[str, bool] = {}
        self._others: dict[str, AnnouncedServer] = {}
        self._names = frozenset({self.holder})
        self._steady = False
        self._release = ""
        self._strangers: list[AnnouncedServer] = []
        self.leads = True

    async def announce(self) -> None:
        """Announce this server, and read the others."""
        if self._alone:
            return
        self._release = self._release or await asyncio.to_thread(name_release)
        own, *others = await self._store.servers.announce(self.holder, self._release, SILENT_S, self._wall())
        self._compare_clocks(own, others)
        self._compare_releases(own, others)
        self._steady = own.alive_s >= STEADY_S
        self._others = {server.holder: server for server in others if server.release == own.release}
        self._names = frozenset({self.holder, *self._others})

    def _compare_clocks(self, own: AnnouncedServer, others: Sequence[AnnouncedServer]) -> None:
        """Report a clock that differs in two announcements in a row: one of them may have come late."""
        seen, self._apart = self._apart, {}
        for server in others:
            apart_s = server.ahead_s - own.ahead_s
            if abs(apart_s) <= MOST_APART_S:
                continue
            if seen.get(server.holder) is False:
                logger.warning(
                    "clocks differ: that of %s is %.1f s %s ours. Times in states and logs differ by as much; "
                    "nothing is decided by them. Synchronise the clocks (NTP)",
                    server.holder.partition("@")[2] or server.holder,
                    abs(apart_s),
                    "ahead of" if apart_s > 0 else "behind",
                )
            self._apart[server.holder] = server.holder in seen

    def _compare_releases(self, own: AnnouncedServer, others: Sequence[AnnouncedServer]) -> None:
        """Decide whether this server may lead, and report servers of another release that come."""
        living = (Seniority(server.alive_s, server.holder, server.release) for server in (own, *others))
        self.leads = own.release == leading_release(living)
        seen = {server.holder for server in self._strangers}
        self._strangers = [server for server in others if server.release != own.release]
        for server in self._strangers:
            if server.holder not in seen:
                logger.warning("%s %s", _name_stranger(server, own.release), _IS_LED if self.leads else _FOLLOWS)

    def check_leads(self) -> None:
        """Raise `ServiceUnavailable` if this server may not begin to lead a run."""
        if not self.leads:
            stranger = max(self._strangers, key=lambda server: server.alive_s)
            detail = f"{_name_stranger(stranger, self._release)} {_FOLLOWS}"
            raise ServiceUnavailable(detail, name="release", value=self._release, bound=stranger.release)

    async def withdraw(self) -> None:
        """Let the others share our runs at once."""
        if not self._alone:
            await self._store.servers.withdraw(self.holder)

    @property
    def any(self) -> bool:
        """Whether another server of our release lives."""
        return bool(self._others)

    def lives(self, holder: str) -> bool:
        """Return whether the holder of a lease is another server of our release that lives."""
        return holder in self._others

    def successor(self, run: str) -> str | None:
        """Return the server that a run of ours is handed over to; None = it stays."""
        server = self._others.get(self._wanted(run))
        ready = server and server.alive_s >= STEADY_S and server.silent_s <= FRESH_S
        return server.holder if server and ready else None

    def is_ours(self, run: str, last_holder: str) -> bool:
        """Return whether we should take the free lease of a run, which `last_holder` had."""
        return wanted_leader(run, self._names - {last_holder}) == self.holder

    def expects(self, run: str, holder: str) -> bool:
        """Return whether the holder of a lease is about to hand its run over to us."""
        return self._steady and holder in self._others and self._wanted(run) == self.holder

    def _wanted(self, run: str) -> str:
        return wanted_leader(run, self._names) or self.holder


def _name_stranger(server: AnnouncedServer, release: str) -> str:
    where = server.holder.partition("@")[2] or server.holder
    return f"the server at {where} has the release and plug-ins {server.release}, this one has {release}."
