"""All runs of one server, and what goes on in the background.

Life: `Service.start` -> requests -> `stop`. Background work runs in one TaskGroup of the lifespan: following the index
streams, expiring tickets, renewing leases, deleting freed payloads, watching the embedded server. Trouble with Redis
is waited out and logged; any other fault in the background stops the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec

from replaybuf.config import RunConfig, check_run_name
from replaybuf.errors import Conflict, Fenced, Invalid, NoRoom, NotFound, NotLeader, ServiceUnavailable
from replaybuf.service.run import Run
from replaybuf.store import EmbeddedServer, ServerReport, Store, Wanted
from replaybuf.store.durability import Level

logger = logging.getLogger(__name__)

LEASE_S = 3.0
TICK_S = 0.25
FOLLOW_TIMEOUT_S = 1.0
REPORT_PERIOD_S = 10.0
TROUBLE_PAUSE_S = 0.5


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a server runs: where it listens, where its data lies or which Redis it uses, who may call, and what every
    acknowledged write is to survive (`Wanted`).
    """

    host: str = "127.0.0.1"
    port: int = 8900
    data_dir: str | None = None
    redis_url: str | None = None
    tokens_file: str | None = None
    durability: Level = "strict"
    wait_replicas: int = 0
    wait_timeout_s: float = 2.0


class Service:
    """The runs of one Redis, as one server sees them. Runs that another server leads are refused with `NotLeader`."""

    def __init__(self, store: Store, *, embedded: bool, clock: Callable[[], float] = time.time) -> None:
        self.store = store
        self.runs: dict[str, Run] = {}
        self.holder = f"{socket.gethostname()}:{os.getpid()}"
        self.report: ServerReport | None = None
        self.trouble: str | None = None
        self._embedded = embedded
        self._clock = clock
        self._led_elsewhere: dict[str, str] = {}
        self._creating = asyncio.Lock()

    # ------------------------------------------------------------------ runs

    def run(self, name: str) -> Run:
        """Return a run. Raises `NotFound`, or `NotLeader` naming the server that leads it."""
        check_run_name(name)
        if name in self.runs:
            return self.runs[name]
        if name in self._led_elsewhere:
            raise NotLeader(
                f"run {name} is led by {self._led_elsewhere[name]}; ask that server, or wait until its lease ends",
                name="leader",
                value=self._led_elsewhere[name],
            )
        raise NotFound(f"run {name!r} does not exist; create it with PUT /v1/runs/{name}", name="run", value=name)

    async def create(self, name: str, config: RunConfig) -> tuple[Run, bool]:
        """Create a run, or return it where it exists with this very configuration. Raises `Conflict` otherwise."""
        check_run_name(name)
        async with self._creating:
            existing = self.runs.get(name)
            if existing is None:
                if name in self._led_elsewhere:
                    self.run(name)
                lease = await self.store.lead(name, self.holder, int(LEASE_S * 1000), force=self._embedded)
                if lease.token is None:
                    self._led_elsewhere[name] = lease.holder
                    self.run(name)
                run = await Run.create(name, self.store, str(lease.token), config, self._clock)
                self._lead(run)
                logger.info("run created run=%s strategy=%s", name, config.strategy.name)
                return run, True
        fields = existing.same_config(config)
        if fields:
            raise Conflict(
                f"run {name!r} exists with another configuration; fields that differ: {', '.join(fields)}",
                name="config",
                value=fields,
                bound="the same, or strategy, filters and limits by PATCH",
            )
        return existing, False

    def _lead(self, run: Run) -> None:
        run.durability = self.report.durability if self.report else "relaxed"
        self.runs[run.name] = run
        self._led_elsewhere.pop(run.name, None)

    async def _load_or_follow(self, name: str) -> None:
        lease = await self.store.lead(name, self.holder, int(LEASE_S * 1000), force=self._embedded)
        if lease.token is None:
            self._led_elsewhere[name] = lease.holder
            return
        started = time.monotonic()
        run = await Run.load(name, self.store, lease.token, self._clock)
        if run is None:
            return
        self._lead(run)
        logger.info(
            "run loaded run=%s groups=%d step=%d seconds=%.2f",
            name,
            run.state.stored,
            run.state.step,
            time.monotonic() - started,
        )

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Load every run that this server may lead."""
        await self._measure()
        for name in await self.store.runs():
            await self._load_or_follow(name)

    async def stop(self) -> None:
        """Wake all waiters and give the leases back."""
        for run in self.runs.values():
            await run.close()
        with contextlib.suppress(ServiceUnavailable):
            for run in self.runs.values():
                await self.store.resign(run.name, self.holder)

    @contextlib.asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Do the background work while the body runs."""
        async with asyncio.TaskGroup() as tasks:
            jobs = [
                self._repeat(self._follow, 0.0),
                self._repeat(self._tick, TICK_S),
                self._repeat(self._renew, LEASE_S / 3),
                self._repeat(self._measure, REPORT_PERIOD_S),
            ]
            running = [tasks.create_task(job) for job in jobs]
            try:
                yield
            finally:
                for task in running:
                    task.cancel()

    async def _repeat(self, job: Callable[[], Awaitable[None]], period_s: float) -> None:
        """Run `job` every `period_s`; trouble with Redis is told once, waited out, and told when it is over."""
        while True:
            try:
                await job()
                if self.trouble:
                    self.trouble = None
                    await self.store.prepare()
                    logger.info("redis answers again")
            except (ServiceUnavailable, NoRoom) as error:
                if self.trouble is None:
                    logger.error("waiting for redis: %s", error.detail)
                self.trouble = error.detail
                await asyncio.sleep(TROUBLE_PAUSE_S)
            await asyncio.sleep(period_s)

    async def _follow(self) -> None:
        """Take in groups that producers wrote to Redis directly."""
        if not self.runs:
            await asyncio.sleep(TICK_S)
            return
        behind = {name: run.state.stored for name, run in self.runs.items()}
        for name in await self.store.wait_for_groups(behind, FOLLOW_TIMEOUT_S):
            if name in self.runs:
                await self._leading(self.runs[name], self.runs[name].door.pull)

    async def _tick(self) -> None:
        for run in list(self.runs.values()):
            await self._leading(run, run.tick)

    async def _renew(self) -> None:
        for run in list(self.runs.values()):
            lease = await self.store.lead(run.name, self.holder, int(LEASE_S * 1000))
            if lease.token != run.journal.token:
                await self._lose(run, lease.holder)
        for name in list(self._led_elsewhere):
            await self._load_or_follow(name)
        for name in await self.store.runs():
            if name not in self.runs and name not in self._led_elsewhere and not self._creating.locked():
                await self._load_or_follow(name)

    async def _leading(self, run: Run, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Fenced as error:
            logger.error("lead lost run=%s: %s", run.name, error.detail)
            await self._lose(run, "another server")

    async def _lose(self, run: Run, holder: str) -> None:
        """Stop deciding for a run: its state is read anew when the lead comes back."""
        logger.warning("run is led elsewhere now run=%s holder=%s", run.name, holder)
        self.runs.pop(run.name, None)
        self._led_elsewhere[run.name] = holder
        await run.close()

    async def _measure(self) -> None:
        before, self.report = self.report, await self.store.report()
        _tell_durability(before, self.report)
        for run in self.runs.values():
            run.durability = self.report.durability


def _tell_durability(before: ServerReport | None, now: ServerReport) -> None:
    """Log what is weaker than wanted, at the start and when it changes."""
    if before and (before.summary, before.reasons) == (now.summary, now.reasons):
        return
    level = logging.WARNING if now.wanted.level == "strict" else logging.INFO
    for reason in now.reasons:
        logger.log(level, "durability is %s, wanted is %s: %s", now.durability, now.wanted.level, reason)
    if before:
        logger.log(logging.INFO if not now.reasons else level, "durability is %s now", now.summary)


@contextlib.asynccontextmanager
async def opened(options: ServeOptions) -> AsyncIterator[Service]:
    """Bring a service up on its Redis, do its background work, take it down in order.

    Raises `ServiceUnavailable`, `UnsupportedServer`, `Conflict` where Redis or the data folder does not serve, and
    `Invalid` for options that cannot hold.
    """
    wanted = Wanted(options.durability, options.wait_replicas, options.wait_timeout_s)
    if not options.redis_url and wanted.replicas:
        raise Invalid(
            f"wait_replicas is {wanted.replicas}; the embedded Valkey has no replicas: use --redis-url",
            name="wait_replicas",
            value=wanted.replicas,
            bound=0,
        )
    data_dir = Path(options.data_dir or ".replaybuf/data")
    server = None if options.redis_url else EmbeddedServer(data_dir, options.durability)
    if server:
        await server.start()
    store = None
    try:
        store = await Store.open(server.url if server else str(options.redis_url), wanted)
        service = Service(store, embedded=server is not None)
        await service.start()
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(server.watch()) if server else None
            try:
                async with service.working():
                    yield service
            finally:
                await service.stop()
                if watching:
                    watching.cancel()
    finally:
        if store:
            await store.close()
        if server:
            await server.stop()
