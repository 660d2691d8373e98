"""Listening sockets of a server: TCP, a unix socket, or both; and its certificate."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from replaybuf.certificates import Certificate, open_certificate
from replaybuf.errors import Invalid, ReplaybufError, ServiceUnavailable
from replaybuf.listening import BACKLOG, listen, url_of
from replaybuf.service.options import ServeOptions

SOCKET_MODE = 0o600
"""Only this user can connect to a unix socket."""


@contextlib.contextmanager
def listening_sockets(options: ServeOptions) -> Iterator[dict[str, socket.socket]]:
    """Open the listening sockets, by the address for clients; close them at the end.

    Raises `Invalid` if the options name none, `ServiceUnavailable` if one is in use.
    """
    sockets = open_sockets(options)
    own = identify(options.uds) if options.uds else None
    try:
        yield sockets
    finally:
        for listening in sockets.values():
            listening.close()
        # A successor may have bound the path since the server closed its sockets.
        if options.uds and own and identify(options.uds) == own:
            options.uds.unlink(missing_ok=True)


def open_sockets(options: ServeOptions) -> dict[str, socket.socket]:
    """Open the listening sockets, by the address for clients. Raises as `listening_sockets`."""
    if not options.tcp and not options.uds:
        detail = "tcp is off and uds is not set; set one of them"
        raise Invalid(detail, name="uds", value=None, bound="a path, or --tcp")
    listening = {}
    if options.tcp:
        tcp = listen(options.host, options.port, "--port")
        host, port = tcp.getsockname()[:2]
        listening[url_of(host, port, tls=options.tls_cert is not None)] = tcp
    if options.uds:
        try:
            path = options.uds.absolute()
            listening[f"unix:{path}"] = _listen_unix(path)
        except ReplaybufError:
            for listener in listening.values():
                listener.close()
            raise
    return listening


def identify(path: Path) -> tuple[int, int, int] | None:
    """Return device, inode and time of the file at `path`; None without one. The inode may be that of an older file."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _listen_unix(path: Path) -> socket.socket:
    """Listen at `path`. Replace the socket of a dead process; raise `ServiceUnavailable` for anything else there."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and not stat.S_ISSOCK(path.lstat().st_mode):
            raise OSError(errno.EEXIST, "the file is not a socket")
        if path.exists() and _in_use(path):
            raise OSError(errno.EADDRINUSE, "another process listens on it")
        path.unlink(missing_ok=True)
        before = os.umask(0o777 & ~SOCKET_MODE)  # before bind: the socket must never be open to others
        try:
            listening.bind(str(path))
        finally:
            os.umask(before)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise ServiceUnavailable(
            f"cannot listen on unix:{path}: {error.strerror or error}; choose another --uds",
            name="uds",
            value=str(path),
            bound="a free path of at most 107 bytes, or a socket without a listener",
        ) from None
    listening.setblocking(False)
    return listening


def _in_use(path: Path) -> bool:
    """Return whether a process listens, also a busy or stopped one."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(str(path)) not in (errno.ECONNREFUSED, errno.ENOENT)


def certificate_of(options: ServeOptions) -> Certificate | None:
    """Return the certificate of a server, or None. Raises `Invalid`."""
    if options.uds and options.tls_cert and options.tls_key:
        detail = f"uds is {options.uds}; with TLS a server listens on TCP only. Start another server for the socket"
        raise Invalid(detail, name="uds", value=str(options.uds), bound=None)
    return open_certificate(options.tls_cert, options.tls_key)
