"""Connections of redis-py that lead to the modelled server, and how a store gets them.

redis-py's pools, its clients and our pipeline are the real ones; only the socket and the parser are replaced.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import hiredis
import redis
import redis.asyncio as aioredis
from redis.driver_info import DriverInfo
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from replaybuf.store.redis.connection import Connection
from tests.simulation.redis_model.link import Link
from tests.simulation.redis_model.server import RedisServer

DRIVER = DriverInfo()
"""For all connections: each would read the version of redis-py from its files."""


def use_model(connection: Connection, server: RedisServer) -> None:
    """Let all clients of a store's connection reach the modelled server. Call it before the first command."""
    for client in (connection.client, connection._blocking):
        client.connection_pool.connection_class = functools.partial(_Connection, server)  # type: ignore[assignment]
    lead_to(connection.payload_client, server)


def lead_to(client: Any, server: RedisServer) -> None:
    """Let a client of threads reach the modelled server."""
    client.connection_pool.connection_class = functools.partial(_BlockingConnection, server)


def split(pieces: Iterable[Any]) -> list[Sequence[bytes]]:
    """Split packed commands into their words."""
    reader = hiredis.Reader()
    for piece in pieces:
        reader.feed(piece)
    commands: list[Sequence[bytes]] = []
    while (words := reader.gets()) is not False:
        commands.append(words)
    return commands


class _Parser:
    """Reads replies of a link, as redis-py's parser does: errors of commands are returned."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection

    async def read_response(self, disable_decoding: bool = False, push_request: bool | None = False) -> Any:
        link = self._connection.link
        if link is None:
            raise RedisConnectionError("Connection closed by server.")
        return await link.receive()

    async def can_read(self) -> bool:
        """Check whether a reply, or the end of the connection, has come."""
        link = self._connection.link
        if link is None:
            raise OSError("Buffer is closed.")
        return bool(link.replies) or link.broken

    def on_disconnect(self) -> None:
        """Do nothing."""


class _Connection(aioredis.Connection):
    """An asynchronous connection without a socket."""

    def __init__(self, server: RedisServer, **options: Any) -> None:
        super().__init__(driver_info=DRIVER, **options)
        self._server = server
        self.link: Link | None = None
        self._parser: Any = _Parser(self)
        self.reply_parser = self._parser

    @property
    def is_connected(self) -> bool:
        """Whether nobody closed it here; the server may have."""
        return self.link is not None

    async def connect(self) -> None:
        """Connect, unless it is connected."""
        if self.link is not None:
            return
        world = self._server.world
        within_s = self.socket_connect_timeout or 0.0
        await asyncio.sleep(2 * world.way_s())
        if self._server.node.dead:
            raise RedisConnectionError("Error 111 connecting to redis:6379. Connection refused.")
        if self._server.node.stopped:
            await asyncio.sleep(within_s)
            raise RedisTimeoutError("Timeout connecting to server")
        self.link = Link(self._server)

    async def disconnect(self, nowait: bool = False, *arguments: Any, **options: Any) -> None:
        """Close the connection."""
        link, self.link = self.link, None
        if link is not None:
            link.close()

    async def can_read(self) -> bool:
        """Check whether a reply, or the end of the connection, has come."""
        if self.link is None:
            raise RedisConnectionError("Buffer is closed.")
        return bool(self.link.replies) or self.link.broken

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        """Send commands; connect first if necessary."""
        await self.connect()
        if self.link is None:
            raise RedisConnectionError("Connection closed by server.")
        self.link.send(split([command] if isinstance(command, bytes) else command))


class _BlockingConnection(redis.Connection):
    """A connection of a thread: its commands run at once, because the whole call happens at one moment."""

    def __init__(self, server: RedisServer, **options: Any) -> None:
        super().__init__(driver_info=DRIVER, **options)  # type: ignore[no-untyped-call]
        self._server = server
        self._replies: list[Any] = []

    def connect(self) -> None:
        """Check that the server answers."""
        if self._server.node.dead:
            raise RedisConnectionError("Error 111 connecting to redis:6379. Connection refused.")
        if self._server.node.stopped:
            raise RedisTimeoutError("Timeout connecting to server")

    def disconnect(self, *arguments: Any, **options: Any) -> None:
        """Drop replies that nobody has read."""
        self._replies.clear()

    def can_read(self, timeout: float = 0) -> bool:
        """Check whether a reply is left."""
        return bool(self._replies)

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        """Run commands."""
        self.connect()
        world = self._server.world
        if world.faults.happens("cut send", world.faults.cut, world):
            raise RedisConnectionError("Connection closed by server.")
        link = Link(self._server)
        self._replies += [self._server.execute(link, words) for words in split(command)]
        link.closed = True
        self._server.links.remove(link)

    def read_response(self, *arguments: Any, **options: Any) -> Any:
        """Return the next reply. Raises it if it is an error."""
        reply = self._replies.pop(0)
        if isinstance(reply, ResponseError):
            raise reply
        return reply
