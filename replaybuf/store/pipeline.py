"""A Redis client that notices when replies and commands are out of step.

Replies have no names: a reply that comes twice (a broken proxy, a half-read connection) makes every later one answer
the wrong command, and a group would be judged by the bytes of another. So every call ends with an ECHO of a word of its
own; where another reply stands in its place, none of the call's replies is believed.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import hiredis
import redis
import redis.asyncio as aioredis
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

_BYTES = (bytes, memoryview)
_LARGE_BYTES = 4096
"""What is longer is not copied on its way."""
_MISREAD = (InvalidResponse, TypeError, ValueError, LookupError, AttributeError)
"""What redis-py raises where a reply has not the shape that its command's reply has."""


class OutOfStep(RedisConnectionError):
    """Replies do not belong to the commands of this call; whether these were done is not known."""


_PREFIX, _COUNT = secrets.token_hex(8), itertools.count()


def _new_word() -> bytes:
    """Make up a word that no reply holds by chance; threads may ask for one at the same time."""
    return f"{_PREFIX}-{next(_COUNT)}".encode()


async def send_in_step(connection: Any, commands: Iterable[Sequence[Any]]) -> bytes:
    """Send commands on a connection taken from the pool; return the word that stands behind their replies."""
    word = _new_word()
    packed = [piece for command in (*commands, ("ECHO", word)) for piece in _packed(connection, command)]
    await connection.send_packed_command(packed)
    return word


async def receive_in_step(connection: Any, count: int, word: bytes, *, raise_on_error: bool = True) -> list[Any]:
    """Read so many replies before `word`, as the parser gives them.

    Raises `OutOfStep`, and the first error among the replies unless it is wanted in its place.
    """
    *replies, echoed = await _replies(connection, count + 1)
    if echoed != word:
        await connection.disconnect()
        raise _out_of_step(_last(echoed))
    return _sound(replies) if raise_on_error else replies


def get_in_step(client: redis.Redis, names: Iterable[str]) -> list[bytes | None]:
    """Get values by a client that blocks; None where there is none, or a list or the like in its place.

    Raises `OutOfStep`, and the first error among the replies.
    """
    word, pipe = _new_word(), client.pipeline(transaction=False)
    for name in names:
        pipe.get(name)
    pipe.echo(word)
    try:
        *values, echoed = pipe.execute(raise_on_error=False)
    except _MISREAD as error:
        client.connection_pool.disconnect(inuse_connections=False)
        raise _out_of_step(repr(error)) from error
    if echoed != word:
        client.connection_pool.disconnect(inuse_connections=False)
        raise _out_of_step(_last(echoed))
    return _sound([None if _is_no_string(value) else value for value in values])


async def _replies(connection: Any, count: int) -> list[Any]:
    """Read replies, errors among them; each may take `socket_timeout`."""
    replies: list[Any] = []
    timeout_s, now_s = connection.socket_timeout, asyncio.get_running_loop().time
    try:
        # One timer that is set again for each reply: redis-py's own, made anew for each, take longer than the replies.
        async with asyncio.timeout(None) as patience:
            for _ in range(count):
                if timeout_s is not None:
                    patience.reschedule(now_s() + timeout_s)
                try:
                    replies.append(await connection.read_response(timeout=math.inf))
                except ResponseError as error:
                    replies.append(error)
    except TimeoutError:
        raise RedisTimeoutError(f"no reply within {timeout_s} s") from None
    return replies


def _packed(connection: Any, command: Sequence[Any]) -> list[bytes]:
    for word in command:
        if isinstance(word, _BYTES) and len(word) > _LARGE_BYTES:
            packed: list[bytes] = connection.pack_command(*command)
            return packed
    name = command[0].split() if isinstance(command[0], str) else command[:1]  # redis-py writes "CONFIG GET" as one
    return [hiredis.pack_command((*name, *command[1:]))]


def _is_no_string(reply: Any) -> bool:
    return isinstance(reply, ResponseError) and str(reply).startswith("WRONGTYPE")


def _sound(replies: list[Any]) -> list[Any]:
    """Return replies. Raises the first that is an error."""
    for reply in replies:
        if isinstance(reply, ResponseError):
            raise reply
    return replies


def _last(echoed: Any) -> str:
    return f"the last reply is {echoed!r:.60}"


def _out_of_step(how: str) -> OutOfStep:
    return OutOfStep(f"replies are out of step with commands: {how}")


class InStepPipeline(Pipeline):
    """A pipeline whose replies are checked; never a transaction.

    It packs its commands and reads their replies itself: to store or to load a batch takes hundreds of them, and
    redis-py, with its hooks for scripts, transactions and retries, takes three times as long for each.
    """

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        """Send the commands and return their replies. Raises `OutOfStep`, and the first error among the replies."""
        commands, self.command_stack = self.command_stack, []
        if not commands:
            return []
        connection = await self.connection_pool.get_connection()  # type: ignore[no-untyped-call]
        try:
            word = await send_in_step(connection, [args for args, _ in commands])
            try:
                replies = await receive_in_step(connection, len(commands), word, raise_on_error=raise_on_error)
                return [self._formed(reply, *command) for reply, command in zip(replies, commands, strict=True)]
            except _MISREAD as error:
                await connection.disconnect()
                raise _out_of_step(repr(error)) from error
        finally:
            await self.connection_pool.release(connection)

    def _formed(self, reply: Any, command: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Give a reply the form that redis-py gives it for this command."""
        callback = None if isinstance(reply, ResponseError) else self.response_callbacks.get(command[0])
        if callback is None:
            return reply
        return callback(reply, **{name: value for name, value in options.items() if name != "keys"})


class InStepRedis(aioredis.Redis):
    """A client whose every call is a pipeline with the check."""

    @classmethod
    def open(cls, url: str, socket_timeout_s: float | None, options: Mapping[str, Any]) -> InStepRedis:
        """Make a client that never retries. Raises `ValueError` for a wrong address."""
        retry = Retry(NoBackoff(), 0)
        client: Any = cls.from_url(url, socket_timeout=socket_timeout_s, retry=retry, **options)
        return cast(InStepRedis, client)

    def pipeline(self, transaction: bool = False, shard_hint: str | None = None) -> InStepPipeline:
        """Start a pipeline; its commands are not one transaction."""
        return InStepPipeline(self.connection_pool, self.response_callbacks, False, shard_hint)

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """Send one command and return its reply. Raises `OutOfStep`, and the error that the reply is."""
        pipe = self.pipeline()
        pipe.execute_command(*args, **options)
        (reply,) = await pipe.execute()
        return reply
