"""Producers by HTTP: the asyncio client of the product, and what servers forward to each other, on the network."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from unittest import mock

import httpcore
import msgspec

from replaybuf.client import http_client, retries
from replaybuf.client.append_bodies import read_results
from replaybuf.client.http_client import AsyncHttpClient
from replaybuf.client.http_request import Exchange, HttpRequest
from replaybuf.client.retries import Patience
from replaybuf.client.transport import AsyncSocketTransport
from replaybuf.errors import InvalidGroups, ReplaybufError
from replaybuf.service.http.forwarding import Forwarding
from replaybuf.wire.contract import AppendResult, Tickets
from replaybuf.wire.group import Group, group_to_json
from tests.chaos.calling import Outcome
from tests.chaos.history import OK
from tests.simulation.http.wires import Socket
from tests.simulation.world import World

T = TypeVar("T")

CALL_TIMEOUT_S = 2.5
"""Timeout of a client's call, above the time that it waits at the server."""
RETRY_FOR_S = 8.0
WAIT_S = 0.4
"""How long a call for tickets waits."""


async def connect(world: World, host: str, port: int) -> Any:
    """Open a connection to a server. Raises `ConnectionRefusedError` if nobody listens there."""
    await asyncio.sleep(2 * world.way_s())
    server = world.network.get((host, port))
    if server is None or server.http is None:
        raise ConnectionRefusedError(f"{host}:{port} refused the connection")
    return server.http.connect()


class _Transport(AsyncSocketTransport):
    """The transport of the client, whose connections are simulated."""

    def __init__(self, world: World, address: str, headers: Mapping[str, str]) -> None:
        super().__init__(address, headers)
        self._world = world

    async def _connect(self) -> Any:
        return await connect(self._world, self._host, self._port)


@contextlib.contextmanager
def instead_of_http(world: World) -> Iterator[None]:
    """Let clients that are made during the body use the network and the clock of a world."""
    with (
        mock.patch.object(http_client, "async_transport_to", functools.partial(_Transport, world)),
        mock.patch.object(http_client, "Patience", functools.partial(Patience, clock=world.now_s)),
        # Not the shared generator: modules that are imported during the first schedule of a process draw from it.
        mock.patch.object(retries, "random", random.Random(f"pauses {world.seed}")),
    ):
        yield


class _Client(AsyncHttpClient):
    """The client, which also sends groups as JSON, as programs without the library do."""

    async def append_json(self, groups: Sequence[Group]) -> list[AppendResult]:
        """Store groups; return a result for each."""
        return await self._drive(_append_json(groups))


def _append_json(groups: Sequence[Group]) -> Exchange[list[AppendResult]]:
    body = msgspec.json.encode({"groups": [group_to_json(group) for group in groups]})
    reply = yield HttpRequest(method="POST", path="/groups", content=body, answers=frozenset({InvalidGroups.status}))
    return read_results(reply, len(groups))


class HttpCalls:
    """The calls of a producer of one run, by HTTP."""

    def __init__(self, world: World, run: str, urls: Sequence[str]) -> None:
        self._world, self._run = world, run
        listed = world.rng.sample(urls, len(urls))
        self._client = _Client(",".join(listed), run, timeout_s=CALL_TIMEOUT_S, retry_for_s=RETRY_FOR_S)

    async def take(self, producer: str, count: int, adapter: str) -> Outcome[Tickets]:
        """Take tickets."""
        return await self._observe(self._client.take_tickets(producer, count, adapter, int(1000 * WAIT_S)))

    async def append(self, groups: Sequence[Group], *, frames: bool) -> Outcome[list[AppendResult]]:
        """Append groups."""
        return await self._observe(self._client.append(groups) if frames else self._client.append_json(groups))

    async def give_back(self, ticket: str) -> Outcome[None]:
        """Give a ticket back."""
        return await self._observe(self._client.return_ticket(ticket, "chaos"))

    async def _observe(self, call: Awaitable[T]) -> Outcome[T]:
        world = self._world
        sent_s, outcome, detail, result = world.now_s(), OK, "", None
        try:
            result = await call
        except ReplaybufError as error:
            outcome, detail = error.slug, error.detail
        seen = {"run": self._run, "sent_s": sent_s, "at_s": world.now_s(), "server": self._client.address}
        return Outcome(seen | {"outcome": outcome, "detail": detail}, result)


class SimulatedForwarding(Forwarding):
    """Calls of one server to another, on the simulated network: httpx and its pool are the real ones."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def _open(self, leader: str) -> Any:
        client: Any = super()._open(leader)
        client._transport._pool._network_backend = _Network(self._world)
        return client


class _Network(httpcore.AsyncNetworkBackend):
    """Connections of httpx."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> _Stream:
        """Open a connection."""
        with _as_errors(httpcore.ConnectTimeout, httpcore.ConnectError):
            async with asyncio.timeout(timeout):
                return _Stream(await connect(self._world, host, port))


class _Stream(httpcore.AsyncNetworkStream):
    """One connection of httpx."""

    def __init__(self, socket: Socket) -> None:
        self._socket = socket

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Wait for bytes; return none at the end."""
        buffer = memoryview(bytearray(max_bytes))
        with _as_errors(httpcore.ReadTimeout, httpcore.ReadError):
            async with asyncio.timeout(timeout):
                count = await self._socket.receive_into(buffer)
        return bytes(buffer[:count])

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send bytes."""
        with _as_errors(httpcore.WriteTimeout, httpcore.WriteError):
            await self._socket.send_all(buffer)

    async def aclose(self) -> None:
        """Close the connection."""
        self._socket.close()

    def get_extra_info(self, info: str) -> Any:
        """Return whether something has arrived; nothing else is known."""
        return self._socket.readable if info == "is_readable" else None


@contextlib.contextmanager
def _as_errors(late: type[Exception], other: type[Exception]) -> Iterator[None]:
    """Raise errors of httpcore in place of the system's."""
    try:
        yield
    except TimeoutError as error:
        raise late(str(error)) from error
    except OSError as error:
        raise other(str(error)) from error
