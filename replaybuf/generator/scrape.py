"""`GET /metrics` and `GET /healthz` of a generator, on its own event loop: who answers is alive."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from replaybuf.errors import ServiceUnavailable


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are the generator's


@contextlib.asynccontextmanager
async def scraped(host: str, port: int, exposition: Callable[[], bytes]) -> AsyncIterator[str]:
    """Serve both calls; yields the address. Port 0 takes a free one. Raises `ServiceUnavailable` where it is taken."""
    listening = _listen(host, port)
    routes = [Route("/metrics", _metrics(exposition)), Route("/healthz", _healthz)]
    server = _Server(
        uvicorn.Config(
            Starlette(routes=routes),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=1,
            server_header=False,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    address, taken = listening.getsockname()[:2]
    try:
        yield f"http://[{address}]:{taken}" if ":" in address else f"http://{address}:{taken}"
    finally:
        server.should_exit = True
        await serving
        listening.close()


def _metrics(exposition: Callable[[], bytes]) -> Callable[[Request], Awaitable[Response]]:
    async def metrics(_: Request) -> Response:
        return Response(exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return metrics


async def _healthz(_: Request) -> Response:
    return JSONResponse({"status": "ok"})


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ServiceUnavailable(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --metrics-port (0 takes a free "
            "one)",
            name="metrics_port",
            value=port,
            bound="a free port",
        ) from None
