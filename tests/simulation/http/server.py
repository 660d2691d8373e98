"""The HTTP server of a simulated server: the application, guards and protocol of the product, without sockets."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from replaybuf.errors import DataLost
from replaybuf.service.host import Service
from replaybuf.service.http.guard.auth import Tokens
from replaybuf.service.http.guard.connection_table import ConnectionLimits, ConnectionTable
from replaybuf.service.http.guard.origins import HostNames, OwnPagesOnly
from replaybuf.service.http.routes import application
from replaybuf.service.options import ServeOptions
from replaybuf.service.server import _Server
from tests.simulation.http.client import SimulatedForwarding
from tests.simulation.http.wires import Socket, Transport, Wire
from tests.simulation.loop import NODE
from tests.simulation.world import World

FEW_CONNECTIONS = (3, 8192)
"""Largest number of connections, one of these: with few, producers get 503 with Retry-After."""


class HttpServer:
    """Serves the connections of one process. `crashes` gets each answer that reports an internal error."""

    def __init__(self, world: World, service: Service, name: str, crashes: list[str]) -> None:
        self._world, self._node, self._crashes = world, NODE.get(), crashes
        options = ServeOptions(host=name, max_connections=world.rng.choice(FEW_CONNECTIONS))
        app = application(service, Tokens.read(None), forwarding=SimulatedForwarding(world))
        self._table = ConnectionTable(ConnectionLimits.of(options), service.traffic)
        self._table._open = _InOrder()  # type: ignore[assignment]
        self._server = _Server(
            service, self._watched(OwnPagesOnly(app, HostNames(options), service.traffic)), self._table, None
        )
        self._server.servers, self._server.lifespan = [], self._server.config.lifespan_class(self._server.config)
        self._server.server_state.connections = _InOrder()  # type: ignore[assignment]
        self._wires: list[Wire] = []
        self._stopping = False
        self._watching = asyncio.create_task(self._table.watch())

    def connect(self) -> Socket:
        """Open a connection; return the end of the client. Raises `ConnectionRefusedError` from the stop on."""
        if self._stopping:
            raise ConnectionRefusedError("the server listens no more")
        wire = Wire(self._world, self._node, self._accept)
        self._wires.append(wire)
        return wire.socket

    def _accept(self, transport: Transport) -> None:
        config: Any = self._server.config
        protocol = config.http_protocol_class(
            config=config, server_state=self._server.server_state, app_state={}, _loop=self._world.loop
        )
        transport.protocol = protocol
        protocol.connection_made(transport)

    @property
    def busy(self) -> bool:
        """Whether a call is handled."""
        return bool(self._server.server_state.tasks)

    async def stop(self) -> None:
        """End in order: answer the calls in progress, for a bounded time."""
        self._stopping = True
        await self._server.shutdown()
        self._watching.cancel()

    def reset(self) -> None:
        """Reset all connections, as the system does for a process that has ended."""
        for wire in self._wires:
            wire.reset()

    def _watched(self, app: ASGIApp) -> ASGIApp:
        async def watch(scope: Scope, receive: Receive, send: Send) -> None:
            status, body = 0, b""

            async def note_error(message: Message) -> None:
                nonlocal status, body
                status = message.get("status", status)
                body += message.get("body", b"")
                whole = message["type"] == "http.response.body" and not message.get("more_body")
                if whole and status == DataLost.status and DataLost.slug.encode() not in body:
                    where = f"{self._world.now_s():.3f} {self._node} {scope['method']} {scope['path']}"
                    self._crashes.append(f"{where} was answered {body.decode()}")
                await send(message)

            await app(scope, receive, note_error)

        return watch


class _InOrder(dict[Any, None]):
    """A set whose order is that of its additions: that of a set depends on addresses in memory."""

    def add(self, member: Any) -> None:
        """Add a member."""
        self[member] = None

    def discard(self, member: Any) -> None:
        """Remove a member."""
        self.pop(member, None)
