"""TCP sockets that servers listen on, and their addresses."""

from __future__ import annotations

import socket

from replaybuf.errors import ServiceUnavailable

BACKLOG = 2048
"""Connections that the system keeps until the server accepts them."""


def listen(host: str, port: int, option: str) -> socket.socket:
    """Listen on a port, 0 = a free one. Raises `ServiceUnavailable`, with the `option` to change, if it is taken."""
    # With the protocol set: asyncio sets TCP_NODELAY only on sockets that report TCP.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        cause, name = error.strerror or error, option.removeprefix("--").replace("-", "_")
        detail = f"cannot listen on {host}:{port}: {cause}; choose another {option} (port 0 takes a free one)"
        raise ServiceUnavailable(detail, name=name, value=port, bound="a free port") from None
    listening.setblocking(False)
    return listening


def url_of(host: str, port: int, *, tls: bool = False) -> str:
    """Return the address of a server at a host and a port."""
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def url_here(host: str, port: int) -> str:
    """Return the address for clients on this machine of a server that listens on `host`."""
    return url_of({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)
