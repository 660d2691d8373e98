"""What the HTTP servers of a download share: the socket, the token, and a uvicorn that runs in a thread."""

from __future__ import annotations

import hmac
import ipaddress
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse

from replaybuf.certificates import Certificate
from replaybuf.errors import Invalid, ReplaybufError, Unauthorized
from replaybuf.listening import listen

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
RENEW_EVERY_S = 30
"""A renewed certificate is noticed after so long."""
CONNECTIONS = 64
"""Connections beyond these are answered with 503."""


def check_exposure(host: str, token: str | None, option: str) -> None:
    """Check that only processes of this machine can connect without a token. Raises `Invalid`."""
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback and not token:
        raise Invalid(
            f"{option} is {host!r} and there is no --publish-token; without a token it must be a loopback address",
            name=option,
            value=host,
            bound="loopback, or --publish-token",
        )


def check_token(request: Request, token: str | None) -> None:
    """Check the bearer token of a request. Raises `Unauthorized`."""
    sent = request.headers.get("authorization", "").encode()
    if token and not hmac.compare_digest(sent, f"Bearer {token}".encode()):
        raise Unauthorized("the bearer token is missing or wrong; set --publish-token", name="publish_token")


async def problem(_: Request, error: Exception) -> JSONResponse:
    """Answer a request that raised one of our errors."""
    if not isinstance(error, ReplaybufError):
        raise error
    return JSONResponse(error.problem(), error.status)


class ServerThread:
    """A Starlette application on a port of this machine, in a thread. Port 0 takes a free one.

    With a certificate it speaks TLS, and reads the files again after they have changed.
    """

    def __init__(
        self, application: Starlette, host: str, port: int, option: str, certificate: Certificate | None = None
    ) -> None:
        """Listen. Raises `ServiceUnavailable` for a port that is taken."""
        self._socket = listen(host, port, option)
        config = uvicorn.Config(
            application,
            http="h11",  # it bounds request heads; httptools does not
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            limit_concurrency=CONNECTIONS,
            timeout_graceful_shutdown=1,
            server_header=False,
        )
        if certificate is not None:
            config.load()
            config.ssl = certificate.context
            config.callback_notify, config.timeout_notify = _renewal(certificate), RENEW_EVERY_S
        self._server = uvicorn.Server(config)
        arguments: dict[str, Any] = {"sockets": [self._socket]}
        self._thread = threading.Thread(target=self._server.run, kwargs=arguments, name="weights-http", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Port that it listens on."""
        return int(self._socket.getsockname()[1])

    def close(self) -> None:
        """End open requests and stop."""
        self._server.should_exit = True
        self._thread.join(STOP_TIMEOUT_S)
        self._socket.close()


def _renewal(certificate: Certificate) -> Callable[[], Awaitable[None]]:
    async def renew() -> None:
        certificate.renew()

    return renew
