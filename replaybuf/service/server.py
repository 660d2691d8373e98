"""The HTTP server of one service: socket, signals, start and stop in order."""

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
from replaybuf.service.host import Service, opened
from replaybuf.service.http.auth import Tokens
from replaybuf.service.http.routes import application
from replaybuf.service.options import ServeOptions

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 5
STALL_TIMEOUT_S = 60.0
"""How long a reader may take nothing of an answer before its connection, and the memory behind it, is let go."""
SOCKET_MODE = 0o600
"""Only this user connects to a unix socket."""
SWITCH_INTERVAL_S = 0.0005
"""How long a thread that writes a body may keep the interpreter from the event loop; 5 ms are Python's default."""
KEPT_BYTES = 256 << 20
TOP_PAD_BYTES = 16 << 20
"""Memory is asked of the system in pieces of this size."""
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
SIGNALS = (signal.SIGINT, signal.SIGTERM)


async def serve(options: ServeOptions) -> None:
    """Serve until SIGTERM or SIGINT. Raises what keeps it from starting, and what breaks it in the background."""
    tokens = Tokens.read(options.tokens_file)
    _check_exposure(options, tokens)
    _check_advertised(options.advertise_url)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    keep_freed_memory()
    loop, starting = asyncio.get_running_loop(), asyncio.current_task()
    for number in SIGNALS:  # until the server takes over, a signal ends the start in order
        loop.add_signal_handler(number, starting.cancel if starting else loop.stop)
    listening = _sockets(options)
    try:
        async with opened(options, next(iter(listening))) as service:
            server = _Server(service, application(service, tokens))
            report = service.report
            durability = report.summary if report else "unknown"
            print(f"durability {durability} on redis {report.version if report else '?'}", flush=True)
            # What is there now stays: modules alone make a search through all objects hold the loop for tens of ms.
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
    """Let glibc keep `KEPT_BYTES` of freed memory, for the bodies to come; nothing happens without glibc.

    By default a body of 17 MB is given back to the system when it goes and taken anew, page by page, by the next one:
    a quarter of the time in which a batch is read and written.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            mallopt(option, KEPT_BYTES)
        mallopt(_M_TOP_PAD, TOP_PAD_BYTES)


class _Connection(HttpToolsProtocol):
    """One connection, aborted when its reader takes nothing for `STALL_TIMEOUT_S`."""

    _stalling: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """The reader does not keep up: count from here."""
        super().pause_writing()
        self._stalling = self.loop.call_later(STALL_TIMEOUT_S, self._abort)

    def resume_writing(self) -> None:
        """It took what was written."""
        self._go_on()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody is there to read."""
        self._go_on()
        super().connection_lost(exc)

    def _go_on(self) -> None:
        if self._stalling:
            self._stalling.cancel()
            self._stalling = None

    def _abort(self) -> None:
        logger.warning("reader stalled client=%s seconds=%g", self.client, STALL_TIMEOUT_S)
        self.transport.abort()


class _Server(uvicorn.Server):
    """A uvicorn server that answers its long polls before it waits for open requests to end."""

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
        """End with exit code 0 on a signal: uvicorn's own way raises it again once it has served."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for run in self._service.runs.values():
            await run.close()
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
    """Raise `Invalid` for what no client could be sent to."""
    if url is None:
        return
    try:
        addresses_of(url)
    except Invalid as error:
        raise Invalid(
            f"advertise_url is {url!r}; needed: http://HOST:PORT or unix:/PATH",
            name="advertise_url",
            value=url,
            bound="http://HOST:PORT or unix:/PATH",
        ) from error


def _sockets(options: ServeOptions) -> dict[str, socket.socket]:
    """Listen where the options say: sockets by the address that clients take.

    Raises `Invalid` where that is nowhere, `ServiceUnavailable` where it is taken.
    """
    if not options.tcp and not options.uds:
        raise Invalid(
            "tcp is off and uds is not set; nobody could connect", name="uds", value=None, bound="a path, or --tcp"
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
    """Listen at `path`; a socket that a dead process left there is replaced, anything else is refused."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and not stat.S_ISSOCK(path.lstat().st_mode):
            raise OSError(errno.EEXIST, "a file that is no socket is there")
        if path.exists() and _in_use(path):
            raise OSError(errno.EADDRINUSE, "another process listens there")
        path.unlink(missing_ok=True)
        before = os.umask(0o777 & ~SOCKET_MODE)  # from its first moment on
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
            bound="a path of at most 107 bytes where nothing is, or a socket nobody listens on",
        ) from None
    listening.setblocking(False)
    return listening


def _in_use(path: Path) -> bool:
    """Say whether somebody listens: who is busy or stopped still does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        return asking.connect_ex(str(path)) not in (errno.ECONNREFUSED, errno.ENOENT)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named: asyncio sets TCP_NODELAY only on sockets that say they are TCP.
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
