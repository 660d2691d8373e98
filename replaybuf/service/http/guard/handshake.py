"""A TLS connection before its first request: it has its place in the table from the moment it is accepted."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from typing import Protocol

from replaybuf.service.http.guard.connection_table import ConnectionTable

logger = logging.getLogger(__name__)


class MakeConnection(Protocol):
    """Makes the protocol of a connection, which takes the place of `handshake` in the table."""

    def __call__(self, *, handshake: Handshake) -> asyncio.Protocol:
        """Make one."""


class Handshake(asyncio.Protocol):
    """The TLS handshake of one client, at most `head_timeout_s`; then a connection takes its place in the table.

    A loop that is given the context itself shows a protocol nothing before the handshake is done: clients that never
    finish it would take all descriptors of the process.
    """

    def __init__(self, table: ConnectionTable, context: ssl.SSLContext, connection: MakeConnection) -> None:
        self._table = table
        self._context = context
        self._connection = connection
        self._task: asyncio.Task[None] | None = None
        self._waited_s = 0.0
        self.address: str | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin the handshake if there is room."""
        peer = transport.get_extra_info("peername")
        self.address = peer[0] if isinstance(peer, tuple) else None
        try:
            if self._table.admit(self):
                # `start_tls` would lose what this transport reads before it: the handshake gets its own descriptor.
                client = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
                self._task = asyncio.get_running_loop().create_task(self._shake(client))
        except OSError as error:  # no descriptor is left
            self._table.forget(self)
            logger.warning("connection dropped client=%s: %s", self.address, error)
        finally:
            transport.abort()

    async def _shake(self, client: socket.socket) -> None:
        loop, later_s = asyncio.get_running_loop(), 2 * self._table.limits.head_timeout_s  # the table ends it first
        client.setblocking(False)
        try:
            await loop.connect_accepted_socket(
                lambda: self._connection(handshake=self), client, ssl=self._context, ssl_handshake_timeout=later_s
            )
        except OSError as error:  # also faults of TLS
            logger.debug("no handshake client=%s: %s", self.address, error)
            client.close()
        except asyncio.CancelledError:  # dropped
            client.close()
            raise
        finally:
            self._table.forget(self)

    def drop(self, reason: str) -> None:
        """Close the connection at once."""
        self._table.traffic.refused[reason] += 1
        logger.debug("handshake dropped client=%s reason=%s", self.address, reason)
        if self._task:
            self._task.cancel()

    def wait_longer(self, seconds: float) -> None:
        """Count time that passed; a handshake takes at most as long as a head."""
        self._waited_s += seconds
        if self._waited_s >= self._table.limits.head_timeout_s:
            self.drop("head_timeout")
