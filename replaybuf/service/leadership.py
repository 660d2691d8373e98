"""Leases of one server: take, renew and lose the lead of runs.

Renewing takes one round trip for all runs. Taking over may take long, so it is done for one run at a time, between
renewals.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable

from replaybuf.errors import Unreadable
from replaybuf.service.run.lease import LEASE_S
from replaybuf.service.run.served_run import Run
from replaybuf.store import Lease, Store

logger = logging.getLogger(__name__)


class Leadership:
    """Leases of the server `holder`, which answers at `url`.

    `run.lease.asking` is held during a request, so answers are applied in the order in which Redis gave them.
    """

    def __init__(self, store: Store, holder: str, url: str) -> None:
        self._store = store
        self._holder = holder
        self._url = url

    async def seek(self, run: Run, *, force: bool = False) -> None:
        """Renew our lease on a run, take a free one, or learn who holds it."""
        async with run.lease.asking:
            if run.journal.leading and not run.lease.due():
                return  # another task has renewed it while we waited
            asked_s = run.lease.now_s()
            lease = await self._store.runs.take_lease(run.name, self._holder, LEASE_S, force=force)
            if lease.token is not None and not _leads(run, lease):
                run.journal.follow(self._url)
                await run.lead(lease.token)
                logger.info("lead taken run=%s token=%s step=%d", run.name, lease.token, run.state.step)
            await self._apply(run, lease, asked_s)

    async def renew(self, runs: Iterable[Run]) -> list[Run]:
        """Renew many in one round trip; return runs whose lease we have won, for the caller to `seek` one by one.

        Also those whose lease cannot be read.
        """
        async with contextlib.AsyncExitStack() as stack:
            asked = [run for run in runs if not run.lease.asking.locked()]  # the others are asked for already
            if not asked:
                return []
            for run in asked:
                await stack.enter_async_context(run.lease.asking)
            asked_s = [run.lease.now_s() for run in asked]
            leases = await self._store.runs.take_leases([run.name for run in asked], self._holder, LEASE_S)
            won = []
            for run, lease, at_s in zip(asked, leases, asked_s, strict=True):
                if lease is None:
                    continue  # its node is away; the lease ends by itself
                if isinstance(lease, Unreadable) or (lease.token is not None and not _leads(run, lease)):
                    won.append(run)  # `seek` raises what is wrong
                else:
                    await self._apply(run, lease, at_s)
            return won

    async def _apply(self, run: Run, lease: Lease, asked_s: float) -> None:
        if lease.token is None:
            if run.journal.leading:
                logger.warning("lead lost run=%s holder=%s", run.name, lease.holder)
            run.journal.follow(lease.holder.partition("@")[2] or None)
            run.journal.notify()
        run.lease.extend(lease.left_s, asked_s)


def _leads(run: Run, lease: Lease) -> bool:
    return run.journal.leading and lease.token == run.journal.token
