"""The HTTP server of one service: socket, signals, start and stop in order."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from replaybuf.errors import Invalid, ServiceUnavailable
from replaybuf.service.auth import Tokens
from replaybuf.service.http import application
from replaybuf.service.service import ServeOptions, Service, opened

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 5
SIGNALS = (signal.SIGINT, signal.SIGTERM)


async def serve(options: ServeOptions) -> None:
    """Serve until SIGTERM or SIGINT. Raises what keeps it from starting, and what breaks it in the background."""
    tokens = Tokens.read(Path(options.tokens_file) if options.tokens_file else None)
    _check_exposure(options, tokens)
    loop, starting = asyncio.get_running_loop(), asyncio.current_task()
    for number in SIGNALS:  # until the server takes over, a signal ends the start in order
        loop.add_signal_handler(number, starting.cancel if starting else loop.stop)
    listening = _listen(options.host, options.port)
    host, port = listening.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    try:
        async with opened(options, url) as service:
            server = _Server(service, application(service, tokens))
            report = service.report
            durability = report.summary if report else "unknown"
            print(f"durability {durability} on redis {report.version if report else '?'}", flush=True)
            print(f"listening on {url}", flush=True)
            await server.serve(sockets=[listening])
    finally:
        listening.close()
    logger.info("stopped")


class _Server(uvicorn.Server):
    """A uvicorn server that answers its long polls before it waits for open requests to end."""

    def __init__(self, service: Service, app: object) -> None:
        config = uvicorn.Config(
            app,  # type: ignore[arg-type]
            log_config=None,
            access_log=False,
            lifespan="off",
            http="httptools",
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
    if not tokens.open:
        return
    try:
        loopback = ipaddress.ip_address(options.host).is_loopback
    except ValueError:
        loopback = options.host == "localhost"
    if not loopback:
        raise Invalid(
            f"host is {options.host!r} and there is no tokens file; without tokens the service binds loopback only. "
            "Make one: replaybuf token new --role operator --name NAME --tokens-file FILE",
            name="host",
            value=options.host,
            bound="loopback, or --tokens-file",
        )


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
