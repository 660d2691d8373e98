"""The connection to Redis that all commands go through: its trouble told in our words, its confirmations waited for.

A lost connection and a server that takes no writes raise `ServiceUnavailable`, a full server `NoRoom`. What is
acknowledged goes through `_durably`, which waits for the server's confirmation on the same connection and raises
`NotDurable` without it; a repeat writes something too, so that its wait covers the first try. One client serves all
calls; the blocking read of new entries has its own, and so have payloads, which are read in a thread: asyncio's streams
copy each byte four times more, three times the processor time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry as BlockingRetry

from replaybuf.errors import Invalid, NotDurable, ReplaybufError, ServiceUnavailable
from replaybuf.store.chunks import READ_BYTES
from replaybuf.store.durability import STRICT, Barrier, Wanted, judge
from replaybuf.store.instep import InStepRedis
from replaybuf.store.server import (
    ASKED_CONFIG,
    LIBRARY,
    LIBRARY_CODE,
    ServerReport,
    check_version,
    settings_of,
    version_of,
)
from replaybuf.store.trouble import fenced, lacks_functions, told, unavailable, without_password

COMMAND_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 5.0
STALL_PAUSE_S = 1.0
"""A Redis that did not answer in time is asked again after so long."""


class Connection:
    """A connection to one Redis or Valkey server; the commands of the store are built on it, a subclass per concern.

    `url` is its address without a password, for messages. Raises `Invalid` for an address that is none.
    `unconfirmed` counts writes that were not confirmed in time, `replicas_confirmed` is how many replicas confirmed the
    last write that waited for any. `explain` tells why the server cannot be reached, where somebody knows.
    """

    def __init__(
        self,
        url: str,
        wanted: Wanted = STRICT,
        *,
        command_timeout_s: float | None = None,
        connect_timeout_s: float | None = None,
        explain: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.url = without_password(url)
        self.command_timeout_s = COMMAND_TIMEOUT_S if command_timeout_s is None else command_timeout_s
        self.wanted = wanted
        self.unconfirmed = 0
        self.replicas_confirmed = 0
        self._explain = explain
        self._prepared = False
        self._preparing = asyncio.Lock()
        self._stalled_until_s = 0.0
        self._barrier: Barrier | None = None
        self._reads_durable = True
        common: dict[str, Any] = {
            "protocol": 3,
            "legacy_responses": False,
            "socket_read_size": READ_BYTES,
            "socket_connect_timeout": CONNECT_TIMEOUT_S if connect_timeout_s is None else connect_timeout_s,
            "health_check_interval": 0,
            # While they are on, redis-py takes connections from its pool without a look whether they were closed.
            "maint_notifications_config": MaintNotificationsConfig(enabled=False),
        }
        retry = Retry(NoBackoff(), 0)
        try:
            self._redis = InStepRedis.from_url(url, socket_timeout=self.command_timeout_s, retry=retry, **common)
        except ValueError:  # what it says may hold a part of the password
            bound = "redis://HOST:PORT/DB, rediss://HOST:PORT/DB or unix:///PATH"
            raise Invalid(
                f"redis_url is {self.url!r}; needed: {bound}", name="redis_url", value=self.url, bound=bound
            ) from None
        self._blocking = InStepRedis.from_url(url, socket_timeout=None, retry=retry, **common)
        self._bulk = redis.Redis.from_url(
            url, socket_timeout=self.command_timeout_s, retry=BlockingRetry(NoBackoff(), 0), **common
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._redis.aclose()
        await self._blocking.aclose()
        self._bulk.close()

    # ------------------------------------------------------------------ the server

    async def prepare(self) -> None:
        """Check the server's version and settings and load the function library, unless the same server still answers.

        Every command sees to this first, as another server may answer after each trouble: one that has no functions, or
        those of another release. Raises `UnsupportedServer` for one that is too old.
        """
        if self._prepared:
            return
        self._check_answering(claim=False)
        async with self._preparing:
            if not self._prepared:
                self._check_answering()
                check_version((await self._look()).version, self.url)
                await self._load_library()
                self._prepared = True

    async def _load_library(self) -> None:
        listed = await self._answer(self._redis.function_list(LIBRARY, withcode=True))
        if any(entry[b"library_code"] == LIBRARY_CODE.encode() for entry in listed):
            return  # loading it needs room, which a full server has not
        await self._answer(self._redis.function_load(LIBRARY_CODE, replace=True))

    async def report(self) -> ServerReport:
        """Ask the server what it is and how it persists; writes are waited for accordingly from now on."""
        self._check_answering()
        return await self._look()

    async def _look(self) -> ServerReport:
        info: dict[str, Any] = await self._answer(self._redis.info())
        config, refused = await self._config()
        settings = settings_of(info, config, await self._takes_waitaof(), refused)
        verdict = judge(settings, self.wanted)
        self._barrier, self._reads_durable = verdict.barrier, verdict.reads_durable
        return ServerReport(
            version=version_of(info),
            durability=verdict.level,
            met_by=verdict.met_by,
            reasons=verdict.reasons,
            wanted=self.wanted,
            replicas=settings.replicas,
            used_memory_bytes=int(info.get("used_memory", 0)),
            max_memory_bytes=int(info.get("maxmemory", 0)),
            max_memory_policy=settings.policy or "unknown",
        )

    async def _config(self) -> tuple[dict[str, str], str | None]:
        """Return what the server tells of its configuration, or why it refuses to."""
        try:
            raw = await self._answer(self._redis.config_get(*ASKED_CONFIG))
        except ReplaybufError as error:  # some who sell Redis as a service refuse it; INFO tells part of it
            if not isinstance(error.__cause__, ResponseError) or isinstance(error, ServiceUnavailable):
                raise
            return {}, str(error.__cause__)
        return {text(key): text(value) for key, value in raw.items()}, None

    async def _takes_waitaof(self) -> bool:
        try:
            await self._answer(self._redis.execute_command("WAITAOF", 0, 0, 0))  # type: ignore[no-untyped-call]
        except ReplaybufError as error:
            if isinstance(error.__cause__, ResponseError):  # unknown, not allowed, or not on a replica
                return False
            raise
        return True

    # ------------------------------------------------------------------ durability

    async def _durably(self, pipe: Any) -> list[Any]:
        """Execute a pipeline of writes; return its replies once the server confirms what it wrote."""
        barrier = self._barrier
        if barrier is None:
            replies: list[Any] = await self._guard(pipe.execute())
            return replies
        waits = barrier.commands
        for wait in waits:
            pipe.execute_command(*wait)
        all_replies = await self._guard(_executed(pipe, len(waits)))
        replies, waited = all_replies[: -len(waits)], all_replies[-len(waits) :]
        try:
            confirmed = barrier.check(waited)
        except NotDurable:
            self.unconfirmed += 1
            raise
        if barrier.replicas:
            self.replicas_confirmed = confirmed
        return replies

    # ------------------------------------------------------------------ functions

    async def _call(self, function: str, names: list[str], arguments: list[Any]) -> list[Any]:
        reply: list[Any] = await self._guard(self._redis.fcall(function, len(names), *names, *arguments))
        return reply

    async def _call_durably(self, function: str, names: list[str], arguments: list[Any]) -> list[Any]:
        pipe = self._redis.pipeline(transaction=False)
        pipe.fcall(function, len(names), *names, *arguments)
        reply: list[Any] = (await self._durably(pipe))[0]
        return reply

    def _check_fence(self, run: str, token: str, reply: list[Any]) -> None:
        """Raise `NotLeader` where a function refused the fencing token, `DataLost` where there is none any more."""
        if text(reply[0]) == "fenced":
            raise fenced(run, token, text(reply[1]))

    # ------------------------------------------------------------------ trouble

    async def _guard(self, command: Awaitable[Any]) -> Any:
        """Await a command on a server that is prepared; raise what goes wrong in our words."""
        try:
            if self._prepared:
                self._check_answering()
            await self.prepare()
        except BaseException:
            if isinstance(command, Coroutine):
                command.close()  # it is never awaited
            raise
        return await self._answer(command)

    async def _answer(self, command: Awaitable[Any]) -> Any:
        try:
            reply = await command
        except (RedisError, OSError) as error:
            if isinstance(error, RedisTimeoutError):
                self._fall_silent()
            elif isinstance(error, (RedisConnectionError, OSError)):
                self._stalled_until_s = 0.0  # refused or cut is known at once, nobody need be spared
                self._prepared = False
            elif lacks_functions(error):
                self._prepared = False
            raise told(error, self.url, self.command_timeout_s, self._explain()) from error
        self._stalled_until_s = 0.0
        return reply

    def _fall_silent(self) -> None:
        """Take note that Redis did not answer in time."""
        self._stalled_until_s = time.monotonic() + STALL_PAUSE_S
        self._prepared = False

    def _check_answering(self, *, claim: bool = True) -> None:
        """Fail at once while Redis keeps silent, but for one call at a time that finds out whether it still does.

        Otherwise callers that wait for each other's locks would each wait the whole timeout, one after another. That
        one call `claim`s to be it.
        """
        now_s = time.monotonic()
        if now_s < self._stalled_until_s:
            raise unavailable(self.url, f"does not answer; it is asked again within {self.command_timeout_s} s")
        if self._stalled_until_s and claim:
            self._stalled_until_s = now_s + self.command_timeout_s


async def _executed(pipe: Any, waits: int) -> list[Any]:
    """Execute a pipeline whose last commands are waits; raise the first error of the others, return that of waits."""
    replies: list[Any] = await pipe.execute(raise_on_error=False)
    for reply in replies[:-waits]:
        if isinstance(reply, Exception):
            raise reply
    return replies


def text(value: Any) -> str:
    """Read a reply that is a string; which of both forms it has depends on the command."""
    return value.decode() if isinstance(value, bytes) else str(value)
