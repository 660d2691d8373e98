"""The primary that Sentinel watches under a name.

All sentinels are asked at once, twice a second, and ten times a second for a while after the first sign of trouble. The
newest configuration among their answers names the primary; each new connection checks by ROLE that its server is one.

A failover need not close a connection: a suspended primary, or one behind a broken network, is silent. So when Sentinel
names another primary, when most sentinels report it down, or when one has begun a failover, all connections to the old
one are cut. Their callers get an error at once and not after a timeout. And nothing more is written to a primary that
comes back during its failover: for a second, replicas that still follow it would confirm what the new one never gets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import redis
import redis.asyncio as aioredis
from redis.exceptions import AuthenticationError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from replaybuf.errors import Invalid
from replaybuf.store.redis.attention import FRESH_S, WATCH_PERIOD_S, Attention
from replaybuf.store.redis.faults import known_error
from replaybuf.store.redis.pipeline import IdleConnections, Send, open_direct, with_failover
from replaybuf.store.redis.sentinel_answers import (
    Address,
    Answer,
    View,
    agreed,
    combine,
    read_answer,
)
from replaybuf.store.redis.server import find_split, text

ASK_TIMEOUT_S = 1.0
GRACE_S, ALERT_GRACE_S = 0.05, 0.3
"""How long the other sentinels are waited for after most of them agree, and after a sign of trouble.

Only the sentinel that leads a failover reports it while the old primary answers again, and on a busy machine it may be
the slow one.
"""
LISTEN_S = 10.0
"""After so long without a sign, subscribe again: the sentinel may have gone without a word."""
_SIGNS = ("+sdown", "+odown", "+try-failover", "+switch-master")
"""What sentinels publish."""


class SentinelPrimary:
    """The primary `name`. Calls `on_switch` when connections must be cut, because it is down or another one.

    `address`: of the primary, if it was ever known.
    """

    fails_over = True

    def __init__(
        self,
        name: str,
        hosts: Sequence[Address],
        server_options: Mapping[str, Any],
        sentinel_options: Mapping[str, Any],
        on_switch: Callable[[], None],
    ) -> None:
        self.address: Address | None = None
        self.switches = 0
        self._name, self._options, self._on_switch = name, dict(server_options), on_switch
        self._tls = self._options.pop("ssl")
        self._sentinels = [open_direct(host, ASK_TIMEOUT_S, protocol=3, **sentinel_options) for host in hosts]
        self._exchanges = [IdleConnections(sentinel.connection_pool).exchange for sentinel in self._sentinels]
        self._hosts = ", ".join(f"{host}:{port}" for host, port in hosts)
        self._view = View(None)
        self._asked_s = -float("inf")
        self._asking = asyncio.Lock()
        self._watching: list[asyncio.Task[None]] = []
        self._attention = Attention()
        self._closed = False
        self._failure = ""

    def open_client(self, **options: Any) -> aioredis.Redis:
        """Open a client whose connections lead to the primary."""
        kind = AsyncTlsConnection if self._tls else AsyncConnection
        pool = aioredis.ConnectionPool(connection_class=kind, sentinels=self, **with_failover(options, self._options))
        return aioredis.Redis.from_pool(pool)

    def open_blocking_client(self, **options: Any) -> redis.Redis:
        """Open a client for threads. Its connections lead to the primary that the event loop has found last."""
        kind = BlockingTlsConnection if self._tls else BlockingConnection
        pool = redis.ConnectionPool(connection_class=kind, sentinels=self, **with_failover(options, self._options))
        return redis.Redis.from_pool(pool)

    def open_replica(self, address: Address, timeout_s: float) -> aioredis.Redis:
        """Open a client of a replica, with the user and password of the primary."""
        return open_direct(address, timeout_s, protocol=3, ssl=self._tls, **self._options)

    async def check(self) -> None:
        """Raise `Invalid` for sentinels that are none, or that do not know the name."""
        answers = await self._ask_all()
        if answers and not any(answer.primary for answer in answers):
            detail = f"{combine(answers, len(self._sentinels), self._name).trouble} (asked: {self._hosts})"
            raise Invalid(detail, name="redis_url", value=self._name)

    def explain(self) -> str | None:
        """Return what the sentinels said last, if the primary cannot be used."""
        return self._view.trouble

    async def close(self) -> None:
        """Stop watching, and close the connections to the sentinels."""
        self._closed = True  # redis-py may swallow a cancellation
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        for sentinel in self._sentinels:
            await sentinel.aclose()

    # ------------------------------------------------------------------ connections

    def current(self) -> Address:
        """Return the address that was found last. Raises redis-py's `ConnectionError` while there is none."""
        if self.address is None or self._view.down:
            raise RedisConnectionError(self._view.trouble)
        return self.address

    def check_split(self, info: str) -> None:
        """Raise redis-py's `ConnectionError` if a replica with an older history may still replace the primary."""
        view = self._view
        if why := find_split(info, replicas=view.replicas, down_after_s=view.down_after_s):
            host, port = self.current()
            raise RedisConnectionError(f"{host}:{port} {why}")

    async def find(self) -> Address:
        """Return the address of the primary. Raises redis-py's `ConnectionError` while there is none."""
        if not self._watching:
            jobs = [self._watch(), *map(self._listen, self._sentinels)]
            self._watching = [asyncio.create_task(job, name="watch sentinels") for job in jobs]
        for task in self._watching:
            if task.done():
                task.result()  # raises its fault
        self._attention.suspect()  # the last connection was lost, perhaps
        async with self._asking:
            if time.monotonic() >= self._asked_s + FRESH_S:
                await self._look()
        return self.current()

    async def _watch(self) -> None:
        while not self._closed:
            await self._attention.pause(in_trouble=bool(self._view.trouble))
            async with self._asking:
                await self._look()

    async def _listen(self, sentinel: aioredis.Redis) -> None:
        """Wait for signs of trouble that a sentinel publishes."""
        while not self._closed:
            try:
                async with sentinel.pubsub() as events:
                    await events.subscribe(*_SIGNS)
                    while (event := await events.get_message(timeout=LISTEN_S)) is not None:
                        if event["type"] == "message":
                            self._attention.suspect()
            except (RedisError, OSError, RuntimeError) as error:  # this sentinel is away; all are asked as before
                known_error(error)
                await asyncio.sleep(WATCH_PERIOD_S)

    async def _look(self) -> None:
        answers = await self._ask_all()
        before, self._view = self._view, combine(answers, len(self._sentinels), self._name, self._failure)
        self._asked_s = time.monotonic()
        # Without an answer the last primary is used as before: most likely only the sentinels are away.
        address = self._view.primary or self.address
        before_address, self.address = self.address, address
        if before_address and (before_address != address or (self._view.down and not before.down)):
            self.switches += 1
            self._on_switch()

    # ------------------------------------------------------------------ sentinels

    async def _ask_all(self) -> list[Answer]:
        """Ask all sentinels at once; do not wait long for the others once most of them agree."""
        waiting = {asyncio.create_task(self._ask(exchange)) for exchange in self._exchanges}
        answers: list[Answer] = []
        ends_s = time.monotonic() + ASK_TIMEOUT_S
        try:
            while waiting and (left_s := ends_s - time.monotonic()) > 0:
                done, waiting = await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                answers += [answer for task in done if (answer := task.result())]
                if agreed(answers, len(self._sentinels)):
                    grace_s = ALERT_GRACE_S if self._attention.alert else GRACE_S
                    ends_s = min(ends_s, time.monotonic() + grace_s)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        return answers

    async def _ask(self, exchange: Send) -> Answer | None:
        """Ask one sentinel; None if it does not answer, or not as a sentinel."""
        try:
            # The first names a promoted replica as soon as it is one, the second only when the others follow it.
            questions = ("GET-MASTER-ADDR-BY-NAME", "MASTER", "REPLICAS")
            address, facts, replicas = await exchange([("SENTINEL", question, self._name) for question in questions])
            if isinstance(address, list) and isinstance(facts, dict) and isinstance(replicas, list):
                return read_answer(address, facts, replicas)
            (watched,) = await exchange([("SENTINEL", "MASTERS")])
            if isinstance(watched, ResponseError):
                return Answer(None, refusal=str(watched))
            return Answer(None, names=tuple(text(facts[b"name"]) for facts in watched))
        except AuthenticationError as error:
            return Answer(None, refusal=str(error))
        except (RedisError, OSError, ValueError, LookupError) as error:
            self._failure = str(error)
            return None


# ---------------------------------------------------------------------- connections


class AsyncConnection(aioredis.Connection):
    """A connection of the event loop that leads to the primary."""

    def __init__(self, *, sentinels: SentinelPrimary, **options: Any) -> None:
        self._sentinels = sentinels
        self._switches = 0
        super().__init__(**options)

    async def connect_check_health(self, check_health: bool = True, retry_socket_connect: bool = True) -> None:
        """Connect to the primary of this moment, unless it is connected."""
        if not self.is_connected:
            self.host, self.port = await self._sentinels.find()
            self._switches = self._sentinels.switches
        await super().connect_check_health(check_health, retry_socket_connect)

    async def on_connect_check_health(self, check_health: bool = True) -> None:
        """Log in, and check that the server is a primary."""
        await super().on_connect_check_health(check_health=check_health)
        await self.send_command("ROLE", check_health=False)
        _check_role(await self.read_response(), self)
        await self.send_command("INFO", "server", "replication", check_health=False)
        self._sentinels.check_split(text(await self.read_response()))
        _check_switch(self._switches, self._sentinels)


class AsyncTlsConnection(AsyncConnection, aioredis.SSLConnection):
    """The same with TLS."""


class BlockingConnection(redis.Connection):
    """A connection of a thread that leads to the primary."""

    def __init__(self, *, sentinels: SentinelPrimary, **options: Any) -> None:
        self._sentinels = sentinels
        self._switches = 0
        super().__init__(**options)  # type: ignore[no-untyped-call]

    def connect_check_health(self, check_health: bool = True, retry_socket_connect: bool = True) -> None:
        """Connect to the primary of this moment, unless it is connected."""
        self._switches = self._sentinels.switches
        self.host, self.port = self._sentinels.current()
        super().connect_check_health(check_health, retry_socket_connect)

    def on_connect_check_health(self, check_health: bool = True) -> None:
        """Log in, and check that the server is a primary."""
        super().on_connect_check_health(check_health=check_health)
        self.send_command("ROLE", check_health=False)  # type: ignore[no-untyped-call]
        _check_role(self.read_response(), self)
        _check_switch(self._switches, self._sentinels)


class BlockingTlsConnection(BlockingConnection, redis.SSLConnection):
    """The same with TLS."""


def _check_switch(switches: int, sentinels: SentinelPrimary) -> None:
    """Raise if connections were cut while this one was made."""
    if switches != sentinels.switches:
        raise RedisConnectionError("another server became the primary while this one was connected to")


def _check_role(reply: Sequence[Any], connection: AsyncConnection | BlockingConnection) -> None:
    role = text(reply[0])
    if role != "master":
        where = f"{connection.host}:{connection.port}"
        raise RedisConnectionError(f"{where}, which Sentinel names as the primary, has the role {role!r}")
