"""All runs of one server and their background work.

Life: `Service.start` -> requests -> `stop`. Background work runs in one TaskGroup: renew or take leases, follow the
streams, expire tickets, delete freed payloads, watch the embedded server. While Redis is away the jobs wait and log;
any other fault stops the process.

Each run has one leader, by a lease. The other servers follow: they fold the same streams, answer reads, answer writes
with the leader's address, and take over when the lease ends. A leader hands runs over to servers that should lead them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

import numpy.ma  # noqa: F401 - numpy imports it in the first `isin` or `unique`, which takes 25 ms

from replaybuf.errors import DataLost, Gone, LedgerGap, NoRoom, NotLeader, ServiceUnavailable, Unreadable
from replaybuf.kernel.decide.config import decide_create
from replaybuf.kernel.decide.trimming import KEPT_GROUPS
from replaybuf.missing_run import no_run
from replaybuf.service.clock import SYSTEM_CLOCK, Clock
from replaybuf.service.durability import log_durability
from replaybuf.service.leadership import Leadership
from replaybuf.service.loop_watch import LoopWatch
from replaybuf.service.peers.balance import SHARE_PERIOD_S, Balance
from replaybuf.service.peers.living_servers import LivingServers
from replaybuf.service.peers.side_states import read_side_states
from replaybuf.service.rotation import TICK_ROUNDS, WATCH_ROUNDS, BusyRuns, Rotation
from replaybuf.service.run.lease_timer import LEASE_S
from replaybuf.service.run.served_run import Run
from replaybuf.service.run.spill import check_folder
from replaybuf.service.traffic import Traffic
from replaybuf.service.turns import Work, cancel_all, do_all, do_in_turn, in_turns, raise_first, running_beside
from replaybuf.service.unreadable_runs import UnreadableRuns, strange_values
from replaybuf.store import ServerReport, Store
from replaybuf.wire.config import RunConfig, check_run_name
from replaybuf.wire.text.model_tokenizer import Tokenizer

logger = logging.getLogger(__name__)

TICK_S = 0.25
WATCH_PERIOD_S = 1.0
PREPARE_PERIOD_S = 0.05
FOLLOW_TIMEOUT_S = 1.0
FOLLOW_PERIOD_S = 0.01
"""A burst of entries is read at once: at most 100 reads per second."""
REPORT_PERIOD_S = 10.0
DELETE_PERIOD_S = 1.0
OUTAGE_PAUSE_S = 0.5


class Service:
    """All runs of one Redis: this server leads some and follows the others.

    `url`: address of this server, for clients of its followers. `outage`: why Redis does not answer, or None.
    """

    def __init__(
        self,
        store: Store,
        *,
        url: str,
        embedded: bool,
        history_groups: int = KEPT_GROUPS,
        tokenizer: Tokenizer | None = None,
        clock: Clock = SYSTEM_CLOCK,
        balance: bool = True,
    ) -> None:
        self.store, self.url, self.tokenizer, self.clock = store, url, tokenizer, clock
        self.runs: dict[str, Run] = {}
        self.unreadable = UnreadableRuns(clock.monotonic)
        self.traffic, self.loop_watch = Traffic(), LoopWatch()
        self._servers = LivingServers(store, url, alone=embedded or not balance, wall=clock.wall)
        self.report: ServerReport | None = None
        self.outage: str | None = None
        self._leadership = Leadership(store, self._servers, url)
        self._balance = Balance(self._servers, clock.monotonic)
        self._embedded, self._history_groups = embedded, history_groups
        self._spread = store.connection.cluster is not None
        self._opening, self._added = asyncio.Lock(), asyncio.Event()
        self._busy, self._checked_on = BusyRuns(), ""
        self._ticking, self._watching = Rotation(self._busy, TICK_ROUNDS), Rotation(self._busy, WATCH_ROUNDS)

    # ------------------------------------------------------------------ runs

    async def run(self, name: str) -> Run:
        """Return a run to read. Raises `NotFound`, `DataLost` if Redis lost its data, and what `_open` raises."""
        run = self.runs.get(name)
        if run is None:
            check_run_name(name)
            async with self._opening:
                run = await self._open(name)
        if run is None:
            raise no_run(name, sorted(self.runs), f"create it with PUT /v1/runs/{name}")
        if run.journal.lost:
            raise run.journal.lost
        return run

    async def serving(self, name: str) -> Run:
        """Return a run, after a look whether another one leads if we stood still. Raises what `run` raises."""
        run = own if (own := self.runs.get(name)) and not own.journal.lost else await self.run(name)
        if run.journal.leading and run.lease.ended():
            await self._leadership.seek(run)
        return run

    async def led(self, name: str) -> Run:
        """Return a run to change. Raises `NotLeader` with the leader's address, and what `run` raises."""
        run = await self.serving(name)
        run.journal.check_leading()
        return run

    async def storing(self, name: str) -> Run:
        """Return a run to store groups in: any server may whose leader knows it. Raises what `led` raises."""
        run = await self.serving(name)
        if not run.journal.leading and not (run.takes_groups_anywhere and self._servers.lives(run.lease.holder)):
            run.journal.check_leading()
        return run

    async def create(self, name: str, config: RunConfig, *, if_absent: bool = False, by: str = "") -> tuple[Run, bool]:
        """Create a run, or return the one that exists; `if_absent` accepts any configuration of it.

        `by`: who does it, for the ledger. Raises `Conflict` if the configurations differ.
        """
        check_run_name(name)
        async with self._opening:
            if await self._open(name) is None:
                decide_create(config, 0.0)  # first: a refused configuration must leave no key
                self._servers.check_leads()
                if config.spill:
                    await check_folder(self.store.spill, config.spill.url)
                lease = await self.store.runs.take_lease(name, self._servers.holder, LEASE_S, force=self._embedded)
                if lease.token is None:
                    raise NotLeader(f"run {name} is being created by {lease.holder}", name="leader")
                run = await Run.create(name, self.store, lease.token, config, self.clock, by=by)
                run.journal.leader_url = self.url
                run.lease.extend(lease.left_s)
                self._add(run)
                logger.info("run created run=%s strategy=%s by=%s", name, config.strategy.name, by or "-")
                return run, True
        run = await self.run(name)
        if not if_absent:
            run.check_config(config)
        return run, False

    async def delete(self, name: str, *, by: str = "") -> None:
        """Record that a finished run is deleted; its keys go in the background. Raises `Conflict` for other runs."""
        run = await self.led(name)
        await run.delete()
        logger.info("run to be deleted run=%s by=%s", name, by)
        self._drop(run)

    @contextlib.asynccontextmanager
    async def replacing(self, name: str) -> AsyncIterator[None]:
        """Change a run in Redis in the body, while nobody opens it; then read it again."""
        async with self._opening:
            yield
            if name in self.runs:
                self._drop(self.runs[name])
            self.unreadable.record_success(name)
            await self._open(name)

    async def _open(self, name: str) -> Run | None:
        """Return a run, loaded from its streams if necessary; None if it does not exist.

        Raises `Gone` if it is deleted, `Unreadable`, `DataLost` or `LedgerGap` if it cannot be read.
        """
        if name in self.runs:
            return self.runs[name]
        try:
            exists = await self.store.runs.exists(name)
        except Unreadable as error:
            raise self.unreadable.record_failure(name, error) from error
        if not exists:
            return None
        self.unreadable.check(name)
        started = time.monotonic()
        try:
            with strange_values(name):
                run = await Run.load(name, self.store, self.clock)
        except (DataLost, LedgerGap) as error:
            raise self.unreadable.record_failure(name, error) from error
        if run is None:
            self.unreadable.record_success(name)
            return None
        self._add(run)
        state, seconds = run.state, time.monotonic() - started
        logger.info("run loaded run=%s groups=%d step=%d seconds=%.2f", name, state.stored, state.step, seconds)
        try:
            with strange_values(name):
                await self._leadership.seek(run, force=self._embedded)
        except Unreadable as error:  # in a key that only leaders read
            self._drop(run)
            raise self.unreadable.record_failure(name, error) from error
        finally:
            if name in self.runs:
                self.unreadable.record_success(name)
        return run

    def _add(self, run: Run) -> None:
        run.durability = self.report.durability if self.report else "relaxed"
        run.trimming.kept_groups, run.samples.tokenizer = self._history_groups, self.tokenizer
        self.runs[run.name] = run
        self._busy.watch(run)
        self._added.set()

    def _drop(self, run: Run, *, forget: bool = False) -> None:
        """Stop serving a run, and wake its waiters. `forget` its known ends, unless a restored run has its name now."""
        if self.runs.get(run.name) is run:
            del self.runs[run.name]
            if forget:
                self.store.connection.known.forget(run.name)
        run.close()

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Load every run; lead those that no other server leads."""
        await self._measure()
        await self._servers.announce()
        raise_first(await self._discover())

    async def stop(self) -> None:
        """Wake all waiters and release the leases."""
        for run in self.runs.values():
            run.close()
        with contextlib.suppress(ServiceUnavailable):
            await self._servers.withdraw()
            for run in [*self.runs.values()]:  # a call that still runs may open one
                await self.store.runs.release_lease(run.name, self._servers.holder)
        self.store.connection.known.sync()

    def working(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Do the background work while the body runs."""
        jobs = {
            "hold": self._repeat(self._hold, 0.0),
            "seek": self._repeat(self._seek, 0.0),
            "share": self._repeat(self._share, SHARE_PERIOD_S),
            "follow": self._repeat(self._follow, FOLLOW_PERIOD_S),
            "tick": self._repeat(self._tick, TICK_S),
            "prepare": self._repeat(self._prepare, PREPARE_PERIOD_S),
            "watch": self._repeat(self._watch, WATCH_PERIOD_S),
            "measure": self._repeat(self._measure, REPORT_PERIOD_S),
            "delete": self._repeat(self._delete, DELETE_PERIOD_S),
            "watch_loop": self.loop_watch.run(),
        }
        return running_beside(jobs)

    async def _repeat(self, job: Callable[[], Awaitable[None]], period_s: float) -> None:
        """Run `job` every `period_s`. Log the start and the end of a Redis outage once, and wait meanwhile."""
        while True:
            try:
                await job()
                if self.outage:
                    await self.store.connection.check_writable()  # the job may not have used Redis
                    self.outage = None
                    logger.info("redis is available again")
            except (ServiceUnavailable, NoRoom) as error:
                if self.outage is None:
                    logger.error("redis is not available: %s", error.detail)
                self.outage = error.detail
                await asyncio.sleep(OUTAGE_PAUSE_S)
                continue  # less than the time in which nobody writes to a promoted replica: who knows more says so then
            # Of a file or a new socket; or of a read of several runs, where `_watch` drops the one that it is about.
            except (OSError, Unreadable) as error:
                logger.error("background work is tried again job=%s: %s", job.__name__, error)
                await asyncio.sleep(OUTAGE_PAUSE_S)
            await asyncio.sleep(period_s)

    async def _work(self, run: Run, work: Work) -> None:
        """Do work for one run; its faults must not stop the work for other runs."""
        lost_before = run.journal.lost
        try:
            if awaitable := work():
                await awaitable
            if lost_before and run.journal.lost is None:
                logger.warning("redis has the data of the run again run=%s", run.name)
        except NotLeader as error:
            logger.warning("not the leader any more run=%s: %s", run.name, error.detail)
        except (LedgerGap, Unreadable) as error:
            # Trimmed by the leader, or lost by a relaxed Redis. If the load fails again, `unreadable` reports it.
            logger.warning("run is loaded again run=%s: %s", run.name, error.detail)
            self._drop(run, forget=self.store.connection.policy.level == "relaxed")
        except DataLost as error:
            if await self.store.runs.is_deleted(run.name):  # by the leader; `_delete` has not seen it yet
                self._drop(run, forget=True)
                return
            run.journal.lose(error)
            run.journal.become_follower(None)
            run.journal.notify()

    async def _work_each(self, works: Iterable[tuple[Run, Work]]) -> list[ServiceUnavailable]:
        """Do work for several runs in turn; return the outages of nodes of a cluster, which concern their runs only."""
        return await do_in_turn((functools.partial(self._work, *work) for work in works), pass_outages=self._spread)

    async def _hold(self) -> None:
        if changed := await self._leadership.hold(self.runs):
            outages = await self._work_each((run, run.read_streams) for run in changed)
            self._added.set()  # follow them closely again
            raise_first(outages)

    async def _seek(self) -> None:
        runs = [run for run in await self._leadership.next_free() if self.runs.get(run.name) is run]
        await do_all(self._work(run, functools.partial(self._leadership.seek, run)) for run in runs)

    async def _share(self) -> None:
        """Say that we live, and hand over one run that another server should lead."""
        if chosen := await self._balance.next([*self.runs.values()]):
            await self._work(chosen[0], functools.partial(self._leadership.hand_over, *chosen))

    async def _follow(self) -> None:
        """Read what leaders write, and the groups that producers write directly to runs led here."""
        self._added.clear()
        known = {run.name: run.journal.ends for run in self._busy.list() if run.written_by_others}
        if not known:
            with contextlib.suppress(TimeoutError):  # we may lose the lead of a run meanwhile
                async with asyncio.timeout(FOLLOW_TIMEOUT_S):
                    await self._added.wait()
            return
        news = asyncio.create_task(self.store.streams.wait_for_entries(known, FOLLOW_TIMEOUT_S))
        added = asyncio.create_task(self._added.wait())
        try:
            await asyncio.wait((news, added), return_when=asyncio.FIRST_COMPLETED)
            # The read does not cover the streams of a run that was added meanwhile: start again with them.
            names = await news if news.done() else []
        finally:
            await cancel_all([task for task in (news, added) if not task.done()])
        raise_first(await self._work_each((run, run.read_streams) for run in map(self.runs.get, names) if run))

    async def _tick(self) -> None:
        raise_first(await self._work_each((run, run.tick) for run in self._ticking.next(self.runs)))

    async def _watch(self) -> None:
        """Check that Redis kept what it acknowledged; read the tickets and counters that others wrote."""
        serving = self.store.runs.serving
        runs = self._watching.next(self.runs) if serving == self._checked_on else [*self.runs.values()]
        ends = await self.store.streams.read_ends([run.name for run in runs])
        checks = [functools.partial(run.check_ends, shown) for run, shown in zip(runs, ends, strict=True)]
        outages = await self._work_each(zip(runs, checks, strict=True))
        if not outages:  # else all are checked again
            self._checked_on = serving
        outages += await self._work_each(await read_side_states(self.store, runs, shared=self._servers.any))
        if (known := self.store.connection.known).unsynced:
            await asyncio.to_thread(known.sync)
        raise_first(outages + await self._discover())

    async def _prepare(self) -> None:
        """Prepare the next batches, one run at a time: nobody waits for them, and they may take much memory."""
        async for run in in_turns(self._busy):
            await run.batches.next_batch.work()

    async def _discover(self) -> list[ServiceUnavailable]:
        """Open runs that others created, or that we know and Redis does not list; return the outages of nodes."""
        names = {*await self.store.runs.list_names(), *self.store.connection.known.runs} - self.runs.keys()
        works = (functools.partial(self._discover_one, name) for name in sorted(names))
        return await do_in_turn(works, pass_outages=self._spread)

    async def _discover_one(self, name: str) -> None:
        # `unreadable` reports what cannot be read, and the next call retries; `_delete` removes a deleted run. A lead
        # that is lost as it begins is sought again.
        with contextlib.suppress(DataLost, LedgerGap, Gone, NotLeader):
            async with self._opening:
                await self._open(name)

    async def _delete(self) -> None:
        """Delete the keys of deleted runs. Every server does this: the one that was asked may have died meanwhile."""
        async with self._opening:  # no run of these names, restored meanwhile, is opened before the old one is dropped
            marks = await self.store.runs.read_deletions()
            for name in marks:
                if name in self.runs:
                    self._drop(self.runs[name])
                self.store.connection.known.forget(name)
        for name, mark in marks.items():
            try:
                groups = await self.store.delete_run(name, mark)
            except Unreadable as error:
                self.unreadable.record_failure(name, error)
                continue
            except (DataLost, LedgerGap):
                pass  # another server has just deleted the keys
            else:
                logger.info("run deleted run=%s groups=%s", name, "by another server" if groups is None else groups)
            if name not in self.runs:
                self.traffic.forget(name)
                self.unreadable.record_success(name)

    async def _measure(self) -> None:
        before, self.report = self.report, await self.store.connection.report()
        log_durability(before, self.report)
        for run in self.runs.values():
            run.durability = self.report.durability
