"""Faults of processes: servers are killed, stopped and ended, clocks jump, Redis crashes; then everything heals."""

from __future__ import annotations

import asyncio
from typing import cast

from replaybuf.store import keys
from tests.chaos.history import Event, Faulted, Healed
from tests.simulation.copying import COPIED_RUN
from tests.simulation.failing_over import KIND, Failover
from tests.simulation.loop import WORLD
from tests.simulation.redis_model.cluster import RedisCluster
from tests.simulation.redis_model.layout import slot_of
from tests.simulation.redis_model.redis import Redis, delete_key
from tests.simulation.redis_model.sentinel_group import SentinelGroup
from tests.simulation.redis_model.server import RedisServer
from tests.simulation.servers import LONGEST_STOP_S, Server
from tests.simulation.world import RUN, World

LONGEST_AWAY_S = 2.0
CRASHES_AGAIN, SHORTEST_UP_S, LONGEST_UP_S = 0.3, 3.0, 8.0
"""Share of crashes of a node with two replicas that it repeats, and after which time: one replica may follow it again,
and the other one may not."""
JUMP_S = 3600.0


class Disturber:
    """Hurts servers and Redis for a while, then heals everything."""

    def __init__(self, world: World, history: list[Event], redis: Redis, servers: list[Server]) -> None:
        self._world, self._rng, self._history = world, world.rng, history
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
        if kind == KIND and not self._world.mix.can_fail_over:
            return
        if not self._world.faults.take(kind, self._world.now_s()):
            return
        self._world.note(f"fault: {kind} {server.name}", node=WORLD)
        name, role = server.name, "leader" if led else "standby"
        if kind in ("crash", "pause", "cut", "lease", "full", "move", "sentinels", KIND):
            name, role, led = "valkey", "valkey", []
        fault = Faulted(at_s=self._world.now_s(), process=name, role=role, kind=kind, server=server.url, led=led)
        self._history.append(fault)
        await getattr(self, f"_{kind}")(server)
        self._history.append(Healed(at_s=self._world.now_s(), process=name))

    async def _kill(self, server: Server) -> None:
        self._world.coverage.add_tasks(self._world.loop.tasks_of(server.node))
        server.kill()

    async def _end(self, server: Server) -> None:
        """End a process in order. Its calls may take seconds to end, in which it tells the others nothing."""
        if self._world.may_hurt(server.node):
            server.stop()

    async def _stop(self, server: Server) -> None:
        """Stop a process, longer than its lease lasts at times."""
        node = server.node
        if not self._world.may_hurt(node):
            return
        node.stopped = True
        await asyncio.sleep(self._rng.uniform(0.5, LONGEST_STOP_S))
        self._world.note("goes on", node=node)
        self._world.loop.go_on(node)

    async def _handover(self, server: Server) -> None:
        """Let each server hand over what it believes to lead, to any server, or to itself."""
        for leader in self._servers:
            leader.hand_over(self._rng.choice(self._servers))

    async def _jump(self, server: Server) -> None:
        server.wall_ahead_s += self._rng.uniform(-JUMP_S, JUMP_S)
        server.node.wall_ahead_s = server.wall_ahead_s

    async def _crash(self, server: Server) -> None:
        redis = self._redis.pick()
        await self._crash_once(redis)
        if self._world.mix.replicas > 1 and self._rng.random() < CRASHES_AGAIN:
            await asyncio.sleep(self._rng.uniform(SHORTEST_UP_S, LONGEST_UP_S))
            await self._crash_once(redis)

    async def _crash_once(self, redis: RedisServer) -> None:
        if redis.node.dead or redis.replaced:
            return
        redis.crash()
        await asyncio.sleep(self._rng.uniform(0.1, LONGEST_AWAY_S))
        redis.start()

    async def _pause(self, server: Server) -> None:
        redis = self._redis.pick()
        node = redis.node
        if redis.replaced:
            return
        node.stopped = True
        await asyncio.sleep(self._rng.uniform(0.5, LONGEST_STOP_S))
        self._world.loop.go_on(node)

    async def _full(self, server: Server) -> None:
        """Let Redis refuse commands that need memory: payloads, and a restore."""
        redis = self._redis.pick()
        redis.full = True
        await asyncio.sleep(self._rng.uniform(0.5, LONGEST_STOP_S))
        redis.full = False

    async def _failover(self, server: Server) -> None:
        await Failover(self._world, self._redis, self._servers, self._history).work()

    async def _cut(self, server: Server) -> None:
        for link in list(self._redis.pick().links):
            if self._rng.random() < 0.7:
                link.cut()

    async def _move(self, server: Server) -> None:
        """Move the slot of the main run, or of one of its buckets, to another node of a cluster."""
        bucket = self._rng.randrange(keys.BUCKETS)
        name = self._rng.choice((keys.counts(RUN), keys.written(RUN, bucket)))
        await cast(RedisCluster, self._redis).move(slot_of(name.encode()))

    async def _sentinels(self, server: Server) -> None:
        """Stop some sentinels, or all: without most of them there is no failover."""
        sentinels = cast(SentinelGroup, self._redis).sentinels
        stopped = [
            one for one in self._rng.sample(sentinels, self._rng.randint(1, len(sentinels))) if not one.node.stopped
        ]
        for sentinel in stopped:
            sentinel.node.stopped = True
        await asyncio.sleep(self._rng.uniform(0.5, LONGEST_STOP_S))
        for sentinel in stopped:
            self._world.loop.go_on(sentinel.node)

    async def _lease(self, server: Server) -> None:
        run = self._rng.choice((RUN, COPIED_RUN)) if self._world.mix.copies else RUN
        delete_key(self._redis, keys.lead(run))
