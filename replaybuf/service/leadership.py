"""Which runs this server leads: leases taken, renewed, lost and followed.

Each run has one leader, by its lease. Renewing is one round trip for all runs. Taking over may take long, so it is done
for one run at a time, between renewals.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable

from replaybuf.service.run.lease import LEASE_S
from replaybuf.service.run.run import Run
from replaybuf.store import Lease, Store

logger = logging.getLogger(__name__)


class Leadership:
    """The leases of the server that `holder` names and that answers at `url`. While a run is asked about, its lease's
    `seeking` is held: answers are heeded in the order in which Redis gave them.
    """

    def __init__(self, store: Store, holder: str, url: str) -> None:
        self._store = store
        self._holder = holder
        self._url = url

    async def seek(self, run: Run, *, force: bool = False) -> None:
        """Renew our lease on a run, take it where it is free, or learn who holds it."""
        async with run.lease.asking:
            if run.journal.leading and not run.lease.due():
                return  # somebody else has sought it while we waited
            asked_s = run.lease.now_s()
            lease = await self._store.runs.take_lease(run.name, self._holder, LEASE_S, force=force)
            if lease.token is not None and not _leads(run, lease):
                run.journal.follow(self._url)
                await run.lead(lease.token)
                logger.info("lead taken run=%s token=%s step=%d", run.name, lease.token, run.state.step)
            await self._heed(run, lease, asked_s)

    async def renew(self, runs: Iterable[Run]) -> list[Run]:
        """Seek many in one round trip; return those whose lease is ours now, and who are to be taken over by `seek`."""
        async with contextlib.AsyncExitStack() as stack:
            sought = [run for run in runs if not run.lease.asking.locked()]  # the others are sought already
            if not sought:
                return []
            for run in sought:
                await stack.enter_async_context(run.lease.asking)
            asked_s = [run.lease.now_s() for run in sought]
            leases = await self._store.runs.take_leases([run.name for run in sought], self._holder, LEASE_S)
            won = []
            for run, lease, at_s in zip(sought, leases, asked_s, strict=True):
                if lease.token is None or _leads(run, lease):
                    await self._heed(run, lease, at_s)
                else:
                    won.append(run)
            return won

    async def _heed(self, run: Run, lease: Lease, asked_s: float) -> None:
        if lease.token is None:
            if run.journal.leading:
                logger.warning("lead lost run=%s holder=%s", run.name, lease.holder)
            run.journal.follow(lease.holder.partition("@")[2] or None)
            await run.journal.notify()
        run.lease.extend(lease.left_s, asked_s)


def _leads(run: Run, lease: Lease) -> bool:
    return run.journal.leading and lease.token == run.journal.token
