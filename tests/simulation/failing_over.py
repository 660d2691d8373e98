"""Fault: a replica of Redis with a shorter history takes over, until an operator brings the right server back."""

from __future__ import annotations

import asyncio

from replaybuf.service.host import Service
from replaybuf.store import keys
from replaybuf.wire.answer.run_status import RunStatus
from tests.chaos.history import Event, OlderRedis
from tests.simulation.loop import Node
from tests.simulation.redis_model.server import RedisServer
from tests.simulation.redis_model.values import Saved
from tests.simulation.servers import Client, Gone, Server
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

    def __init__(self, world: World, redis: RedisServer, servers: list[Server], history: list[Event]) -> None:
        self._world, self._redis, self._servers, self._history = world, redis, servers, history

    async def work(self) -> None:
        """Do it, unless nothing is missing in the replica after a while, or Redis itself is hurt."""
        if not self._redis.healthy:
            return
        replica = self._redis.values.copy()
        if not await self._lags(_ends_of(self._redis)):
            return
        from_s = self._world.now_s()
        right = self._redis.take_over(replica)
        before = _parts(self._redis)
        asked = {server: server.node for server in self._servers}
        silent = await self._silent(asked)
        await asyncio.sleep(self._world.rng.uniform(0.0, LONGEST_LOAD_S))
        after, until_s = _parts(self._redis), self._world.now_s()
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

    async def _lags(self, copied: tuple[int, int]) -> bool:
        """Wait until a server knows more of the run than the replica has."""
        ends_s = self._world.now_s() + LONGEST_LAG_S
        while self._world.now_s() < ends_s and self._redis.healthy:
            for server in self._servers:
                run = server.service.runs.get(RUN) if server.service and not server.node.stopped else None
                if run and (run.state.entries > copied[0] or run.state.stored > copied[1]):
                    return True
            await asyncio.sleep(POLL_S)
        return False

    async def _silent(self, asked: dict[Server, Node]) -> list[Server]:
        """Return the servers that have not reported the loss in time, of those that ran all the while."""

        async def work(service: Service, gone: Gone) -> RunStatus:
            return (await service.run(RUN)).describe()

        client, ends_s = Client(self._servers, Node("watch")), self._world.now_s() + REPORT_S
        silent = list(asked)
        while silent and self._world.now_s() < ends_s:
            for server in list(silent):
                if server.node.stopped or server.node is not asked[server]:
                    silent.remove(server)  # a stopped process reports nothing, and a new one begins anew
                elif (await client.observe(RUN, work, only=server)).seen["outcome"] == "data-lost":
                    silent.remove(server)
            await asyncio.sleep(POLL_S)
        return [server for server in silent if server.node is asked[server] and not server.node.stopped]


def _ends_of(redis: RedisServer) -> tuple[int, int]:
    """Return the numbers of the newest ledger entry and group of the run."""
    counts = redis.values.peek(keys.counts(RUN).encode()) or {}
    return int(counts.get(b"entries", 0)), int(counts.get(b"stored", 0))


def _parts(redis: RedisServer) -> dict[str, object]:
    """Return what Redis holds of the run, without leases and fences: a server may take one before it reads."""
    saved = redis.values.copy()
    names = {
        "index": keys.index(RUN),
        "ledger": keys.ledger(RUN),
        "ids": keys.group_ids(RUN),
        "counts": keys.counts(RUN),
        "tickets": keys.tickets(RUN),
        "snapshot": keys.snapshot(RUN),
        "spilled": keys.spill(RUN),
        "cursors": keys.cursors(RUN),
    }
    return {part: saved.get(name.encode()) for part, name in names.items()} | {"payloads": _payloads(saved)}


def _payloads(saved: Saved) -> list[bytes]:
    """List payloads of stored groups; one that waits for its publication still has a lifetime."""
    own = f"rb:p:{{{RUN}:".encode()
    return sorted(key for key, (_, ends_ms) in saved.items() if key.startswith(own) and ends_ms is None)
