"""One schedule: two servers, producers and a trainer in a hostile world, from its seed alone, judged at the end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from replaybuf.service import host, loop_watch, turns
from replaybuf.service.host import Service
from replaybuf.store.redis import awake
from replaybuf.wire.config import RunConfig
from tests.chaos.checker import check
from tests.chaos.fault_checks import issued_too_early
from tests.chaos.history import AnyEvent, Event, Faulted, Healed
from tests.chaos.run_history import RunHistory
from tests.chaos.runs import REPLAY
from tests.simulation.looking import Observer, Rest, of_history
from tests.simulation.loop import WORLD, Node
from tests.simulation.producing import Producer
from tests.simulation.redis_model.server import RedisServer
from tests.simulation.servers import Client, Gone, Server, folders
from tests.simulation.training import Trainer
from tests.simulation.world import World

PRODUCERS = 3
FAULTS_S = 10.0
PROGRESS_STEPS = 2
PROGRESS_S = 40.0
"""After the last fault a run must train so many steps within this time."""
TICKET_TTL_S = 3.0
LONGEST_STOP_S = 7.0
LONGEST_AWAY_S = 2.0
JUMP_S = 3600.0
SETTLED_S = 2.5
"""By then no call of a client that has left is served any more, and followers have read the leader's tickets."""
RESTARTED_S = 8.0
"""By then the leases of the killed servers have ended, and the next leader has cleaned up."""
RUN = "run"
KEEP = 2


class Outcome(msgspec.Struct, frozen=True):
    """Result of a schedule: what is wrong, and the trace if there was a failure or someone asked for it."""

    seed: int
    violations: list[str]
    trace: list[str]
    faults: dict[str, int]


def simulate(seed: int, *, traced: bool = False) -> Outcome:
    """Run the schedule of a seed."""
    collecting, hook = gc.isenabled(), sys.unraisablehook
    gc.disable()  # when it runs depends on the memory of the process, and it closes generators
    gc.freeze()  # collecting at the end looks at objects of the schedule only
    sys.unraisablehook = lambda unraisable: None  # of `finally` blocks that are dropped without a loop
    try:
        outcome = Schedule(seed).run(traced=traced)
        gc.collect()  # while nobody hears what the dropped `finally` blocks raise
        return outcome
    finally:
        gc.unfreeze()
        sys.unraisablehook = hook
        if collecting:
            gc.enable()


class Schedule:
    """Actors and faults of one schedule. `history`: what clients saw, for the checker of chaos."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        self.history: list[Event] = []
        self.wrong: list[str] = []
        self.counts: dict[str, int] = {}
        self._calm_s = 0.0
        self._servers: list[Server] = []

    def run(self, *, traced: bool) -> Outcome:
        """Run it to its end, and judge it."""
        world = self.world
        with world.instead_of_python(), _quiet(), self._settings(), folders(2) as places:
            try:
                world.loop.run_until_complete(self._run(places))
            except Exception as error:  # noqa: BLE001 - a failed schedule is a result
                self.wrong.append(f"the schedule ended with {error!r}")
            self.wrong += [*world.wrong, *world.loop.errors]
            for server in self._servers:
                self.wrong += server.crashes
            self.wrong += self._judge(of_history(self.history))
            trace = world.trace() if traced or self.wrong else []
            outcome = Outcome(world.seed, self.wrong, trace, self.counts)
            world.loop.discard()
        return outcome

    def _judge(self, history: list[AnyEvent]) -> list[str]:
        """Return violations of the guarantees, by the checker of chaos."""
        # The next leader takes a deadline from the wall clock of the last one; where they differ it is an estimate.
        estimated = set(issued_too_early(RunHistory(history))) if self.counts.get("jump") else set()
        return [f"{found.guarantee}: {found.what}" for found in check(history) if found.what not in estimated]

    @contextlib.contextmanager
    def _settings(self) -> Iterator[None]:
        """Draw how often long work gives others a turn, and what runs in a thread; wake idle jobs less often."""
        rng = self.world.rng
        with (
            mock.patch.object(loop_watch, "PERIOD_S", 1.0),
            mock.patch.object(host, "PREPARE_PERIOD_S", 0.25),
            mock.patch.object(host, "FOLLOW_PERIOD_S", 0.05),
            mock.patch.object(awake, "FIRST_PAUSE_S", 0.02),
            mock.patch.object(turns, "TURN_S", rng.choice((-1.0, turns.TURN_S))),
            mock.patch.object(turns, "FEW", rng.choice((0, turns.FEW))),
        ):
            yield

    # ------------------------------------------------------------------ the schedule

    async def _run(self, places: list[Path]) -> None:
        world, rng = self.world, self.world.rng
        redis = RedisServer(world, fsync=rng.choice(("always", "everysec")))
        kept = rng.choice((8, 40, 100_000))
        self._servers = [Server(world, redis, f"server{at}", place, kept) for at, place in enumerate(places)]
        await self._create()
        stopping, resting = asyncio.Event(), asyncio.Event()
        producers = [self._start(f"producer{at}", self._produce(f"producer{at}", stopping)) for at in range(PRODUCERS)]
        trainer = Trainer(world, self._client("trainer"), RUN, self.history, KEEP)
        training = self._start("trainer", trainer.work(resting))
        observers = [Observer(world, self._client("observer"), RUN, server, self.history) for server in self._servers]
        looking = [self._start("observer", observer.work(stopping)) for observer in observers]
        await Disturber(self, redis, self._servers).work(FAULTS_S)
        await self._see_progress(trainer)
        stopping.set()
        await asyncio.gather(*producers, *looking)
        await asyncio.sleep(SETTLED_S)
        rest = Rest(world, self._client("rest"), RUN, redis, self.history)
        await rest.drain()
        resting.set()
        await training
        await rest.attach()
        last = observers[0]
        await last.look()
        await rest.send_again()
        await last.look()
        await last.follow_groups(last=True)
        await rest.read_payloads()
        await asyncio.sleep(SETTLED_S)
        await rest.look(last, "before")
        for server in self._servers:
            server.kill()
        await asyncio.sleep(RESTARTED_S)
        await rest.look(last, "after")
        await rest.fold()

    def _client(self, name: str) -> Client:
        return Client(self._servers, Node(name))

    def _start(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self.world.on(Node(name), self.world.loop.create_task, work)

    async def _produce(self, name: str, stopping: asyncio.Event) -> None:
        producer = Producer(self.world, self._client(name), RUN, name, self.history, TICKET_TTL_S)
        await producer.work(stopping)

    async def _create(self) -> None:
        config = msgspec.convert(_config(self.world), RunConfig)

        async def work(service: Service, gone: Gone) -> None:
            await service.create(RUN, config, if_absent=True)

        created = await self._client("operator").observe(RUN, work)
        if created.seen["outcome"] != "ok":
            raise TimeoutError(f"the run was not created: {created.seen}")

    async def _see_progress(self, trainer: Trainer) -> None:
        """Check that the run trains again, a bounded time after the last fault."""
        wanted, ends_s = trainer.steps + PROGRESS_STEPS, self.world.now_s() + PROGRESS_S
        while trainer.steps < wanted and self.world.now_s() < ends_s:  # noqa: ASYNC110 - the clock is virtual
            await asyncio.sleep(0.5)
        if trainer.steps < wanted:
            done = PROGRESS_STEPS - (wanted - trainer.steps)
            self.wrong.append(f"{done} steps were trained in {PROGRESS_S:g} s after the last fault")


class Disturber:
    """Hurts servers and Redis for a while, then heals everything."""

    def __init__(self, schedule: Schedule, redis: RedisServer, servers: list[Server]) -> None:
        self._schedule, self._world, self._rng = schedule, schedule.world, schedule.world.rng
        self._redis, self._servers = redis, servers

    async def work(self, for_s: float) -> None:
        """Disturb for a time."""
        faults, ends_s = self._world.faults, self._world.now_s() + for_s
        faults.active, hurting = True, []
        while self._world.now_s() < ends_s:
            pause_s = for_s if faults.node_every_s is None else self._rng.expovariate(1 / faults.node_every_s)
            await asyncio.sleep(min(pause_s, max(0.0, ends_s - self._world.now_s())))
            if self._world.now_s() < ends_s:
                hurting.append(asyncio.create_task(self._hurt()))
        await asyncio.gather(*hurting)
        faults.active = False

    async def _hurt(self) -> None:
        server = self._rng.choice(self._servers)
        led = server.leads
        kind = self._rng.choice(self._world.faults.kinds)
        self._world.note(f"fault: {kind} {server.name}", node=WORLD)
        self._schedule.counts[kind] = self._schedule.counts.get(kind, 0) + 1
        name, role = server.name, "leader" if led else "standby"
        if kind in ("crash", "pause", "cut", "lease"):
            name, role, led = "valkey", "valkey", []
        fault = Faulted(at_s=self._world.now_s(), process=name, role=role, kind=kind, server=server.url, led=led)
        self._schedule.history.append(fault)
        await getattr(self, f"_{kind}")(server)
        self._schedule.history.append(Healed(at_s=self._world.now_s(), process=name))

    async def _kill(self, server: Server) -> None:
        server.kill()

    async def _end(self, server: Server) -> None:
        server.stop()

    async def _stop(self, server: Server) -> None:
        """Stop a process, longer than its lease lasts at times."""
        node = server.node
        node.stopped = True
        await asyncio.sleep(self._rng.uniform(0.5, LONGEST_STOP_S))
        self._world.note("goes on", node=node)
        self._world.loop.go_on(node)

    async def _jump(self, server: Server) -> None:
        server.wall_ahead_s += self._rng.uniform(-JUMP_S, JUMP_S)
        server.node.wall_ahead_s = server.wall_ahead_s

    async def _crash(self, server: Server) -> None:
        if self._redis.node.dead:
            return
        self._redis.crash()
        await asyncio.sleep(self._rng.uniform(0.1, LONGEST_AWAY_S))
        self._redis.start()

    async def _pause(self, server: Server) -> None:
        node = self._redis.node
        node.stopped = True
        await asyncio.sleep(self._rng.uniform(0.5, LONGEST_STOP_S))
        self._world.loop.go_on(node)

    async def _cut(self, server: Server) -> None:
        for link in list(self._redis.links):
            if self._rng.random() < 0.7:
                link.cut()

    async def _lease(self, server: Server) -> None:
        self._redis.values.delete(b"rb:{%s}:lead" % RUN.encode())
        self._redis.values.commit()


def _config(world: World) -> dict[str, Any]:
    rng = world.rng
    options: dict[str, Any]
    name, options = rng.choice(
        (("one-step-off-policy", {"max_staleness": 2}), ("on-policy", {}), ("replay", REPLAY | {"mix": {}}))
    )
    if not options.get("mix", True):
        del options["mix"]
    return {
        "strategy": {"name": name, "options": options},
        "batch": {"groups_per_batch": 4, "seq_len": 64},
        "group_size": 2,
        "vocab_size": 1000,
        "tickets": {"ttl_s": TICKET_TTL_S, "max_attempts": 3},
    }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
