"""Connections of redis-py that lead to modelled servers, by address.

redis-py's pools, its clients and our pipeline are the real ones; only sockets, parsers and the login are replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import hiredis
import redis
import redis.asyncio as aioredis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from replaybuf.store.redis import cluster, pipeline
from replaybuf.store.redis.cluster import NodeConnection
from replaybuf.store.redis.cluster_map import parse_nodes
from replaybuf.store.redis.sentinel import AsyncConnection, BlockingConnection
from tests.simulation.redis_model.link import Link
from tests.simulation.redis_model.server import RedisServer
from tests.simulation.world import World


@contextlib.contextmanager
def instead_of_sockets(world: World) -> Iterator[None]:
    """Let the connections of all pools that are made during the body lead to the servers of a world."""
    with (
        mock.patch.object(aioredis.ConnectionPool, "__init__", _leading(aioredis.ConnectionPool.__init__, world)),
        mock.patch.object(redis.ConnectionPool, "__init__", _leading(redis.ConnectionPool.__init__, world)),
        # Each client would read the version of redis-py from its files.
        mock.patch.object(redis.utils, "get_lib_version", lambda: "0"),
        # The nodes of a real cluster answer with other times at each question, ours with one of a few texts.
        mock.patch.object(cluster, "parse_nodes", functools.cache(parse_nodes)),
        # Words that are packed, only to be split again, take as long as the command.
        mock.patch.object(pipeline, "pack", _encode),
    ):
        yield


def _leading(init: Callable[..., None], world: World) -> Callable[..., None]:
    def init_pool(pool: Any, *arguments: Any, **options: Any) -> None:
        init(pool, *arguments, **options)
        pool.connection_class = functools.partial(KINDS[pool.connection_class], world=world)

    return init_pool


def _encode(commands: Iterable[Sequence[Any]]) -> list[Sequence[bytes]]:
    """Encode the words of commands, in place of packing the commands."""
    return [[word if type(word) is bytes else _encode_word(word) for word in words] for words in commands]


def _encode_word(word: Any) -> bytes:
    if type(word) is str:  # most are
        return word.encode()
    return bytes(word) if isinstance(word, memoryview) else b"%d" % word if type(word) is int else str(word).encode()


def split(pieces: Any) -> list[Sequence[bytes]]:
    """Return the words of commands: those that redis-py itself sends are packed."""
    if isinstance(pieces, bytes):
        pieces = [pieces]
    elif isinstance(pieces[0], list):
        return pieces  # type: ignore[no-any-return]
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
        self._ended = False

    def read_response(self, disable_decoding: bool = False, push_request: bool | None = False) -> Awaitable[Any]:
        link = self._connection.link
        if link is None:
            raise RedisConnectionError("Connection closed by server.")
        return link.receive()

    async def can_read(self) -> bool:
        """Check whether a reply, or the end of the connection, has come."""
        link = self._connection.link
        if link is None or self._ended:
            raise OSError("Buffer is closed.")
        return bool(link.replies) or link.broken

    def on_connect(self, connection: _Connection) -> None:
        """Begin to read."""
        self._ended = False

    def on_disconnect(self) -> None:
        """Read no more: whoever looks for a reply learns that the connection has ended."""
        self._ended = True


class _Connection(aioredis.Connection):
    """An asynchronous connection without a socket."""

    def __init__(self, *, world: World, **options: Any) -> None:
        super().__init__(**options)
        self._world = world
        self.link: Link | None = None
        self._parser: Any = _Parser(self)
        self.reply_parser = self._parser

    @property
    def is_connected(self) -> bool:
        """Whether nobody closed it here; the server may have."""
        return self.link is not None

    async def connect(self) -> None:
        """Connect, unless it is connected."""
        if self.link is None:
            await self.connect_check_health()

    async def connect_check_health(self, check_health: bool = True, retry_socket_connect: bool = True) -> None:
        """Connect, and log in."""
        within_s = self.socket_connect_timeout or 0.0
        await asyncio.sleep(2 * self._world.way_s())
        server = _find(self._world, self.host, self.port)
        if server.node.stopped:
            await asyncio.sleep(within_s)
            raise RedisTimeoutError("Timeout connecting to server")
        self.link = Link(server)
        self._parser.on_connect(self)
        try:
            await self.on_connect_check_health()
        except BaseException:
            await self.disconnect()
            raise

    async def on_connect_check_health(self, check_health: bool = True) -> None:
        """Log in: there are no users."""

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
        if self.link is None:
            await self.connect()
        if self.link is None:
            raise RedisConnectionError("Connection closed by server.")
        self.link.send(split(command))


class _ToPrimary(AsyncConnection, _Connection):
    """Such a connection to the primary that sentinels name."""


class _ToNode(NodeConnection, _Connection):
    """Such a connection to a node of a cluster: our checks after the login are the real ones."""


class _BlockingConnection(redis.Connection):
    """A connection of a thread: its commands run at once, because the whole call happens at one moment."""

    def __init__(self, *, world: World, **options: Any) -> None:
        super().__init__(**options)  # type: ignore[no-untyped-call]
        self._world = world
        self._replies: list[Any] = []

    def connect(self) -> None:
        """Connect."""
        self.connect_check_health()

    def connect_check_health(self, check_health: bool = True, retry_socket_connect: bool = True) -> None:
        """Check that the server answers."""
        self._find()
        self.on_connect_check_health(check_health=check_health)

    def on_connect_check_health(self, check_health: bool = True) -> None:
        """Log in: there are no users."""

    def _find(self) -> RedisServer:
        server = _find(self._world, self.host, self.port)
        if server.node.stopped:
            raise RedisTimeoutError("Timeout connecting to server")
        return server

    def disconnect(self, *arguments: Any, **options: Any) -> None:
        """Drop replies that nobody has read."""
        self._replies.clear()

    def can_read(self, timeout: float = 0) -> bool:
        """Check whether a reply is left."""
        return bool(self._replies)

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        """Run commands."""
        server, world = self._find(), self._world
        if world.faults.happens("cut send", world.faults.cut, world):
            raise RedisConnectionError("Connection closed by server.")
        link = Link(server)
        self._replies += [server.execute(link, words) for words in split(command)]
        link.closed = True
        server.links.remove(link)

    def read_response(self, *arguments: Any, **options: Any) -> Any:
        """Return the next reply. Raises it if it is an error."""
        reply = self._replies.pop(0)
        if isinstance(reply, ResponseError):
            raise reply
        return reply


class _BlockingToPrimary(BlockingConnection, _BlockingConnection):
    """Such a connection to the primary that sentinels named last."""


def _find(world: World, host: str, port: int) -> RedisServer:
    """Return the server at an address. Raises `RedisConnectionError` if nobody listens there."""
    server: RedisServer | None = world.network.get((host, port))
    if server is None or server.node.dead:
        raise RedisConnectionError(f"Error 111 connecting to {host}:{port}. Connection refused.")
    return server


KINDS: dict[Any, Any] = {
    aioredis.Connection: _Connection,
    NodeConnection: _ToNode,
    AsyncConnection: _ToPrimary,
    BlockingConnection: _BlockingToPrimary,
    redis.Connection: _BlockingConnection,
}
"""By class of a real connection, the modelled one."""
