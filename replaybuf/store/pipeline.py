"""A fast pipeline of Redis commands.

A batch takes hundreds of commands. redis-py runs hooks for scripts, transactions, retries and metrics around each of
them, which takes three times as long. `FastPipeline` packs its commands and reads their replies itself.

Replies have no names: an unread reply would answer the next command. So redis-py closes a connection when a write or a
read on it fails, times out or is cancelled, and `send` and `receive` use it for every write and read.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import hiredis
import redis
import redis.asyncio as aioredis
from redis.asyncio.client import Pipeline
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from replaybuf.errors import TooLarge
from replaybuf.wire.config import LARGEST_STORED_BYTES

_BYTES = (bytes, memoryview)
_LARGE_BYTES = 4096
"""Larger arguments are sent without a copy."""


class FastPipeline(Pipeline):
    """A pipeline that is never a transaction."""

    def __init__(self, client: aioredis.Redis) -> None:
        super().__init__(client.connection_pool, client.response_callbacks, transaction=False, shard_hint=None)

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        """Send the commands and return their replies. Raises the first error among the replies."""
        commands, self.command_stack = self.command_stack, []
        if not commands:
            return []
        connection = await self.connection_pool.get_connection()  # type: ignore[no-untyped-call]
        try:
            await send(connection, [words for words, _ in commands])
            replies = await receive(connection, len(commands), raise_on_error=raise_on_error)
        finally:
            await self.connection_pool.release(connection)
        return [self._convert(reply, *command) for reply, command in zip(replies, commands, strict=True)]

    def _convert(self, reply: Any, words: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Give a reply the form that redis-py gives it for this command."""
        callback = None if isinstance(reply, ResponseError) else self.response_callbacks.get(words[0])
        if callback is None:
            return reply
        return callback(reply, **{name: value for name, value in options.items() if name != "keys"})


async def send(connection: Any, commands: Iterable[Sequence[Any]]) -> None:
    """Send commands on a connection taken from the pool."""
    await connection.send_packed_command([piece for command in commands for piece in _pack(connection, command)])


async def receive(connection: Any, count: int, *, raise_on_error: bool = True) -> list[Any]:
    """Read `count` replies as the parser returns them; each may take `socket_timeout`.

    Raises the first error among the replies, or returns errors in their place.
    """
    replies: list[Any] = []
    timeout_s, now_s = connection.socket_timeout, asyncio.get_running_loop().time
    try:
        # One timer, set again for each reply: redis-py makes a new one each, which takes longer than the reply.
        async with asyncio.timeout(None) as timer:
            for _ in range(count):
                if timeout_s is not None:
                    timer.reschedule(now_s() + timeout_s)
                try:
                    replies.append(await connection.read_response(timeout=math.inf))
                except ResponseError as error:
                    replies.append(error)
    except TimeoutError:
        raise RedisTimeoutError(f"no reply within {timeout_s} s") from None
    return _raise_first(replies) if raise_on_error else replies


def read_values(client: redis.Redis, names: Iterable[str], last: Sequence[Any]) -> tuple[list[bytes | None], Any]:
    """Read string keys with a blocking client; None = the key is missing or not a string.

    Also returns the reply to the command `last`, of the same server.
    """
    pipe = client.pipeline(transaction=False)
    for name in names:
        pipe.get(name)
    pipe.execute_command(*last)  # type: ignore[no-untyped-call]
    replies = [None if _is_wrong_type(reply) else reply for reply in pipe.execute(raise_on_error=False)]
    *values, reply = _raise_first(replies)
    return values, reply


def _raise_first(replies: list[Any]) -> list[Any]:
    """Return replies. Raises the first that is an error."""
    for reply in replies:
        if isinstance(reply, ResponseError):
            raise reply
    return replies


def _is_wrong_type(reply: Any) -> bool:
    return isinstance(reply, ResponseError) and str(reply).startswith("WRONGTYPE")


def _pack(connection: Any, words: Sequence[Any]) -> list[bytes]:
    for word in words:
        if isinstance(word, _BYTES) and len(word) > _LARGE_BYTES:
            if len(word) > LARGEST_STORED_BYTES:  # the server would close the connection, which looks like an outage
                raise TooLarge(
                    f"{words[0]} has an argument of {len(word)} bytes; Redis accepts at most {LARGEST_STORED_BYTES}",
                    name="redis",
                    value=len(word),
                    bound=LARGEST_STORED_BYTES,
                )
            packed: list[bytes] = connection.pack_command(*words)
            return packed
    return [hiredis.pack_command(tuple(words))]
