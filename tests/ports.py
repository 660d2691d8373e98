"""Free ports for servers that tests start."""

from __future__ import annotations

import contextlib
import random
import socket

LOWEST, HIGHEST = 20_000, 32_000
"""Below the ports that the system gives to clients, so that a server can end and start again on its port."""
_random = random.SystemRandom()


def free_ports(count: int) -> list[int]:
    """Find ports of this host that nobody listens on."""
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < count:
            probe, port = stack.enter_context(socket.socket()), _random.randint(LOWEST, HIGHEST)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                ports.append(port)
        return ports


def free_port() -> int:
    """Find a port of this host that nobody listens on."""
    (port,) = free_ports(1)
    return port
