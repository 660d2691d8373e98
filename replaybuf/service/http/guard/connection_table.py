"""Open connections of a server: how many there may be, and which one closes when there is no room."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import resource
from collections import Counter
from typing import Protocol

from replaybuf.service.http.guard.gates import ReadGate
from replaybuf.service.options import ServeOptions
from replaybuf.service.traffic import Traffic

logger = logging.getLogger(__name__)

PERIOD_S = 0.5
RESERVED_DESCRIPTORS = 256
"""Open files that are no connections of clients: Redis, data files, sockets that listen."""


class Client(Protocol):
    """One connection, as the table sees it."""

    @property
    def address(self) -> str | None:
        """Address of the peer; None on a unix socket."""

    def drop(self, reason: str) -> None:
        """Close the connection, for one of `REFUSALS`."""

    def wait_longer(self, seconds: float) -> None:
        """Count time that passed in the present phase."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Bounds of connections and of requests that are not complete; `ServeOptions` explains each field."""

    max_connections: int
    max_half_heads: int
    max_head_bytes: int
    head_timeout_s: float
    body_timeout_s: float
    min_body_bytes_per_s: int

    @classmethod
    def of(cls, options: ServeOptions) -> ConnectionLimits:
        """Read the options."""
        return cls(**{field.name: getattr(options, field.name) for field in dataclasses.fields(cls)})


class ConnectionTable:
    """All connections of a server: open <= `max_connections`.

    A new connection takes the place of the oldest one without a complete request head, or else of the one that was
    idle longest. So connections with a request in progress stay, and new clients get in while others only hold on.
    """

    def __init__(self, limits: ConnectionLimits, traffic: Traffic) -> None:
        self.limits = limits
        self.traffic = traffic
        self.gate = ReadGate()
        self._open: set[Client] = set()
        # In the order of arrival: the first is the oldest.
        self._half: dict[Client, None] = {}
        self._idle: dict[Client, None] = {}
        self._earlier: list[Client] = []
        """Half heads of the period before."""

    def admit(self, client: Client) -> bool:
        """Add a new connection; return False if all others have a request in progress."""
        if len(self._open) >= self.limits.max_connections:
            oldest = next(iter(self._half or self._idle), None)
            if oldest is None:
                self.traffic.refused["too_many_connections"] += 1
                return False
            self.forget(oldest)
            oldest.drop("too_many_connections")
        self._open.add(client)
        self._half[client] = None
        self.traffic.connections = len(self._open)
        return True

    def forget(self, client: Client) -> None:
        """Remove a connection that is closed or about to be."""
        self._open.discard(client)
        self._half.pop(client, None)
        self._idle.pop(client, None)
        self.traffic.connections = len(self._open)

    def mark_half(self, client: Client) -> None:
        """Record that a head began."""
        self._idle.pop(client, None)
        if client in self._open:
            self._half[client] = None

    def mark_busy(self, client: Client) -> None:
        """Record that a head is complete, or that bytes of the client wait for the service."""
        self._half.pop(client, None)
        self._idle.pop(client, None)

    def mark_idle(self, client: Client) -> None:
        """Record that a request is answered."""
        if client in self._open:
            self._idle[client] = None

    async def watch(self) -> None:
        """Let the connections count the time, twice a second, until cancelled."""
        loop = asyncio.get_running_loop()
        before_s = loop.time()
        while True:
            await asyncio.sleep(PERIOD_S)
            now_s = loop.time()
            # At most twice the period: what arrived while this process stood still is not read yet.
            self.count_time(min(now_s - before_s, 2 * PERIOD_S))
            before_s = now_s

    def count_time(self, seconds: float) -> None:
        """Let every connection count time that passed, and bound the half heads of each address."""
        for client in list(self._open):
            client.wait_longer(seconds)
        self._bound_half_heads()
        self._earlier = list(self._half)

    def _bound_half_heads(self) -> None:
        """Drop the oldest half heads above the bound of their address; those of the last period may be on their way."""
        if not self.limits.max_half_heads:
            return
        left = [client for client in self._earlier if client in self._half and client.address is not None]
        counts = Counter(client.address for client in left)
        for client in left:
            if counts[client.address] > self.limits.max_half_heads:
                counts[client.address] -= 1
                client.drop("too_many_half_heads")


def raise_descriptor_limit(limits: ConnectionLimits, backlog: int) -> ConnectionLimits:
    """Raise the limit of open files as far as needed and allowed; return the bounds that fit below it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.max_connections + backlog + RESERVED_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    room = max(1, soft - RESERVED_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or limits.max_connections <= room:
        return limits
    logger.warning(
        "max_connections is %d; the limit of %d open files allows %d (ulimit -n)", limits.max_connections, soft, room
    )
    return dataclasses.replace(limits, max_connections=room)
