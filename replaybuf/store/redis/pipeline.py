"""A fast pipeline of Redis commands.

A batch takes hundreds of commands. redis-py runs hooks for scripts, transactions, retries and metrics around each of
them, which takes three times as long. `FastPipeline` packs its commands and reads their replies itself.

Replies have no names: an unread reply would answer the next command. So a connection is closed when a write or a read
on it fails, times out or is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import hiredis
import redis
import redis.asyncio as aioredis
from redis.asyncio.client import Pipeline
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from replaybuf.errors import TooLarge
from replaybuf.wire.config import LARGEST_STORED_BYTES

_BYTES = (bytes, memoryview)
_SET_AGAIN = 1 / 8
"""Share of the timeout after which the timer of an exchange is set again."""
_LARGE_BYTES = 4096
"""Larger arguments are sent without a copy."""


Send: TypeAlias = Callable[[Sequence[Sequence[Any]]], Awaitable[list[Any]]]
"""Sends commands and returns their replies, errors too."""


class IdleConnections:
    """Connections of a pool that pipelines use again without the pool: its locks and metrics cost more than a command.

    The pool counts them as in use, so closing the pool closes them.
    """

    def __init__(self, pool: aioredis.ConnectionPool) -> None:
        self._pool = pool
        self._idle: list[Any] = []

    async def take(self) -> Any:
        """Return a connection that is open and has no unread reply."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_connected and not await connection.can_read():
                return connection
            await connection.disconnect()
            await self._pool.release(connection)
        return await self._pool.get_connection()  # type: ignore[no-untyped-call]

    async def exchange(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Send commands on one connection and return their replies, errors too."""
        connection = await self.take()
        try:
            return await _exchange(connection, commands, len(commands))
        finally:
            await self.give_back(connection)

    async def give_back(self, connection: Any) -> None:
        """Keep a connection for the next pipeline, unless it is closed."""
        if connection.is_connected:
            self._idle.append(connection)
        else:
            await self._pool.release(connection)


class FastPipeline(Pipeline):
    """A pipeline that is never a transaction."""

    def __init__(self, client: aioredis.Redis, send: Send) -> None:
        super().__init__(client.connection_pool, client.response_callbacks, transaction=False, shard_hint=None)
        self._send = send

    def execute_command(self, *words: Any, **options: Any) -> FastPipeline:  # type: ignore[override]
        """Add a command. Not redis-py's own, which looks for scripts and watched keys first."""
        self.command_stack.append((words, options))
        return self

    async def execute(self, raise_on_error: bool = True, first: int = 0, last: int = 0) -> list[Any]:
        """Send the commands and return their replies.

        Raises the first error among the replies, except those to the `first` and the `last` commands.
        """
        commands, self.command_stack = self.command_stack, []
        if not commands:
            return []
        replies = await self._send([words for words, _ in commands])
        if raise_on_error:
            _raise_first(replies[first : len(replies) - last])
        if not self.response_callbacks:
            return replies
        return [self._convert(reply, *command) for reply, command in zip(replies, commands, strict=True)]

    def _convert(self, reply: Any, words: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Give a reply the form that redis-py gives it for this command."""
        callback = None if isinstance(reply, Exception) else self.response_callbacks.get(words[0])
        if callback is None:
            return reply
        return callback(reply, **{name: value for name, value in options.items() if name != "keys"})


async def send(connection: Any, commands: Iterable[Sequence[Any]]) -> None:
    """Send commands on an open connection."""
    await _exchange(connection, commands, 0)


async def receive(connection: Any, count: int) -> list[Any]:
    """Read `count` replies as the parser returns them. Raises the first error among them."""
    return _raise_first(await _exchange(connection, (), count))


async def _exchange(connection: Any, commands: Iterable[Sequence[Any]], count: int) -> list[Any]:
    """Send commands, then read `count` replies as the parser returns them, errors too.

    The sending may take `socket_timeout`, and each reply; up to an eighth less after what came at once.
    """
    pieces = [piece for command in commands for piece in _pack(command)]
    replies: list[Any] = []
    timeout_s, now_s, parser = connection.socket_timeout, asyncio.get_running_loop().time, connection._parser
    try:
        # One timer, set again after a while: redis-py makes one for each reply, which takes longer than the reply.
        async with asyncio.timeout(timeout_s) as timer:
            if pieces:
                await connection._send_packed_command(pieces)
            began_s = now_s()
            for _ in range(count):
                if timeout_s is not None and now_s() > began_s + _SET_AGAIN * timeout_s:
                    began_s = now_s()
                    timer.reschedule(began_s + timeout_s)
                replies.append(await parser.read_response())
    except BaseException as error:
        raise await _close(connection, error) from error
    return replies


async def _close(connection: Any, error: BaseException) -> BaseException:
    """Close a connection whose next reply may answer another command; return the error to raise."""
    await connection.disconnect(nowait=True)
    if isinstance(error, TimeoutError):
        return RedisTimeoutError(f"no answer within {connection.socket_timeout} s")
    return RedisConnectionError(str(error)) if isinstance(error, OSError) else error


def read_values(client: redis.Redis, names: Iterable[str], last: Sequence[Any]) -> tuple[list[bytes | None], Any]:
    """Read string keys with a blocking client; None = the key is missing or not a string.

    Also returns the reply to the command `last`, of the same server.
    """
    commands = [*(("GET", name) for name in names), last]
    connection: Any = client.connection_pool.get_connection()
    try:
        connection.send_packed_command([piece for command in commands for piece in _pack(command)])
        replies = [_read_value(connection) for _ in commands]
    except BaseException:
        connection.disconnect()  # replies that are not read would answer other commands
        raise
    finally:
        client.connection_pool.release(connection)
    *values, reply = _raise_first(replies)
    return values, reply


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


def _pack(words: Sequence[Any]) -> list[Any]:
    """Pack a command, without a copy of its large arguments."""
    large = [place for place, word in enumerate(words) if word.__class__ in _BYTES and len(word) > _LARGE_BYTES]
    if not large:
        return [hiredis.pack_command(tuple(words))]
    pieces, start = [b"*%d\r\n" % len(words)], 0
    for place in large:
        word = words[place]
        if len(word) > LARGEST_STORED_BYTES:  # the server would close the connection, which looks like an outage
            raise TooLarge(
                f"{words[0]} has an argument of {len(word)} bytes; Redis accepts at most {LARGEST_STORED_BYTES}",
                name="redis",
                value=len(word),
                bound=LARGEST_STORED_BYTES,
            )
        pieces[-1] += b"%b$%d\r\n" % (_pack_words(words[start:place]), len(word))
        pieces += word, b"\r\n"
        start = place + 1
    pieces[-1] += _pack_words(words[start:])
    return pieces


def _pack_words(words: Sequence[Any]) -> bytes:
    """Pack a part of a command: words without their number."""
    packed: bytes = hiredis.pack_command(tuple(words))
    return packed[packed.index(b"\n") + 1 :]
