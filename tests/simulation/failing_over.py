"""Fault: a replica of Redis with a shorter history takes over, until an operator brings the right server back."""

from __future__ import annotations

import asyncio

from replaybuf.errors import DataLost
from replaybuf.service.host import Service
from replaybuf.store import keys
from replaybuf.wire.answer.run_status import RunStatus
from tests.chaos.history import UNAVAILABLE, Event, OlderRedis
from tests.simulation.loop import Node
from tests.simulation.redis_model.redis import Redis
from tests.simulation.redis_model.server import RedisServer
from tests.simulation.redis_model.values import Saved
from tests.simulation.servers import LONGEST_STOP_S, Client, Gone, Server
from tests.simulation.world import RUN, World

KIND = "failover"
LONGEST_LAG_S = 3.0
REPORT_S = 10.0
"""Within this time each server that runs must report the loss."""
LONGEST_LOAD_S = 0.8
"""How long the load goes on after the last report."""
POLL_S = 0.1


class Failover:
    """Lets a replica take over that lacks what a server knows of the main run."""

    def __init__(self, world: World, redis: Redis, servers: list[Server], history: list[Event]) -> None:
        self._world, self._servers, self._history = world, servers, history
        self._group, self._redis = redis, redis.server_of(keys.counts(RUN))

    @property
    def _fit(self) -> bool:
        """Whether the server is well and still has the run: only then does the loss stop all its writes."""
        return self._redis.healthy and self._group.server_of(keys.counts(RUN)) is self._redis

    async def work(self) -> None:
        """Do it, unless nothing is missing in the replica after a while, or Redis itself is hurt."""
        if not self._fit:
            return
        replica = self._redis.values.copy()
        if not (knowing := await self._lags(ends_of(self._redis, RUN))):
            return
        with self._world.running(lambda: knowing.node):
            await self._take_over(replica)

    async def _take_over(self, replica: Saved) -> None:
        from_s = self._world.now_s()
        right = self._redis.take_over(replica)
        before = parts_of(self._redis, RUN)
        silent = await find_silent(self._world, self._servers, self._redis, RUN)
        await asyncio.sleep(self._world.rng.uniform(0.0, LONGEST_LOAD_S))
        after, until_s = parts_of(self._redis, RUN), self._world.now_s()
        self._redis.take_over(right)
        event = OlderRedis(
            at_s=until_s,
            run=RUN,
            from_s=from_s,
            right_s=self._world.now_s(),
            kind=KIND,
            written=sorted(name for name, part in before.items() if after[name] != part),
            silent=[server.url for server in silent],
        )
        self._history.append(event)

    async def _lags(self, copied: tuple[int, int]) -> Server | None:
        """Wait for a server that knows more of the run than the replica has, and return it."""
        ends_s = self._world.now_s() + LONGEST_LAG_S
        while self._world.now_s() < ends_s and self._fit:
            for server in self._servers:
                run = server.service.runs.get(RUN) if server.service and not server.node.stopped else None
                if run and (run.state.entries > copied[0] or run.state.stored > copied[1]):
                    return server
            await asyncio.sleep(POLL_S)
        return None


async def find_silent(world: World, servers: list[Server], redis: RedisServer, name: str) -> list[Server]:
    """Return the servers that do not report the loss of a run in time, of those that run all the while.

    The time begins anew with each fault, which may last `LONGEST_STOP_S`, and while `redis` stands still: until it
    answers, they know nothing of it. A server whose answers are lost is not silent, nor is one that says that Redis is
    away.
    """

    async def work(service: Service, gone: Gone) -> RunStatus:
        return (await service.run(name)).describe()

    asked = {server: server.node for server in servers}
    client, began_s = Client(servers, Node("watch")), world.now_s()
    ends_s = began_s + REPORT_S
    silent, outcomes = list(asked), dict[Server, str]()
    while silent and world.now_s() < ends_s:
        if redis.node.dead or redis.node.stopped:
            ends_s = world.now_s() + REPORT_S
        if world.faults.last_s > began_s:
            ends_s = max(ends_s, world.faults.last_s + LONGEST_STOP_S + REPORT_S)
        for server in list(silent):
            if server.node.stopped or server.node is not asked[server]:
                silent.remove(server)  # a stopped process reports nothing, and a new one begins anew
                continue
            outcomes[server] = str((await client.observe(name, work, only=server)).seen["outcome"])
            if outcomes[server] == DataLost.slug:
                silent.remove(server)
        await asyncio.sleep(POLL_S)
    running = (server for server in silent if server.node is asked[server] and not server.node.stopped)
    return [server for server in running if outcomes[server] not in UNAVAILABLE]


def ends_of(redis: RedisServer, run: str) -> tuple[int, int]:
    """Return the numbers of the newest ledger entry and group of a run."""
    counts = redis.values.peek(keys.counts(run).encode()) or {}
    return int(counts.get(b"entries", 0)), int(counts.get(b"stored", 0))


def parts_of(redis: RedisServer, run: str) -> dict[str, object]:
    """Return what Redis holds of a run, without leases and fences: a server may take one before it reads."""
    saved = redis.values.copy()
    names = {
        "index": keys.index(run),
        "ledger": keys.ledger(run),
        "ids": keys.group_ids(run),
        "counts": keys.counts(run),
        "tickets": keys.tickets(run),
        "snapshot": keys.snapshot(run),
        "spilled": keys.spill(run),
        "cursors": keys.cursors(run),
    }
    return {part: saved.get(name.encode()) for part, name in names.items()} | {"payloads": _payloads(saved, run)}


def _payloads(saved: Saved, run: str) -> list[bytes]:
    """List payloads of stored groups; one that waits for its publication still has a lifetime."""
    own = f"rb:p:{{{run}:".encode()
    return sorted(key for key, (_, ends_ms) in saved.items() if key.startswith(own) and ends_ms is None)
