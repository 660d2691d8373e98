"""A Redis client that notices when replies and commands are out of step.

Replies have no names: a reply that comes twice (a broken proxy, a half-read connection) makes every later one answer
the wrong command, and a group would be judged by the bytes of another. So every call ends with an ECHO of a word of its
own; where another reply stands in its place, none of the call's replies is believed.
"""

from __future__ import annotations

import itertools
import secrets
from typing import Any

import redis.asyncio as aioredis
from redis.asyncio.client import Pipeline
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, ResponseError

_MISREAD = (InvalidResponse, TypeError, ValueError, LookupError, AttributeError)
"""What redis-py raises where a reply has not the shape that its command's reply has."""


class OutOfStep(RedisConnectionError):
    """Replies do not belong to the commands of this call; whether these were done is not known."""


WORDS = (f"{secrets.token_hex(8)}-{n}".encode() for n in itertools.count())
"""Words that no reply holds by chance, each one once."""


async def send_in_step(connection: Any, command: list[Any]) -> bytes:
    """Send one command on a connection taken from the pool; return the word that stands behind its reply."""
    word = next(WORDS)
    await connection.send_packed_command(connection.pack_commands([command, ("ECHO", word)]))
    return word


async def receive_in_step(connection: Any, word: bytes) -> Any:
    """Read the reply before `word`, as the parser gives it. Raises `OutOfStep`."""
    reply, echoed = await connection.read_response(), await connection.read_response()
    if echoed != word:
        await connection.disconnect()
        raise OutOfStep(f"replies are out of step with commands: the last reply is {echoed!r:.60}")
    return reply


class InStepPipeline(Pipeline):
    """A pipeline whose replies are checked; never a transaction."""

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        """Send the commands and return their replies. Raises `OutOfStep`, and the first error among the replies."""
        if not self.command_stack:
            return []
        word = next(WORDS)
        self.execute_command("ECHO", word)
        try:
            *replies, echoed = await super().execute(raise_on_error=False)
        except _MISREAD as error:
            raise await self._out_of_step(repr(error)) from error
        if echoed != word:
            raise await self._out_of_step(f"the last reply is {echoed!r:.60}")
        if raise_on_error:
            for reply in replies:
                if isinstance(reply, ResponseError):
                    raise reply
        return replies

    async def _out_of_step(self, how: str) -> OutOfStep:
        # The connection is back in the pool, with replies to come that nobody waits for.
        await self.connection_pool.disconnect(inuse_connections=False)
        return OutOfStep(f"replies are out of step with commands: {how}")


class InStepRedis(aioredis.Redis):
    """A client whose every call is a pipeline with the check."""

    def pipeline(self, transaction: bool = False, shard_hint: str | None = None) -> InStepPipeline:
        """Start a pipeline; its commands are not one transaction."""
        return InStepPipeline(self.connection_pool, self.response_callbacks, False, shard_hint)

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """Send one command and return its reply. Raises `OutOfStep`, and the error that the reply is."""
        pipe = self.pipeline()
        pipe.execute_command(*args, **options)
        (reply,) = await pipe.execute()
        return reply
