"""A connection to a node of a cluster, which does not use a primary that restarted without its replicas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import redis.asyncio as aioredis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from replaybuf.store.redis.server import find_split, text

NODE_TIMEOUT_S = 15.0
"""Default of `cluster-node-timeout`, for a user that may not read it."""
OFFSETS_MS = 50
"""Time for the offsets of replicas to move on."""


class NodeConnection(aioredis.Connection):
    """A connection of the event loop. `count_followers`: returns how many replicas of the node are not down."""

    def __init__(self, *, count_followers: Callable[[], int], **options: Any) -> None:
        self._count_followers = count_followers
        super().__init__(**options)

    async def on_connect_check_health(self, check_health: bool = True) -> None:
        """Log in, and check that a primary has its replicas. Raises redis-py's `ConnectionError`."""
        await super().on_connect_check_health(check_health=check_health)
        replicas = self._count_followers()
        if find_split(await self._info(), replicas=replicas, down_after_s=math.inf) is None:
            return  # almost always
        # A new primary streams nothing for 10 s. This asks for offsets, which goes to replicas in the stream.
        await self._ask("WAIT", replicas + 1, OFFSETS_MS)
        if why := find_split(await self._info(), replicas=replicas, down_after_s=await self._read_timeout_s()):
            raise RedisConnectionError(f"{self.host}:{self.port} {why}")

    async def _info(self) -> str:
        return text(await self._ask("INFO", "server", "replication"))

    async def _read_timeout_s(self) -> float:
        try:
            reply = await self._ask("CONFIG", "GET", "cluster-node-timeout")
        except ResponseError:
            return NODE_TIMEOUT_S
        return int(reply[b"cluster-node-timeout"]) / 1000

    async def _ask(self, *words: str | int) -> Any:
        await self.send_command(*words, check_health=False)
        return await self.read_response()


class NodeTlsConnection(NodeConnection, aioredis.SSLConnection):
    """The same with TLS."""
