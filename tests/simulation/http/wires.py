"""TCP connections of the simulated network: bytes come in pieces, late or never, and a connection may end anywhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeAlias

from tests.simulation.loop import WORLD, Node
from tests.simulation.world import LATEST_S, World

CUTS = (0, 0, 1, 2)
"""How often what is sent at once is split into pieces, one of these."""
LOST, LATE, CUT = "lost", "late", "cut"
Arrival: TypeAlias = bytes | OSError | None
"""What arrives: bytes, a reset, or the orderly end (None)."""


class _Way:
    """One direction of a connection. What arrives there goes to `receive` on `node`, in the order of its sending."""

    def __init__(self, world: World, node: Node, name: str, receive: Callable[[Arrival], None]) -> None:
        self._world, self._node, self._name, self._receive = world, node, name, receive
        self.arrives_s = 0.0
        """When the newest arrives."""
        self._silent = False
        """Whether nothing arrives any more."""

    def send(self, data: bytes) -> bool:
        """Send bytes; return whether the connection is cut behind some of them."""
        world, late_s, fate = self._world, 0.0, None
        if world.faults.happens(f"http {self._name}", world.faults.lost_call, world):
            fate = world.rng.choice((LOST, LATE, CUT))
            world.note(f"HTTP: {self._name} of {len(data)} bytes is {fate}")
        if fate == LOST:
            self._silent = True
        elif fate == LATE:
            late_s = world.rng.uniform(0.0, LATEST_S)
        elif fate == CUT:
            data = data[: world.rng.randint(0, len(data))]
        cuts = sorted(world.rng.randrange(len(data)) for _ in range(world.rng.choice(CUTS))) if data else []
        for first, last in zip([0, *cuts], [*cuts, len(data)], strict=True):
            if first < last:
                self._arrive(data[first:last], late_s)
        return fate == CUT

    def end(self, error: OSError | None = None) -> None:
        """Send the end of the connection."""
        self._arrive(error, 0.0)
        self._silent = True

    def _arrive(self, arrival: Arrival, late_s: float) -> None:
        if not self._silent:
            self.arrives_s = max(self.arrives_s, self._world.now_s() + self._world.way_s() + late_s)
            self._world.at(self._node, self.arrives_s, self._receive, arrival)


class Wire:
    """One connection of a client to the process `node` of a server. `socket` and `transport` are its ends.

    `accept` makes the protocol of the transport, when the connection has come to the server.
    """

    def __init__(self, world: World, node: Node, accept: Callable[[Transport], None]) -> None:
        self.socket, self.transport = Socket(self), Transport(self)
        self._to_server = _Way(world, node, "request", self.transport.receive)
        self._to_client = _Way(world, WORLD, "answer", self.socket.receive)
        self._to_server.arrives_s = world.now_s() + world.way_s()
        world.at(node, self._to_server.arrives_s, accept, self.transport)

    def send_request(self, data: bytes) -> None:
        """Send bytes to the server."""
        if self._to_server.send(data):
            self.reset()

    def send_answer(self, data: bytes) -> None:
        """Send bytes to the client."""
        if self._to_client.send(data):
            self.reset()

    def end_requests(self) -> None:
        """Let the server know that the client has closed its end."""
        self._to_server.end()

    def end_answers(self, error: OSError | None = None) -> None:
        """Let the client know that the server has closed its end."""
        self._to_client.end(error)

    def reset(self) -> None:
        """End the connection at both ends, behind what is on its way."""
        self._to_server.end(ConnectionResetError("Connection reset by peer"))
        self._to_client.end(ConnectionResetError("Connection reset by peer"))


class Socket:
    """The end of a client, as an event loop uses a socket."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._arrived = bytearray()
        self._ended = self._closed = False
        self._error: OSError | None = None
        self._reader: asyncio.Future[None] | None = None

    def receive(self, arrival: Arrival) -> None:
        """Take what arrives from the network."""
        if isinstance(arrival, bytes):
            self._arrived += arrival
        else:
            self._ended, self._error = True, arrival
        if self._reader and not self._reader.done():
            self._reader.set_result(None)

    async def send_all(self, data: bytes) -> None:
        """Send bytes. Raises `ConnectionResetError` on a connection that was reset."""
        if self._error:
            raise self._error
        self._wire.send_request(bytes(data))

    async def receive_into(self, buffer: memoryview) -> int:
        """Wait for bytes and copy them; return how many, 0 at the end. Raises `ConnectionResetError`."""
        while not (self._arrived or self._ended):
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if not self._arrived and self._error:
            raise self._error
        count = min(len(self._arrived), len(buffer))
        buffer[:count] = self._arrived[:count]
        del self._arrived[:count]
        return count

    @property
    def readable(self) -> bool:
        """Whether bytes or the end have arrived."""
        return bool(self._arrived) or self._ended

    def setblocking(self, flag: bool) -> None:
        """Do nothing: no call blocks."""

    def recv(self, size: int, flags: int) -> bytes:
        """Look whether something has arrived. Raises `BlockingIOError` if nothing has."""
        if not self.readable:
            raise BlockingIOError
        return bytes(self._arrived[:size])

    def close(self) -> None:
        """Close this end."""
        if not self._closed:
            self._closed = True
            self._wire.end_requests()


class Transport(asyncio.Transport):
    """The end of a server. `protocol` gets what arrives."""

    protocol: Any

    def __init__(self, wire: Wire) -> None:
        super().__init__({"peername": ("client", 50_000), "sockname": ("server", 8900)})
        self._wire = wire
        self._closing = self._paused = False
        self._held: list[Arrival] = []

    def receive(self, arrival: Arrival) -> None:
        """Take what arrives from the network."""
        if self._closing:
            return
        if self._paused:
            self._held.append(arrival)
        elif isinstance(arrival, bytes):
            self.protocol.data_received(arrival)
        elif arrival is None:
            self.protocol.eof_received()
            self.close()
        else:
            self._lose(arrival)

    def write(self, data: Any) -> None:
        """Send bytes to the client."""
        if not self._closing and data:
            self._wire.send_answer(bytes(data))

    def can_write_eof(self) -> bool:
        """Return that this end can be closed for writing alone."""
        return True

    def write_eof(self) -> None:
        """Close this end for writing."""
        self._wire.end_answers()

    def close(self) -> None:
        """Close this end behind what was written."""
        if not self._closing:
            self._wire.end_answers()
            self._lose(None)

    def abort(self) -> None:
        """Close this end at once."""
        if not self._closing:
            self._wire.end_answers(ConnectionResetError("Connection reset by peer"))
            self._lose(None)

    def _lose(self, error: OSError | None) -> None:
        self._closing = True
        asyncio.get_running_loop().call_soon(self.protocol.connection_lost, error)

    def is_closing(self) -> bool:
        """Return whether this end is closed or about to be."""
        return self._closing

    def pause_reading(self) -> None:
        """Hold back what arrives."""
        self._paused = True

    def resume_reading(self) -> None:
        """Hand on what arrived meanwhile."""
        if self._paused:
            self._paused = False
            asyncio.get_running_loop().call_soon(self._hand_on)

    def _hand_on(self) -> None:
        while self._held and not self._paused:
            self.receive(self._held.pop(0))
