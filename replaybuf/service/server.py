"""HTTP server of one service: sockets, signals, orderly start and stop."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import gc
import ipaddress
import logging
import os
import signal
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from replaybuf.client.addresses import addresses_of
from replaybuf.errors import Invalid, ReplaybufError, ServiceUnavailable
from replaybuf.program import command_line
from replaybuf.service.host import Service, run_service
from replaybuf.service.http.auth import Tokens
from replaybuf.service.http.origins import HostNames, OwnPagesOnly
from replaybuf.service.http.routes import application
from replaybuf.service.options import ServeOptions

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 5
STALL_TIMEOUT_S = 60.0
"""A connection whose client reads nothing for so long is closed, which frees the memory of its response."""
SOCKET_MODE = 0o600
"""Only this user can connect to a unix socket."""
SWITCH_INTERVAL_S = 0.0005
"""Longest time that a thread which writes a body keeps the GIL from the event loop; Python's default is 5 ms."""
KEPT_BYTES = 256 << 20
TOP_PAD_BYTES = 16 << 20
"""Size of the pieces in which glibc asks the system for memory."""
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
SIGNALS = (signal.SIGINT, signal.SIGTERM)


async def serve(options: ServeOptions) -> None:
    """Serve until SIGTERM or SIGINT. Raises what prevents the start, and faults of background work."""
    tokens = Tokens.read(options.tokens_file)
    _check_exposure(options, tokens)
    _check_advertised(options.advertise_url)
    hosts = HostNames(options)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    keep_freed_memory()
    loop, starting = asyncio.get_running_loop(), asyncio.current_task()
    for number in SIGNALS:  # until the server handles signals, one cancels the start
        loop.add_signal_handler(number, starting.cancel if starting else loop.stop)
    listening = _sockets(options)
    try:
        async with run_service(options, next(iter(listening))) as service:
            app = application(service, tokens, options.body_budget_bytes)
            server = _Server(service, OwnPagesOnly(app, hosts, service.traffic))
            report = service.report
            durability = report.summary if report else "unknown"
            print(f"durability {durability} on redis {report.version if report else '?'}", flush=True)
            # A collection over all loaded modules would hold the event loop for tens of ms.
            gc.collect()
            gc.freeze()
            for url in listening:
                print(f"listening on {url}", flush=True)
            await server.serve(sockets=list(listening.values()))
    finally:
        for one in listening.values():
            one.close()
        if options.uds:
            options.uds.unlink(missing_ok=True)
    logger.info("stopped")


def keep_freed_memory() -> None:
    """Let glibc keep `KEPT_BYTES` of freed memory for later bodies; do nothing without glibc.

    By default glibc returns a body of 17 MB to the system and the next one faults it in again page by page: a quarter
    of the time to read and write a batch.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            mallopt(option, KEPT_BYTES)
        mallopt(_M_TOP_PAD, TOP_PAD_BYTES)


class _Connection(HttpToolsProtocol):
    """One connection, aborted when its client reads nothing for `STALL_TIMEOUT_S`."""

    _stalling: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """Start the timer: the client does not keep up."""
        super().pause_writing()
        self._stalling = self.loop.call_later(STALL_TIMEOUT_S, self._abort)

    def resume_writing(self) -> None:
        """Stop the timer: the client has read everything."""
        self._stop_timer()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stop_timer()
        super().connection_lost(exc)

    def _stop_timer(self) -> None:
        if self._stalling:
            self._stalling.cancel()
            self._stalling = None

    def _abort(self) -> None:
        logger.warning("client stalled client=%s seconds=%g", self.client, STALL_TIMEOUT_S)
        self.transport.abort()


class _Server(uvicorn.Server):
    """A uvicorn server that answers long polls at shutdown, before it waits for open requests."""

    def __init__(self, service: Service, app: object) -> None:
        config = uvicorn.Config(
            app,  # type: ignore[arg-type]
            log_config=None,
            access_log=False,
            lifespan="off",
            http=_Connection,
            loop="uvloop",
            timeout_graceful_shutdown=DRAIN_TIMEOUT_S,
            timeout_keep_alive=75,
            server_header=False,
        )
        super().__init__(config)
        self._service = service

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Exit with code 0 on a signal: uvicorn would raise the signal again."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for run in self._service.runs.values():
            run.close()
        await super().shutdown(sockets)


def _check_exposure(options: ServeOptions, tokens: Tokens) -> None:
    if not tokens.open or not options.tcp:
        return
    try:
        loopback = ipaddress.ip_address(options.host).is_loopback
    except ValueError:
        loopback = options.host == "localhost"
    if not loopback:
        raise Invalid(
            f"host is {options.host!r} and there is no tokens file; without tokens the service binds loopback only. "
            f"Make one: {command_line('token', 'new')} --role operator --name NAME --tokens-file FILE",
            name="host",
            value=options.host,
            bound="loopback, or --tokens-file",
        )


def _check_advertised(url: str | None) -> None:
    """Raise `Invalid` for an address that clients cannot use."""
    if url is None:
        return
    try:
        addresses_of(url)
    except Invalid as error:
        raise Invalid(
            f"advertise_url is {url!r}; use http://HOST:PORT or unix:/PATH",
            name="advertise_url",
            value=url,
            bound="http://HOST:PORT or unix:/PATH",
        ) from error


def _sockets(options: ServeOptions) -> dict[str, socket.socket]:
    """Open the listening sockets, by the address for clients.

    Raises `Invalid` if the options name none, `ServiceUnavailable` if one is in use.
    """
    if not options.tcp and not options.uds:
        raise Invalid(
            "tcp is off and uds is not set; set one of them", name="uds", value=None, bound="a path, or --tcp"
        )
    listening = {}
    if options.tcp:
        tcp = _listen(options.host, options.port)
        host, port = tcp.getsockname()[:2]
        listening[f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"] = tcp
    if options.uds:
        try:
            path = options.uds.absolute()
            listening[f"unix:{path}"] = _listen_unix(path)
        except ReplaybufError:
            for one in listening.values():
                one.close()
            raise
    return listening


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
        listening.listen(2048)
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


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol set: asyncio sets TCP_NODELAY only on sockets that report TCP.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(2048)
    except OSError as error:
        listening.close()
        raise ServiceUnavailable(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --port (0 takes a free one)",
            name="port",
            value=port,
            bound="a free port",
        ) from None
    listening.setblocking(False)
    return listening
