"""Simulated clients in direct mode: a producer that writes groups to Redis, and a rank that reads frames from there."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import msgspec
from redis.exceptions import RedisError

from replaybuf.client.direct import DirectBodies
from replaybuf.errors import Malformed, ReplaybufError
from replaybuf.service.host import Service
from replaybuf.store import PendingGroup, Store
from replaybuf.store.redis.connection import Connection
from replaybuf.wire.frame import encode_frame, stored_checksum
from replaybuf.wire.plan import Plan
from tests.chaos.content import make_group
from tests.chaos.history import Event, GroupSent
from tests.simulation.redis_model.redis import Redis
from tests.simulation.servers import Client, Gone
from tests.simulation.world import World

LONGEST_PAUSE_S = 1.0


class DirectProducer:
    """Writes groups to Redis itself. It asks a server only for the published version, which may be old by then."""

    def __init__(self, world: World, client: Client, run: str, redis: Redis, history: list[Event]) -> None:
        self._world, self._client, self._run, self._history = world, client, run, history
        self._redis, self._count = redis, itertools.count()

    async def work(self, stopping: asyncio.Event) -> None:
        """Write until `stopping` is set. A group without an answer is written again."""
        store, rng = Store(Connection(self._redis.url)), self._world.rng
        while not stopping.is_set():
            adapter, name = self._world.mix.policies[0], f"direct-{next(self._count)}"  # an operator removes others
            version = await self._published(adapter)
            stored = False
            while not stored and not stopping.is_set():
                stored = await self._write(store, name, adapter, version)
                await asyncio.sleep(rng.uniform(0.0, LONGEST_PAUSE_S))
        await store.close()

    async def _published(self, adapter: str) -> int:
        async def work(service: Service, gone: Gone) -> int:
            return (await service.run(self._run)).state.published.get(adapter, 0)

        self._client.ask_any()
        return (await self._client.observe(self._run, work)).result or 0

    async def _write(self, store: Store, name: str, adapter: str, version: int) -> bool:
        group = make_group(name, version, named=True, adapter=adapter)
        frame, sent_s, outcome = encode_frame(group), self._world.now_s(), ""
        ready = PendingGroup(group, name, "", frame, stored_checksum(frame))
        try:
            (result,) = await store.groups.append(self._run, [ready], {adapter: version}, self._world.wall_s())
            outcome = "stored" if result.stored else "duplicate"
        except ReplaybufError as error:
            outcome = error.slug
        sent = GroupSent(
            at_s=self._world.now_s(),
            sent_s=sent_s,
            run=self._run,
            server="direct",
            outcome=outcome,
            group_id=name,
            prompt_index=None,
            policy_version=version,
            adapter=adapter,
        )
        self._history.append(sent)
        return outcome in ("stored", "duplicate")


class DirectRank:
    """Builds bodies from the frames in Redis, by the plan of a server."""

    def __init__(self, redis: Redis) -> None:
        client: Any = None  # asked for the spill folder only, and for what cannot be built
        self._bodies = DirectBodies(client, redis.url)

    def build(self, plan: bytes) -> bytes | None:
        """Build a body; None if the rank has to get it from the server."""
        try:
            return bytes(self._bodies.build(msgspec.json.decode(plan, type=Plan)))
        except (RedisError, OSError, Malformed):
            return None
