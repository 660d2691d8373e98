"""The nodes of a Redis Cluster: which one serves a key, and the connections to each.

Some nodes are asked at once for what they know, twice a second, and ten times a second for a while after the first sign
of trouble. When a primary is down, or another node has its place, all connections to it are cut: their callers get an
error at once and not after a timeout, and a write that began before is not confirmed. A redirection (MOVED) changes the
map at once.

redis-py's own cluster client is not used: its pipeline sends a redirected command again on some other connection, so
the wait for the disk that follows the command would cover nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import redis
import redis.asyncio as aioredis
from redis.crc import key_slot
from redis.exceptions import AuthenticationError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from replaybuf.errors import Invalid
from replaybuf.store.redis.attention import FRESH_S, Attention
from replaybuf.store.redis.cluster_map import ClusterView, Node, combine, name, parse_nodes
from replaybuf.store.redis.pipeline import ExchangeClient, IdleConnections, open_direct, with_failover
from replaybuf.store.redis.sentinel_answers import Address
from replaybuf.store.redis.server import find_split, text

NODE_TIMEOUT_S = 15.0
"""Default of `cluster-node-timeout`, for a user that may not read it."""
OFFSETS_MS = 50
"""Time for the offsets of replicas to move on."""
ASK_TIMEOUT_S = 1.0
MOST_ASKED = 8
"""Nodes that are asked at once; the next call asks others."""


class NodeConnection(aioredis.Connection):
    """A connection of the event loop to a node, which uses no primary that restarted without its replicas.

    `count_followers`: returns how many replicas of the node are not down.
    """

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


class ClusterNode:
    """The connections to one node: of the event loop, and of threads that read payloads."""

    def __init__(
        self,
        address: Address,
        options: Mapping[str, Any],
        thread_options: Mapping[str, Any],
        count_followers: Callable[[], int],
    ) -> None:
        self.address = address
        host, port = address
        own = {name: value for name, value in options.items() if name != "ssl"}
        kind = NodeTlsConnection if options["ssl"] else NodeConnection
        pool = aioredis.ConnectionPool(
            connection_class=kind, host=host, port=port, count_followers=count_followers, **own
        )
        self._connections = IdleConnections(pool)
        self.exchange = self._connections.exchange
        self.client = ExchangeClient(pool, self.exchange)
        self.reader = redis.Redis(host=host, port=port, **thread_options)

    def cut(self) -> None:
        """Close the connections: all who wait for an answer get an error at once, and the next use connects again."""
        self._connections.cut()
        self.reader.connection_pool.disconnect()

    async def close(self) -> None:
        """Close all connections."""
        await self._connections.close()
        self.reader.close()


class Cluster:
    """The cluster that the nodes at `hosts` belong to. Calls `on_switch` when a primary was lost or a node added."""

    fails_over = True

    def __init__(self, hosts: Sequence[Address], options: Mapping[str, Any], on_switch: Callable[[], None]) -> None:
        self.switches = 0
        self.view = ClusterView()
        self._hosts, self._options, self._on_switch = tuple(hosts), dict(options), on_switch
        self._loop_options: dict[str, Any] = {}
        self._thread_options: dict[str, Any] = {}
        self._nodes: dict[Address, ClusterNode] = {}
        self._asked: dict[Address, IdleConnections] = {}
        self._turn = itertools.count()
        self._asked_s = -float("inf")
        self._asking = asyncio.Lock()
        self._attention = Attention()
        self._watching: asyncio.Task[None] | None = None
        self._closed = False
        self._failure = ""
        self._combined: dict[Address, list[Node]] = {}
        """The answers that `view` was combined from; empty after a redirection changed it."""

    def open_client(self, **options: Any) -> aioredis.Redis:
        """Open a client of the first host: the connections to nodes have its options."""
        self._loop_options = with_failover(options, self._options)
        host, port = self._hosts[0]
        return aioredis.Redis(host=host, port=port, **self._loop_options)

    def open_blocking_client(self, **options: Any) -> redis.Redis:
        """Open such a client for threads."""
        self._thread_options = with_failover(options, self._options)
        host, port = self._hosts[0]
        return redis.Redis(host=host, port=port, **self._thread_options)

    async def check(self) -> None:
        """Raise `Invalid` for servers that are not nodes of a cluster."""
        for host in self._hosts:
            try:
                await self._ask_one(host)
            except (ResponseError, AuthenticationError, ValueError) as error:
                detail = f"{name(host)} is not a node of a cluster, or it refuses CLUSTER NODES: {error}"
                raise Invalid(detail, name="redis_url", value=name(host)) from error
            except (RedisError, OSError):
                continue  # the next host may answer
            return

    def explain(self) -> str | None:
        """Return which slots cannot be used, and why."""
        return self.view.trouble

    async def close(self) -> None:
        """Stop watching, and close all connections."""
        self._closed = True  # redis-py may swallow the cancellation
        if self._watching:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        for node in self._nodes.values():
            await node.close()
        for asked in self._asked.values():
            await asked.close()

    # ------------------------------------------------------------------ nodes

    @property
    def primaries(self) -> list[ClusterNode]:
        """List the nodes that own slots."""
        return [self.node(address) for address in self.view.primaries]

    @property
    def replicas(self) -> list[ClusterNode]:
        """List the nodes that may take the place of a primary, without those that are down."""
        return [self.node(address) for address in self.view.replicas if address not in self.view.down]

    def node(self, address: Address) -> ClusterNode:
        """Return a node."""
        if address not in self._nodes:
            self._nodes[address] = ClusterNode(
                address, self._loop_options, self._thread_options, lambda: self.view.followers.get(address, 0)
            )
        return self._nodes[address]

    def owner(self, key: str | bytes) -> Address:
        """Return the address of the primary of a key. Raises redis-py's `ConnectionError` while there is none."""
        slot = key_slot(key.encode() if isinstance(key, str) else key)
        address = self.view.owners[slot]
        if address is None or address in self.view.down:
            raise RedisConnectionError(self.view.trouble or f"the cluster does not serve slot {slot}")
        return address

    async def find_owner(self, key: str) -> ClusterNode:
        """Return the primary of a key. Raises redis-py's `ConnectionError` while there is none."""
        await self.find()
        return self.node(self.owner(key))

    def owner_name(self, key: str) -> str:
        """Return the address of the primary of a key as text, for messages."""
        address = self.view.owners[key_slot(key.encode())]
        return name(address) if address else "(nobody)"

    def move_slot(self, slot: int, address: Address) -> None:
        """Follow a redirection, and ask the nodes soon."""
        owners = list(self.view.owners)
        owners[slot] = address
        self.view, self._combined = dataclasses.replace(self.view, owners=tuple(owners)), {}
        self._attention.suspect()

    def suspect(self) -> None:
        """Ask the nodes soon: a connection was lost."""
        self._attention.suspect()

    async def find(self) -> None:
        """Read the map of the cluster, unless it is known. Raises redis-py's `ConnectionError` if no node answers."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch(), name="watch cluster")
        if self._watching.done():
            self._watching.result()  # raises its fault
        if self.view.primaries:
            return
        async with self._asking:
            if not self.view.primaries and time.monotonic() >= self._asked_s + FRESH_S:
                await self._look()
        if not self.view.primaries:
            raise RedisConnectionError(self.view.trouble)

    # ------------------------------------------------------------------ questions

    async def _watch(self) -> None:
        while not self._closed:
            await self._attention.pause(in_trouble=bool(self.view.trouble))
            async with self._asking:
                await self._look()

    async def _look(self) -> None:
        answers = await self._ask_some()
        self._asked_s = time.monotonic()
        if not answers and self.view.primaries:
            return  # most likely nothing is wrong with the nodes but our way to them: each command reports it
        if answers and answers == self._combined:
            return
        self._combined = answers
        before, self.view = self.view, combine(list(answers.values()), self._failure)
        lost = {address for address in before.primaries if address in self.view.down or address in self.view.replicas}
        lost -= before.down
        for address in sorted(lost):
            self.node(address).cut()
        self.switches += bool(lost)
        if lost or set(self.view.primaries) != set(before.primaries):
            self._on_switch()

    async def _ask_some(self) -> dict[Address, list[Node]]:
        known = self.view.addresses or self._hosts
        first = next(self._turn) % len(known)
        asked = [known[(first + number) % len(known)] for number in range(min(MOST_ASKED, len(known)))]
        answers = await asyncio.gather(*map(self._ask, asked))
        return {address: answer for address, answer in zip(asked, answers, strict=True) if answer}

    async def _ask(self, address: Address) -> list[Node]:
        """Ask one node; an empty list if it does not answer, or not as a node."""
        try:
            return await self._ask_one(address)
        except (RedisError, OSError, ValueError) as error:
            self._failure = f"{name(address)}: {error}"
            return []

    async def _ask_one(self, address: Address) -> list[Node]:
        """Ask one node. Raises its error, and `ValueError` for another form of reply."""
        if address not in self._asked:
            client = open_direct(address, ASK_TIMEOUT_S, **self._options)
            self._asked[address] = IdleConnections(client.connection_pool)
        (reply,) = await self._asked[address].exchange([("CLUSTER", "NODES")])
        if isinstance(reply, Exception):
            raise reply
        if not isinstance(reply, bytes):
            raise ValueError(f"CLUSTER NODES returned {type(reply).__name__}")
        return parse_nodes(text(reply), address)
