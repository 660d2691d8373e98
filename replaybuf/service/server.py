"""HTTP server of one service: sockets, signals, orderly start and stop."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import ipaddress
import logging
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import anyio
import uvicorn

from replaybuf.certificates import Certificate
from replaybuf.client.addresses import addresses_of
from replaybuf.errors import Invalid
from replaybuf.listening import BACKLOG
from replaybuf.logs import announce
from replaybuf.program import command_line
from replaybuf.service.host import Service
from replaybuf.service.http.forwarding import Forwarding
from replaybuf.service.http.guard.auth import Tokens
from replaybuf.service.http.guard.connection import Connection
from replaybuf.service.http.guard.connection_table import ConnectionLimits, ConnectionTable, raise_descriptor_limit
from replaybuf.service.http.guard.gates import StartGate
from replaybuf.service.http.guard.handshake import Handshake
from replaybuf.service.http.guard.origins import HostNames, OwnPagesOnly
from replaybuf.service.http.routes import application
from replaybuf.service.lifespan import run_service
from replaybuf.service.options import ServeOptions
from replaybuf.service.sockets import certificate_of, listening_sockets

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 5
SWITCH_INTERVAL_S = 0.0005
"""Longest time that a thread which writes a body keeps the GIL from the event loop; Python's default is 5 ms."""
KEPT_BYTES = 256 << 20
TOP_PAD_BYTES = 16 << 20
"""Size of the pieces in which glibc asks the system for memory."""
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
USES_SAVED_S = 60.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)


async def serve(options: ServeOptions, shared: Mapping[str, socket.socket] | None = None) -> None:
    """Serve until SIGTERM or SIGINT. Raises what prevents the start, and faults of background work.

    `shared`: listening sockets of several workers, by address, besides those of the options.
    """
    tokens, certificate = Tokens.read(options.tokens_file), certificate_of(options)
    _check_exposure(options, tokens)
    _check_advertised(options.advertise_url)
    hosts = HostNames(options)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    keep_freed_memory()
    cancel_on_signals()
    if options.tokens_file or certificate:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _reload, tokens, certificate)
    limits = raise_descriptor_limit(ConnectionLimits.of(options), BACKLOG)
    with listening_sockets(options) as own:
        listening = own | dict(shared or {})
        async with (
            run_service(options, next(iter(own))) as service,
            contextlib.aclosing(Forwarding(options.host, options.tls_cert)) as forwarding,
        ):
            app = application(service, tokens, options.body_budget_bytes, forwarding)
            table = ConnectionTable(limits, service.traffic)
            server = _Server(service, OwnPagesOnly(StartGate(app), hosts, service.traffic), table, certificate)
            report = service.report
            durability = report.summary if report else "unknown"
            announce("durability %s on %s", durability, report.name if report else "an unknown server")
            # A collection over all loaded modules would hold the event loop for tens of ms.
            await load_anyio()
            gc.collect()
            gc.freeze()
            for url in listening:
                announce("listening on %s", url)
            pushed = app.state.exposition.pushed(
                options.push_metrics, _instance(next(iter(own))), options.push_metrics_every_s
            )
            async with pushed, asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(table.watch(), name="connections")
                saving = tasks.create_task(_save_uses(tokens), name="tokens")
                await server.serve(sockets=list(listening.values()))
                watching.cancel()
                saving.cancel()
    logger.info("stopped")


def cancel_on_signals() -> None:
    """Let a signal cancel this task: until a server handles signals, one ends its start."""
    loop, starting = asyncio.get_running_loop(), asyncio.current_task()
    for number in SIGNALS:
        loop.add_signal_handler(number, starting.cancel if starting else loop.stop)


def _instance(url: str) -> str:
    """Return the name of this server among pushed metrics: HOST:PORT, HOST with a unix socket only."""
    port = urlsplit(url).port if url.startswith("http") else None
    return f"{socket.gethostname()}:{port}" if port else socket.gethostname()


async def _save_uses(tokens: Tokens) -> None:
    """Write when tokens were last used once a minute, and at the end."""
    try:
        while not tokens.open:
            await asyncio.sleep(USES_SAVED_S)
            await asyncio.to_thread(tokens.save_uses, tokens.take_uses())
    finally:
        tokens.save_uses(tokens.take_uses())


async def load_anyio() -> None:
    """Load the parts of anyio that a streamed answer needs: the first one would hold the event loop for 30 ms."""
    async with anyio.create_task_group():
        pass


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


class _Server(uvicorn.Server):
    """A uvicorn server that answers long polls at shutdown, before it waits for open requests."""

    def __init__(self, service: Service, app: object, table: ConnectionTable, certificate: Certificate | None) -> None:
        config = uvicorn.Config(
            app,  # type: ignore[arg-type]
            log_config=None,
            access_log=False,
            lifespan="off",
            http=functools.partial(_protocol, table, certificate),  # type: ignore[arg-type]
            ws="none",
            proxy_headers=False,
            loop="uvloop",
            timeout_graceful_shutdown=DRAIN_TIMEOUT_S,
            timeout_keep_alive=75,
            server_header=False,
        )
        super().__init__(config)
        config.load()
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
            run.wake()  # not closed: the calls in progress, and the lead, need its spilled frames
        await super().shutdown(sockets)


def _protocol(table: ConnectionTable, certificate: Certificate | None, **arguments: Any) -> asyncio.Protocol:
    """Make the protocol of a new connection."""
    connection = functools.partial(Connection, table, **arguments)
    return Handshake(table, certificate.context, connection) if certificate else connection()


def _reload(tokens: Tokens, certificate: Certificate | None) -> None:
    """Read tokens and certificate again."""
    tokens.reload()
    if certificate:
        certificate.reload()


def _check_exposure(options: ServeOptions, tokens: Tokens) -> None:
    if not tokens.open or not options.tcp:
        return
    try:
        loopback = ipaddress.ip_address(options.host).is_loopback
    except ValueError:
        loopback = options.host == "localhost"
    if not loopback:
        detail = (
            f"host is {options.host!r} and there is no tokens file; without tokens the service binds loopback only. "
            f"Make one: {command_line('tokens', 'new')} --role operator --name NAME --tokens-file FILE"
        )
        raise Invalid(detail, name="host", value=options.host, bound="loopback, or --tokens-file")


def _check_advertised(url: str | None) -> None:
    """Raise `Invalid` for an address that clients cannot use."""
    if url is None:
        return
    try:
        addresses_of(url)
    except Invalid as error:
        detail = f"advertise_url is {url!r}; use http://HOST:PORT or unix:/PATH"
        raise Invalid(detail, name="advertise_url", value=url, bound="http://HOST:PORT or unix:/PATH") from error
