"""A fast pipeline of Redis commands.

A batch takes hundreds of commands. redis-py runs hooks for scripts, transactions, retries and metrics around each of
them, which takes three times as long. `FastPipeline` packs its commands and reads their replies itself, and single
commands go the same way.

Replies have no names: an unread reply would answer the next command. So a connection is closed when a write or a read
on it fails, times out or is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from math import inf
from typing import Any, TypeAlias

import hiredis
import redis
import redis.asyncio as aioredis
from redis.asyncio.client import Pipeline
from redis.asyncio.connection import DefaultParser
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.maint_notifications import MaintNotificationsConfig

from replaybuf.errors import TooLarge
from replaybuf.store.redis.faults import known_error
from replaybuf.wire.config import LARGEST_STORED_BYTES

_BYTES = (bytes, memoryview)
_LARGE_BYTES = 4096
"""Larger arguments are sent without a copy."""
FAILOVER_CONNECT_S = 2.0
"""Upper bound: a connection attempt to a host that is gone must not outlast the failover."""
_CUT = "its connections were cut: it is down, or another server has its place"


Send: TypeAlias = Callable[[Sequence[Sequence[Any]]], Awaitable[list[Any]]]
"""Sends commands and returns their replies, errors too."""


class ReplyParser(DefaultParser):  # type: ignore[misc, valid-type]
    """redis-py's parser of replies. Connections show it as `reply_parser`: their own method takes four more calls."""

    def on_connect(self, connection: Any) -> None:
        """Begin to read the replies of a connection."""
        super().on_connect(connection)
        connection.reply_parser = self


class _Wait:
    """A task that waits for a reply until a time of the loop; `expired`: it was cancelled because it may not wait on.

    As `asyncio.timeout`, which makes a timer and takes six calls for each exchange.
    """

    __slots__ = ("cancelled", "expired", "task", "until_s")

    def __init__(self, until_s: float) -> None:
        self.until_s = until_s
        self.expired = False
        self.task = asyncio.current_task()
        self.cancelled = self.task.cancelling() if self.task else 0

    def expire(self) -> None:
        """Cancel the task."""
        if self.task and not self.expired:
            self.expired = True
            self.task.cancel()

    def explain(self, error: BaseException) -> BaseException:
        """Return what the task raises: `TimeoutError` if `error` is our cancellation and nobody else's."""
        if not (self.expired and self.task):
            return error
        others = self.task.uncancel() - self.cancelled
        return TimeoutError() if not others and isinstance(error, asyncio.CancelledError) else error


class IdleConnections:
    """Connections of a pool that pipelines use again without the pool: its locks and metrics cost more than a command.

    The pool counts them as in use, so closing the pool closes them.
    """

    def __init__(self, pool: aioredis.ConnectionPool) -> None:
        pool.connection_kwargs["parser_class"] = ReplyParser
        self._pool = pool
        self._idle: list[Any] = []
        self._timeout_s: float | None = None
        self._cuts = 0
        self._waiting: dict[_Wait, None] = {}
        """Those who wait for a reply or a connection, in the order of their coming."""
        self._timer: asyncio.TimerHandle | None = None
        """One for all who wait: it is set again when it has passed."""

    async def exchange(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Send commands on one connection and return their replies as the parser returns them, errors too.

        The sending may take the `socket_timeout` of the pool, and each reply.
        """
        pieces = pack(commands)
        connection = await self._take()
        now_s, cuts = asyncio.get_running_loop().time, self._cuts
        timeout_s = inf if self._timeout_s is None else self._timeout_s
        wait = _Wait(now_s() + timeout_s)
        self._waiting[wait] = None
        if self._timer is None and timeout_s < inf:
            self._expire()
        replies: list[Any] = []
        try:
            try:
                await connection.send_packed_command(pieces, check_health=False)
                read = connection.reply_parser.read_response
                for _ in commands:
                    wait.until_s = now_s() + timeout_s
                    replies.append(await read())
            finally:
                del self._waiting[wait]
        except BaseException as error:
            raise await self._close(connection, wait.explain(error), was_cut=self._cuts != cuts) from error
        self._idle.append(connection)
        return replies

    def _expire(self) -> None:
        """End the waits that take too long, and set the timer for the next one."""
        loop = asyncio.get_running_loop()
        for wait in self._waiting:
            if wait.until_s <= loop.time():
                wait.expire()
        until_s = min([wait.until_s for wait in self._waiting if not wait.expired], default=inf)
        self._timer = loop.call_at(until_s, self._expire) if until_s < inf else None

    def cut(self) -> None:
        """Fail all who wait for a reply or a connection, at once; no open connection is used again.

        But not the caller, which may have noticed the switch while it connects: a task that cancels itself gets the
        cancellation at its next wait, wherever that is.
        """
        self._cuts += 1
        for connection in self._idle:
            connection.reply_parser.on_disconnect()  # `_take` then closes it
        for wait in self._waiting:
            if wait.task is not asyncio.current_task():
                wait.expire()

    async def close(self) -> None:
        """Close all connections."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        await self._pool.aclose()

    async def _take(self) -> Any:
        """Return a connection that is open and has no unread reply."""
        while self._idle:
            connection = self._idle.pop()
            try:
                if not await connection.reply_parser.can_read():
                    return connection
            except OSError:  # it was cut, or closed with the pool
                pass
            await connection.disconnect(nowait=True)
            await self._release(connection)
        connection = await self._open()
        self._timeout_s, connection.socket_timeout = connection.socket_timeout, None  # `exchange` has its own timer
        return connection

    async def _open(self) -> Any:
        """Return a new connection, within redis-py's own timeouts."""
        wait = _Wait(inf)
        self._waiting[wait] = None
        try:
            return await self._pool.get_connection()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise known_error(error) from error
        except (asyncio.CancelledError, TimeoutError) as error:
            if isinstance(wait.explain(error), TimeoutError):
                raise RedisConnectionError(_CUT) from None
            raise
        finally:
            del self._waiting[wait]

    async def _close(self, connection: Any, error: BaseException, *, was_cut: bool) -> BaseException:
        """Close a connection whose next reply may answer another command; return the error to raise."""
        await connection.disconnect(nowait=True)
        await self._release(connection)
        if isinstance(error, TimeoutError):
            return RedisConnectionError(_CUT) if was_cut else RedisTimeoutError(f"no answer within {self._timeout_s} s")
        if isinstance(error, RuntimeError):
            return known_error(error)
        return RedisConnectionError(str(error)) if isinstance(error, OSError) else error

    async def _release(self, connection: Any) -> None:
        connection.socket_timeout = self._timeout_s
        await self._pool.release(connection)


def open_direct(address: tuple[str, int], timeout_s: float, **options: Any) -> aioredis.Redis:
    """Open a client of one server, without retries; each of its commands and connections may take `timeout_s`."""
    return aioredis.Redis(
        host=address[0],
        port=address[1],
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
        maint_notifications_config=MaintNotificationsConfig(enabled=False),
        **options,
    )


def with_failover(options: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of clients whose server may be replaced, with those of its URL: connecting may not take long."""
    return {**options, **own, "socket_connect_timeout": min(options["socket_connect_timeout"], FAILOVER_CONNECT_S)}


class ExchangeClient(aioredis.Redis):
    """redis-py's single commands, each sent on the road of pipelines."""

    def __init__(self, pool: aioredis.ConnectionPool, send: Send) -> None:
        super().__init__(connection_pool=pool)
        self.auto_close_connection_pool = True
        self._send = send

    async def execute_command(self, *words: Any, **options: Any) -> Any:
        """Send one command."""
        (reply,) = await send_all(self._send, [(*words[0].split(), *words[1:])])
        return _convert(self.response_callbacks, reply, words[0], options)


class FastPipeline(Pipeline):
    """A pipeline that is never a transaction."""

    def __init__(self, client: aioredis.Redis, send: Send) -> None:
        super().__init__(client.connection_pool, client.response_callbacks, transaction=False, shard_hint=None)
        self._send = send

    def execute_command(self, *words: Any, **options: Any) -> FastPipeline:  # type: ignore[override]
        """Add a command. Not redis-py's own, which looks for scripts and watched keys first."""
        self.command_stack.append((words, options))
        return self

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        """Send the commands and return their replies. Raises the first error among them."""
        commands, self.command_stack = self.command_stack, []
        if not commands:
            return []
        words_of_each = [words for words, _ in commands]
        replies = await (send_all(self._send, words_of_each) if raise_on_error else self._send(words_of_each))
        if not self.response_callbacks:
            return replies
        return [
            _convert(self.response_callbacks, reply, words[0], options)
            for reply, (words, options) in zip(replies, commands, strict=True)
        ]


async def send_all(send: Send, commands: Sequence[Sequence[Any]], first: int = 0, last: int = 0) -> list[Any]:
    """Send commands and return their replies.

    Raises the first error among the replies, except those to the `first` and the `last` commands.
    """
    replies = await send(commands)
    _raise_first(replies[first : len(replies) - last])
    return replies


def _convert(callbacks: Mapping[Any, Any], reply: Any, command: Any, options: Mapping[str, Any]) -> Any:
    """Give a reply the form that redis-py gives it for this command."""
    callback = None if isinstance(reply, Exception) else callbacks.get(command)
    if callback is None:
        return reply
    return callback(reply, **{name: value for name, value in options.items() if name != "keys"})


def read_values(client: redis.Redis, names: Iterable[str], last: Sequence[Any]) -> tuple[list[bytes | None], Any]:
    """Read string keys with a blocking client; None = the key is missing or not a string.

    Also returns the reply to the command `last`, of the same server.
    """
    try:
        *values, reply = _raise_first(_exchange_blocking(client, [*(("GET", name) for name in names), last]))
    except AttributeError as error:  # the event loop has closed it in the middle, and redis-py had no socket any more
        raise RedisConnectionError(_CUT) from error
    return values, reply


def _exchange_blocking(client: redis.Redis, commands: Sequence[Sequence[Any]]) -> list[Any]:
    connection: Any = client.connection_pool.get_connection()
    try:
        connection.send_packed_command(pack(commands))
        return [_read_value(connection) for _ in commands]
    except BaseException:
        connection.disconnect()  # replies that are not read would answer other commands
        raise
    finally:
        client.connection_pool.release(connection)


def _read_value(connection: Any) -> Any:
    """Read a reply; return an error in its place, and None for a value of the wrong type."""
    try:
        return connection.read_response()
    except ResponseError as error:
        return None if str(error).startswith("WRONGTYPE") else error


def _raise_first(replies: list[Any]) -> list[Any]:
    """Return replies. Raises the first that is an error."""
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


def pack(commands: Iterable[Sequence[Any]]) -> list[Any]:
    """Pack commands, without a copy of their large arguments."""
    pieces: list[Any] = []
    for words in commands:
        start = 0
        for place, word in enumerate(words):
            if word.__class__ not in _BYTES or len(word) <= _LARGE_BYTES:
                continue
            if len(word) > LARGEST_STORED_BYTES:  # the server would close the connection, which looks like an outage
                detail = (
                    f"{words[0]} has an argument of {len(word)} bytes; Redis accepts at most {LARGEST_STORED_BYTES}"
                )
                raise TooLarge(detail, name="redis", value=len(word), bound=LARGEST_STORED_BYTES)
            before = b"\r\n" if start else b"*%d\r\n" % len(words)
            pieces += b"%b%b$%d\r\n" % (before, _pack_words(words[start:place]), len(word)), word
            start = place + 1
        pieces.append(b"\r\n" + _pack_words(words[start:]) if start else hiredis.pack_command(tuple(words)))
    return pieces


def _pack_words(words: Sequence[Any]) -> bytes:
    """Pack a part of a command: words without their number."""
    packed: bytes = hiredis.pack_command(tuple(words))
    return packed[packed.index(b"\n") + 1 :]
