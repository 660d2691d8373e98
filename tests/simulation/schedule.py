"""One schedule: two servers, producers and a trainer in a hostile world, from its seed alone, judged at the end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import logging
import sys
import warnings
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx  # noqa: F401 - imported in a schedule, it would keep the clock of that world, and so all that it had
import msgspec

from replaybuf.backup import target
from replaybuf.service import host, loop_watch, turns
from replaybuf.service.host import Service
from replaybuf.service.peers import balance, living_servers
from replaybuf.service.run.append import appends
from replaybuf.store import keys
from replaybuf.store.redis import attention, awake
from replaybuf.wire.config import RunConfig
from tests.chaos.history import Event
from tests.simulation.beside import Reader, operate, stage
from tests.simulation.copying import CopiedRun
from tests.simulation.coverage import Reached
from tests.simulation.direct import DirectProducer, DirectRank
from tests.simulation.disturbing import Disturber
from tests.simulation.http.client import HttpCalls, instead_of_http
from tests.simulation.judging import judge
from tests.simulation.looking import Observer, Rest, of_history
from tests.simulation.loop import Node
from tests.simulation.losing import LostRun
from tests.simulation.losing_bucket import LostBucket
from tests.simulation.mix import CLUSTER, TICKET_TTL_S
from tests.simulation.orphans import find_orphans
from tests.simulation.plan import Plan
from tests.simulation.producer_calls import ProducerCalls, ServiceCalls
from tests.simulation.producing import Producer
from tests.simulation.redis_model.connections import instead_of_sockets
from tests.simulation.redis_model.functions import take_branches
from tests.simulation.redis_model.redis import delete_key, start_redis
from tests.simulation.servers import Client, Gone, Server, folders
from tests.simulation.small_run import SmallRun
from tests.simulation.training import Trainer
from tests.simulation.world import RUN, World

PRODUCERS = 3
PROGRESS_STEPS = 2
PROGRESS_S = 40.0
"""After the last fault a run must train so many steps within this time."""
ENDED_S = 40.0
"""After the last fault the small runs must come to their ends within this time."""
SETTLED_S, FOLLOWED_S = 20.0, 1.2
"""By then no server stands still or serves a call of a client that has left; so long after that, followers have read
the leader's tickets, which they do once a second."""
RESTARTED_S = 6.0
"""By then a new leader works."""
CLEANED_UP_S = 1.2
"""By then a new leader has cleaned up."""
KEEP, KEEP_MANY = 2, 4
"""Checkpoints that stay resumable, without and with many rewinds."""


class Outcome(msgspec.Struct, frozen=True):
    """Result of a schedule: what is wrong, the faults by number, each with its time and kind, and what it reached.

    `trace`: if there was a failure, or someone asked for it.
    """

    plan: Plan
    violations: list[str]
    trace: list[str]
    faults: dict[int, tuple[float, str]]
    reached: Reached


def simulate(plan: Plan, *, traced: bool = False) -> Outcome:
    """Run a schedule."""
    collecting, hook = gc.isenabled(), sys.unraisablehook
    gc.disable()  # when it runs depends on the memory of the process, and it closes generators
    gc.freeze()  # collecting at the end looks at objects of the schedule only
    sys.unraisablehook = lambda unraisable: None  # of `finally` blocks that are dropped without a loop
    try:
        with _quiet():
            outcome = Schedule(plan).run(traced=traced)
            with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # of coroutines that never began
                for _ in range(2):  # what dropped `finally` blocks held is found by the second only
                    gc.collect()
        return outcome
    finally:
        gc.unfreeze()
        sys.unraisablehook = hook
        if collecting:
            gc.enable()


def digest(trace: list[str]) -> str:
    """Return the hash of a trace: one seed has one hash, in every process."""
    return hashlib.sha256("\n".join(trace).encode(errors="replace")).hexdigest()


class Schedule:
    """Actors and faults of one schedule. `history`: what clients saw, for the checker of chaos."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.world = World(plan)
        self.history: list[Event] = []
        self.wrong: list[str] = []
        self._servers: list[Server] = []

    def run(self, *, traced: bool) -> Outcome:
        """Run it to its end, and judge it."""
        world = self.world
        with world.instead_of_python(), self._settings(), folders(world.mix.servers + 1) as places:
            world.folder = str(places[0].parent)
            try:
                world.loop.run_until_complete(self._run(places))
            except Exception as error:  # noqa: BLE001 - a failed schedule is a result
                self.wrong.append(f"the schedule ended with {error!r}")
            self.wrong += [*world.wrong, *world.loop.errors]
            for server in self._servers:
                self.wrong += server.crashes
            jumped = any(kind == "jump" for _, kind in world.faults.happened.values())
            try:
                self.wrong += judge(of_history(self.history), world.mix, jumped=jumped)
            except Exception as error:  # noqa: BLE001 - of a history that no service could have
                self.wrong.append(f"the judge ended with {error!r}")
            trace = world.trace() if traced or self.wrong else []
            world.coverage.reached.branches = take_branches()
            outcome = Outcome(self.plan, self.wrong, trace, world.faults.happened, world.coverage.reached)
            world.loop.discard()
        return outcome

    @contextlib.contextmanager
    def _settings(self) -> Iterator[None]:
        """Draw how often long work gives others a turn, and what runs in a thread; wake idle jobs less often."""
        rng = self.world.rng
        with (
            instead_of_sockets(self.world),
            instead_of_http(self.world),
            mock.patch.object(loop_watch, "PERIOD_S", 1.0),
            mock.patch.object(host, "TICK_S", self.world.mix.tick_s),
            mock.patch.object(host, "PREPARE_PERIOD_S", self.world.mix.tick_s),
            mock.patch.object(host, "FOLLOW_PERIOD_S", 0.05),
            mock.patch.object(living_servers, "STEADY_S", 1.0),
            mock.patch.object(balance, "AGAIN_S", 1.0),
            mock.patch.object(target, "LEASE_S", 3.0),
            mock.patch.object(appends, "SWEEP_PERIOD_S", 1.5),
            mock.patch.object(attention, "ALERT_S", 2.0),  # a modelled failover takes as long
            mock.patch.object(awake, "FIRST_PAUSE_S", 0.02),
            mock.patch.object(turns, "TURN_S", rng.choice((-1.0, turns.TURN_S))),
            mock.patch.object(turns, "FEW", rng.choice((0, turns.FEW))),
        ):
            yield

    # ------------------------------------------------------------------ the schedule

    async def _run(self, places: list[Path]) -> None:
        world, mix = self.world, self.world.mix
        redis = start_redis(world, world.rng.choice(("always", "everysec")))
        kept, frames = mix.history_groups, places.pop()
        frames.mkdir()
        self._servers = [Server(world, redis, f"server{at}", place, kept) for at, place in enumerate(places)]
        await self._create(frames)
        stopping, resting = asyncio.Event(), asyncio.Event()
        names = [f"producer{at}" for at in range(PRODUCERS)]
        producers = [self._start(name, self._producer(name).work(stopping)) for name in names]
        direct = DirectRank(redis) if mix.direct else None
        trainer = Trainer(world, self._client("trainer"), RUN, self.history, KEEP_MANY if mix.rewinds else KEEP, direct)
        training = [self._start("trainer", trainer.work(resting))]
        observers = [Observer(world, self._client("observer"), RUN, server, self.history) for server in self._servers]
        others = [self._start("observer", observer.work(stopping)) for observer in observers]
        if mix.staged:
            training.append(self._start("stage", stage(world, self._client("stage"), RUN, resting)))
        reader = Reader(world, self._client("reader"), RUN, self.history)
        if mix.reads:
            await reader.open()
            others.append(self._start("reader", reader.work(stopping)))
        if mix.revises:
            others.append(self._start("operator", operate(world, self._client("operator"), RUN, stopping)))
        if mix.direct:
            writer = DirectProducer(world, self._client("writer"), RUN, redis, self.history)
            others.append(self._start("writer", writer.work(stopping)))
        copied = CopiedRun(world, self._client("copier"), redis, places[0].parent / "copied" if mix.spills else None)
        copying = self._start("copier", copied.work()) if mix.copies else None
        losing_kind = LostBucket if mix.redis == CLUSTER else LostRun
        losing = losing_kind(world, self._client("loser"), redis, self._servers, self.history)
        lost = self._start("loser", losing.work()) if mix.loses else None
        await Disturber(world, self.history, redis, self._servers).work(world.faults_s)
        await self._see_progress(trainer)
        for task, run in ((copying, copied), (lost, losing)):
            if task:
                await self._see_end(task, run)
        stopping.set()
        await asyncio.gather(*producers, *others)
        await self._settle()
        rest = Rest(world, self._client("rest"), RUN, redis, self.history)
        await rest.drain()
        resting.set()
        await asyncio.gather(*training)
        await rest.attach()
        last = observers[0]
        await last.look()
        await rest.send_again()
        await last.look()
        await last.follow_groups(last=True)
        await rest.read_payloads()
        if mix.reads:
            await reader.read_to_the_end()
        await self._settle()
        await rest.look(last, "before")
        for server in self._servers:
            server.kill()
        delete_key(redis, keys.lead(RUN))  # as after the wait for the end of its lease
        await self._see_leader()
        await rest.look(last, "after")
        await rest.fold()
        rest.fill_ledger()
        copied.check_nothing_is_left()
        self.wrong += copied.wrong + losing.wrong + find_orphans(redis, RUN)

    async def _settle(self) -> None:
        """Wait until servers are settled, and followers know what changed before."""
        ends_s = self.world.now_s() + SETTLED_S
        while any(server.unsettled for server in self._servers) and self.world.now_s() < ends_s:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await asyncio.sleep(FOLLOWED_S)

    async def _see_end(self, work: asyncio.Task[None], run: SmallRun) -> None:
        """Check that a small run comes to its end, a bounded time after the last fault."""
        await asyncio.wait({work}, timeout=ENDED_S)
        if not work.done():
            self.wrong.append(f"{run.stage} of run {run.name} takes over {ENDED_S:g} s after the last fault")
            work.cancel()
        elif error := work.exception():
            self.wrong.append(f"{run.stage} of run {run.name} ended with {error!r}")

    async def _see_leader(self) -> None:
        """Wait until a server leads after the restart, and has cleaned up."""
        ends_s = self.world.now_s() + RESTARTED_S
        while not any(RUN in server.leads for server in self._servers) and self.world.now_s() < ends_s:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        await asyncio.sleep(CLEANED_UP_S)

    def _client(self, name: str) -> Client:
        return Client(self._servers, Node(name))

    def _start(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self.world.on(Node(name), self.world.loop.create_task, work)

    def _producer(self, name: str) -> Producer:
        calls: ProducerCalls = ServiceCalls(self._client(name), RUN)
        if self.world.mix.http:
            calls = HttpCalls(self.world, RUN, [server.url for server in self._servers])
        return Producer(self.world, calls, name, self.history, TICKET_TTL_S)

    async def _create(self, frames: Path) -> None:
        config = msgspec.convert(self.world.mix.config(frames), RunConfig)

        async def work(service: Service, gone: Gone) -> None:
            await service.create(RUN, config, if_absent=True)

        created = await self._client("operator").observe(RUN, work)
        if created.seen["outcome"] != "ok":
            raise TimeoutError(f"the run was not created: {created.seen}")

    async def _see_progress(self, trainer: Trainer) -> None:
        """Check that the run trains again, a bounded time after the last fault."""
        wanted, ends_s = trainer.steps + PROGRESS_STEPS, self.world.now_s() + PROGRESS_S
        while trainer.steps < wanted and self.world.now_s() < ends_s:  # noqa: ASYNC110 - the clock is virtual
            await asyncio.sleep(0.05)
        if trainer.steps < wanted:
            done = PROGRESS_STEPS - (wanted - trainer.steps)
            self.wrong.append(f"{done} steps were trained in {PROGRESS_S:g} s after the last fault")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
