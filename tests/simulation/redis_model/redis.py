"""What a schedule has as its Redis: one server, one that sentinels watch, or the nodes of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from replaybuf.store.redis.durability import WritePolicy
from tests.simulation.mix import CLUSTER, SENTINEL, SINGLE
from tests.simulation.redis_model.cluster import RedisCluster
from tests.simulation.redis_model.sentinel_group import SentinelGroup
from tests.simulation.redis_model.server import RedisServer
from tests.simulation.world import World


class Redis(Protocol):
    """One or several modelled servers.

    - `url`: for the store; `policy`: what acknowledged writes must reach
    - `records`: by ledger and entry, the newest record that was written there and the newest group that it noted
    """

    url: str
    policy: WritePolicy
    records: dict[bytes, dict[int, tuple[bytes, bytes]]]

    def server_of(self, key: str) -> RedisServer:
        """Return the server of a key."""

    def pick(self) -> RedisServer:
        """Draw a server to hurt."""


def start_redis(world: World, fsync: str) -> Redis:
    """Start the Redis of a world."""
    kinds: dict[str, Callable[..., Redis]] = {SINGLE: RedisServer, CLUSTER: RedisCluster, SENTINEL: SentinelGroup}
    return kinds[world.redis](world, fsync=fsync)


def delete_key(redis: Redis, name: str) -> None:
    """Delete a key, as an operator would."""
    values = redis.server_of(name).values
    values.delete(name.encode())
    values.commit()
