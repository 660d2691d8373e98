"""Leases of one server: take, renew, lose and hand over the lead of runs.

Renewing takes one round trip for all runs. Taking over may take long, so it is done beside the renewals.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable, Mapping

from replaybuf.service.peers.living_servers import LivingServers
from replaybuf.service.run.lease_timer import EXPECTING_S, LEASE_S, RENEWAL_S
from replaybuf.service.run.served_run import Run
from replaybuf.store import HeldLease, Lease, Store

logger = logging.getLogger(__name__)

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 0.5
SEEK_AT_ONCE = 32
"""Free leases that are taken at once: each takes many round trips."""
HAND_OVER_WITHIN_S = 1.0
"""Longest wait for the end of a decision; another run has its turn then."""
NAMED_S = 2.0
"""For so long only the successor can take the lease of a run that is handed over; then anybody can."""


class Leadership:
    """Leases of this server, which answers at `url`; `servers` are those that live.

    `run.lease.asking` is held during a request, so answers are applied in the order in which Redis gave them.
    """

    def __init__(self, store: Store, servers: LivingServers, url: str) -> None:
        self._store = store
        self._servers = servers
        self._holder = servers.holder
        self._url = url
        self._free: dict[str, Run] = {}
        self._any_free = asyncio.Event()
        self._seeking: list[Run] = []
        self._changed: list[Run] = []

    async def seek(self, run: Run, *, force: bool = False) -> None:
        """Renew our lease on a run, take a free one, or learn who holds it."""
        if not (force or run.journal.leading or self._servers.leads):
            await self.renew([run])
            return
        async with run.lease.asking:
            if run.journal.leading and not run.lease.due():
                return  # another task has renewed it while we waited
            asked_s = run.lease.now_s()
            lease = await self._store.runs.take_lease(run.name, self._holder, LEASE_S, force=force)
            ours = lease.token is not None
            if lease.token is not None and not (run.journal.leading and lease.token == run.journal.token):
                run.journal.become_follower(self._url)
                await run.lead(lease.token, (lease.entries, lease.stored))
                logger.info("lead taken run=%s token=%s step=%d", run.name, lease.token, run.state.step)
            self._apply(run, lease, asked_s, ours=ours)

    async def hold(self, runs: Mapping[str, Run]) -> list[Run]:
        """Wait until a lease is due, renew ours, and note free ones for `next_free`.

        Returns the quiet runs whose streams have changed: nothing else looks at them often.
        """
        watched = [run for name, run in runs.items() if name not in self._free] if self._free else [*runs.values()]
        # Attributes and no calls: a server may have thousands of runs.
        asks_at_s = min([run.lease.asks_at_s for run in watched], default=math.inf)
        due_s = asks_at_s - watched[0].lease.now_s() if watched else math.inf
        await asyncio.sleep(min(max(due_s, SHORTEST_PAUSE_S), LONGEST_PAUSE_S))
        self._changed = []
        if due_s > LONGEST_PAUSE_S:
            return []  # only new runs may be due: look again
        now_s = watched[0].lease.now_s() if watched else 0.0
        due = [run for name, run in runs.items() if run.lease.may_ask_at_s <= now_s and name not in self._free]
        for run in await self.renew(due):
            self._free[run.name] = run
            self._any_free.set()
        return self._changed

    async def next_free(self) -> list[Run]:
        """Wait for free leases; return some of their runs to `seek` at once, while renewals go on."""
        for run in self._seeking:
            self._free.pop(run.name, None)
        if not self._free:
            self._any_free.clear()
        await self._any_free.wait()
        self._seeking = list(self._free.values())[:SEEK_AT_ONCE]
        return self._seeking

    async def renew(self, runs: Iterable[Run]) -> list[Run]:
        """Renew our leases on many runs in one round trip; return the runs that we could lead, to `seek` them.

        Their lease is free, or ours without our leading, or it cannot be read.
        """
        asked: list[Run] = []
        try:
            for run in runs:
                if not run.lease.asking.locked():  # else it is asked for already
                    await run.lease.asking.acquire()  # at once
                    asked.append(run)
            return await self._renew(asked) if asked else []
        finally:
            for run in asked:
                run.lease.asking.release()

    async def _renew(self, runs: list[Run]) -> list[Run]:
        asked_s = runs[0].lease.now_s()
        holders = [self._holder if run.journal.leading else self._followed_holder(run) for run in runs]
        expected = [
            HeldLease.expect(holder, run.state.entries, run.state.stored) if holder else ""
            for run, holder in zip(runs, holders, strict=True)
        ]
        leases = await self._store.runs.hold_leases([run.name for run in runs], self._holder, LEASE_S, expected)
        answers = zip(runs, holders, leases, strict=True)
        return [run for run, holder, lease in answers if self._is_free(run, holder, lease, asked_s)]

    def _is_free(self, run: Run, holder: str, lease: HeldLease | float | None, asked_s: float) -> bool:
        """Apply an answer; return whether to `seek` the lease.

        A number: it is as we expected, with this `holder`. None: its node is away, and the lease ends by itself.
        """
        journal = run.journal
        if isinstance(lease, float):
            if journal.leading == (holder == self._holder):
                run.lease.holder = holder
                run.lease.extend(lease, asked_s)
                return False
            lease = HeldLease(holder, lease, run.state.entries, run.state.stored)  # we stopped deciding, or began
        if lease is None:
            return False
        ours = lease.holder == self._holder
        if (lease.entries, lease.stored) != (run.state.entries, run.state.stored) and run.quiet():
            self._changed.append(run)
        if ours and journal.leading and lease.entries > run.state.entries:
            # Others may have led while we stood still, and handed the run back: only `seek` compares tokens.
            run.lease.extend(0.0, ask_in_s=0.0)
            return True
        if lease.holder and (journal.leading or not ours):
            self._apply(run, lease, asked_s, ours=ours)
            return False
        return ours or journal.leading or self._takes(run, asked_s)

    def _followed_holder(self, run: Run) -> str:
        """Return which other server has the lease of a run as far as we know; "" = it is to be read."""
        journal, holder = run.journal, run.lease.holder
        followed = holder and holder != self._holder and _url_of(holder) == journal.leader_url
        return holder if followed and not self._servers.expects(run.name, holder) else ""

    def _takes(self, run: Run, asked_s: float) -> bool:
        """Return whether to take a free lease now: the server that should have it comes first, for a moment."""
        if not self._servers.leads:
            run.lease.extend(RENEWAL_S, asked_s)  # of nobody: one of another release takes it, or ends
            return False
        return self._servers.is_ours(run.name, run.lease.holder) or not run.lease.leave(asked_s)

    async def hand_over(self, run: Run, successor: str) -> None:
        """Give the lead of a run to another server, between two decisions.

        This server follows before it asks: nobody may decide if the answer is lost. If it still has the lease then, it
        takes over from itself. Raises `NotLeader`, and what a decision raises.
        """
        try:
            async with asyncio.timeout(HAND_OVER_WITHIN_S):
                await self._hand_over(run, successor)
        except TimeoutError:
            logger.info("lead kept, a decision takes long run=%s", run.name)

    async def _hand_over(self, run: Run, successor: str) -> None:
        journal = run.journal
        async with journal.decision():
            if run.lease.asking.locked():
                return  # a renewal is on its way, and its answer would be applied after ours
            async with run.lease.asking:
                token, handed_over = journal.check_leading(), False
                journal.become_follower(None)
                try:
                    handed_over = await self._store.runs.hand_over(run.name, token, successor, NAMED_S)
                finally:
                    if handed_over:
                        run.lease.holder, journal.leader_url = successor, _url_of(successor)
                        logger.info("lead handed over run=%s to=%s", run.name, successor)
                    run.lease.extend(NAMED_S if handed_over else 0.0)
                    journal.notify()

    def _apply(self, run: Run, lease: Lease | HeldLease, asked_s: float, *, ours: bool) -> None:
        expecting = not ours and self._servers.expects(run.name, lease.holder)
        run.lease.extend(lease.left_s, asked_s, EXPECTING_S if expecting else RENEWAL_S)
        run.lease.holder = lease.holder or run.lease.holder
        if ours:
            return
        journal, leader_url = run.journal, _url_of(lease.holder)
        if leader_url == journal.leader_url and not journal.leading:
            return
        if journal.leading:
            logger.warning("lead lost run=%s holder=%s", run.name, lease.holder)
        journal.become_follower(leader_url)
        journal.notify()


def _url_of(holder: str) -> str | None:
    return holder.partition("@")[2] or None
