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
import contextlib
import dataclasses
import socket
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import redis
import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.maint_notifications import MaintNotificationsConfig

from replaybuf.errors import Invalid, counted

ASK_TIMEOUT_S = 1.0
GRACE_S = 0.05
"""How long the other sentinels are waited for after most of them agree."""
CONNECT_TIMEOUT_S = 2.0
"""Upper bound: a connection attempt to a host that is gone must not outlast the failover."""
FRESH_S = 0.1
"""An answer is used again for so long: connections opened at the same time ask once."""
WATCH_PERIOD_S = 0.5
ALERT_S = 10.0
"""How long to ask often after a sign of trouble. A failover promotes a replica 0.2 s after its begin."""
_SIGNS = ("+sdown", "+odown", "+try-failover", "+switch-master")
"""What sentinels publish."""

Address = tuple[str, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What one sentinel says of a name.

    - `primary`: its address; None if the sentinel does not know the name, but `names`, or refused to answer (`refusal`)
    - `epoch`: of the configuration that names it
    - `down`, `failing_over`: this sentinel misses the primary; a failover has begun
    - `sentinels`: so many watch it, this one included; `quorum`: so many must agree that it is down
    """

    primary: Address | None
    epoch: int = 0
    down: bool = False
    failing_over: bool = False
    sentinels: int = 1
    quorum: int = 1
    names: tuple[str, ...] = ()
    refusal: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """What all answers mean.

    - `primary`: None if no sentinel named it
    - `trouble`: what keeps it from answering, if it does not; None = nothing
    - `down`: no call is tried: most sentinels report it down, or a failover has begun
    """

    primary: Address | None
    trouble: str | None = None
    down: bool = False


def combine(answers: Sequence[Answer], asked: int, name: str) -> View:
    """Find the primary in the answers of `asked` sentinels: a minority may not have heard of the last failover."""
    known = [answer for answer in answers if answer.primary]
    if not answers:
        return View(None, f"none of {counted(asked, 'sentinel')} answers")
    if not known:
        if refusals := sorted({answer.refusal for answer in answers if answer.refusal}):
            return View(None, f"these are not sentinels, or they refuse to answer: {'; '.join(refusals)}")
        names = sorted({other for answer in answers for other in answer.names})
        return View(None, f"Sentinel does not know the name {name!r}; it knows {', '.join(names) or 'no name'}")
    newest = max(known, key=lambda answer: (answer.epoch, [other.primary for other in known].count(answer.primary)))
    same = [answer for answer in known if answer.primary == newest.primary]
    missed, failing_over = sum(answer.down for answer in same), any(answer.failing_over for answer in same)
    if missed <= len(same) // 2 and not failing_over:
        return View(newest.primary)
    host, port = newest.primary or ("", 0)
    watching = max(answer.sentinels for answer in same)
    if failing_over:
        what = "a failover has begun"
    elif len(answers) <= watching // 2 or len(answers) < newest.quorum:
        what = (
            f"no failover is possible: {len(answers)} of {counted(watching, 'sentinel')} answer, the quorum is "
            f"{newest.quorum}"
        )
    else:
        what = "a failover has not begun yet"
    trouble = f"Sentinel reports the primary {host}:{port} of {name!r} down; {what}"
    return View(newest.primary, trouble, failing_over or missed > asked // 2)


def agreed(answers: Sequence[Answer], asked: int) -> bool:
    """Check whether most sentinels name the same primary, and miss it not: the others need not be waited for."""
    calm = [answer for answer in answers if answer.primary and not answer.down and not answer.failing_over]
    votes = [(answer.primary, answer.epoch) for answer in calm]
    return any(votes.count(vote) > asked // 2 for vote in votes)


class SentinelPrimary:
    """The primary `name`. Calls `on_switch` when connections were cut, because it is down or another one.

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
        self._sentinels = [
            aioredis.Redis(
                host=host,
                port=port,
                protocol=3,
                socket_timeout=ASK_TIMEOUT_S,
                socket_connect_timeout=ASK_TIMEOUT_S,
                retry=Retry(NoBackoff(), 0),
                maint_notifications_config=MaintNotificationsConfig(enabled=False),
                **sentinel_options,
            )
            for host, port in hosts
        ]
        self._hosts = ", ".join(f"{host}:{port}" for host, port in hosts)
        self._view = View(None)
        self._asked_s = -float("inf")
        self._asking = asyncio.Lock()
        self._watching: list[asyncio.Task[None]] = []
        self._alert_until_s = -float("inf")
        self._signs = asyncio.Event()
        self._connections: weakref.WeakSet[ToPrimary] = weakref.WeakSet()

    def open_client(self, **options: Any) -> aioredis.Redis:
        """Open a client whose connections lead to the primary."""
        kind = AsyncTlsConnection if self._tls else AsyncConnection
        pool = aioredis.ConnectionPool(connection_class=kind, primary=self, **self._with_bound(options))
        return aioredis.Redis.from_pool(pool)

    def open_blocking_client(self, **options: Any) -> redis.Redis:
        """Open a client for threads. Its connections lead to the primary that the event loop has found last."""
        kind = BlockingTlsConnection if self._tls else BlockingConnection
        pool = redis.ConnectionPool(connection_class=kind, primary=self, **self._with_bound(options))
        return redis.Redis.from_pool(pool)

    def _with_bound(self, options: Mapping[str, Any]) -> dict[str, Any]:
        connect_s = min(options["socket_connect_timeout"], CONNECT_TIMEOUT_S)
        return {**options, **self._options, "socket_connect_timeout": connect_s}

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
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        for sentinel in self._sentinels:
            await sentinel.aclose()

    # ------------------------------------------------------------------ connections

    def join(self, connection: ToPrimary) -> None:
        """Note a connection that is to be cut when another server becomes the primary."""
        self._connections.add(connection)

    async def find(self) -> Address:
        """Return the address of the primary. Raises redis-py's `ConnectionError` while there is none."""
        if not self._watching:
            jobs = [self._watch(), *map(self._listen, self._sentinels)]
            self._watching = [asyncio.create_task(job, name="watch sentinels") for job in jobs]
        for task in self._watching:
            if task.done():
                task.result()  # raises its fault
        self._signs.set()  # the last connection was lost, perhaps
        async with self._asking:
            if time.monotonic() >= self._asked_s + FRESH_S:
                await self._look()
        if self.address is None or self._view.down:
            raise RedisConnectionError(self._view.trouble)
        return self.address

    async def _watch(self) -> None:
        while True:
            if self._signs.is_set():
                self._signs.clear()
                self._alert_until_s = time.monotonic() + ALERT_S
            if self._view.trouble or time.monotonic() < self._alert_until_s:
                await asyncio.sleep(FRESH_S)
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._signs.wait(), WATCH_PERIOD_S)
            async with self._asking:
                await self._look()

    async def _listen(self, sentinel: aioredis.Redis) -> None:
        """Wait for signs of trouble that a sentinel publishes."""
        while True:
            with contextlib.suppress(RedisError, OSError):  # this sentinel is away; the others are asked as before
                async with sentinel.pubsub() as events:
                    await events.subscribe(*_SIGNS)
                    async for _ in events.listen():
                        self._signs.set()
            await asyncio.sleep(WATCH_PERIOD_S)

    async def _look(self) -> None:
        before, self._view = self._view, combine(await self._ask_all(), len(self._sentinels), self._name)
        self._asked_s = time.monotonic()
        # Without an answer the last primary is used as before: most likely only the sentinels are away.
        address = self._view.primary or self.address
        before_address, self.address = self.address, address
        if before_address and (before_address != address or (self._view.down and not before.down)):
            self._cut()

    def _cut(self) -> None:
        for connection in list(self._connections):
            connection.cut()
        self._connections.clear()
        self.switches += 1
        self._on_switch()

    # ------------------------------------------------------------------ sentinels

    async def _ask_all(self) -> list[Answer]:
        """Ask all sentinels at once; do not wait long for the others once most of them agree."""
        waiting = {asyncio.create_task(self._ask(sentinel)) for sentinel in self._sentinels}
        answers: list[Answer] = []
        ends_s = time.monotonic() + ASK_TIMEOUT_S
        try:
            while waiting and (left_s := ends_s - time.monotonic()) > 0:
                done, waiting = await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                answers += [answer for task in done if (answer := task.result())]
                if agreed(answers, len(self._sentinels)):
                    ends_s = min(ends_s, time.monotonic() + GRACE_S)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        return answers

    async def _ask(self, sentinel: aioredis.Redis) -> Answer | None:
        """Ask one sentinel; None if it does not answer."""
        try:
            pipe = sentinel.pipeline(transaction=False)
            # The first names a promoted replica as soon as it is one, the second only when the others follow it.
            pipe.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._name)
            pipe.execute_command("SENTINEL", "MASTER", self._name)
            address, facts = await pipe.execute(raise_on_error=False)
            if address is not None and isinstance(facts, dict):
                return _read_answer(address, facts)
            watched = await sentinel.execute_command("SENTINEL", "MASTERS")  # type: ignore[no-untyped-call]
        except (ResponseError, AuthenticationError) as error:
            return Answer(None, refusal=str(error))
        except (RedisError, OSError):
            return None
        return Answer(None, names=tuple(_text(facts[b"name"]) for facts in watched))


def _read_answer(address: Sequence[bytes], facts: Mapping[bytes, bytes]) -> Answer:
    primary = (_text(address[0]), int(address[1]))
    moved = primary != (_text(facts[b"ip"]), int(facts[b"port"]))  # promoted; the flags are still those of the old one
    flags = [] if moved else _text(facts[b"flags"]).split(",")
    return Answer(
        primary=primary,
        epoch=int(facts[b"config-epoch"]),
        down="s_down" in flags or "o_down" in flags,
        failing_over="failover_in_progress" in flags,
        sentinels=1 + int(facts[b"num-other-sentinels"]),
        quorum=int(facts[b"quorum"]),
    )


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


# ---------------------------------------------------------------------- connections


class ToPrimary:
    """A connection that leads to the primary, and is cut when another server becomes it."""

    def __init__(self, *, primary: SentinelPrimary, **options: Any) -> None:
        self._primary = primary
        super().__init__(**options)

    def cut(self) -> None:
        """End what waits for an answer on this connection, with an error; the next use connects again."""
        raise NotImplementedError

    def _check_address(self, address: Address) -> None:
        if self._primary.address != address:
            raise RedisConnectionError("another server became the primary while this one was connected to")
        self._primary.join(self)


class AsyncConnection(ToPrimary, aioredis.Connection):
    """A connection of the event loop."""

    async def _connect(self) -> None:
        self.host, self.port = address = await self._primary.find()
        await super()._connect()  # type: ignore[no-untyped-call]
        self._check_address(address)

    async def on_connect_check_health(self, check_health: bool = True) -> None:
        """Log in, and check that the server is a primary."""
        await super().on_connect_check_health(check_health=check_health)
        await self.send_command("ROLE", check_health=False)
        _check_role(await self.read_response(), self)

    def cut(self) -> None:
        """Abort the transport: its reader gets an error in the next turn of the loop."""
        if self._writer is not None:
            self._writer.transport.abort()


class AsyncTlsConnection(AsyncConnection, aioredis.SSLConnection):
    """The same with TLS."""


class BlockingConnection(ToPrimary, redis.Connection):
    """A connection of a thread."""

    def _connect(self) -> socket.socket:
        address = self._primary.address
        if address is None:
            raise RedisConnectionError("no primary is known yet")
        self.host, self.port = address
        connected: socket.socket = super()._connect()  # type: ignore[no-untyped-call]
        self._check_address(address)
        return connected

    def on_connect_check_health(self, check_health: bool = True) -> None:
        """Log in, and check that the server is a primary."""
        super().on_connect_check_health(check_health=check_health)
        self.send_command("ROLE", check_health=False)  # type: ignore[no-untyped-call]
        _check_role(self.read_response(), self)

    def cut(self) -> None:
        """Shut the socket down: a thread that reads from it gets the end of the stream."""
        if self._sock is not None:
            with contextlib.suppress(OSError):  # it is closed already
                self._sock.shutdown(socket.SHUT_RDWR)


class BlockingTlsConnection(BlockingConnection, redis.SSLConnection):
    """The same with TLS."""


def _check_role(reply: Sequence[Any], connection: AsyncConnection | BlockingConnection) -> None:
    role = _text(reply[0])
    if role != "master":
        where = f"{connection.host}:{connection.port}"
        raise RedisConnectionError(f"{where}, which Sentinel names as the primary, has the role {role!r}")
