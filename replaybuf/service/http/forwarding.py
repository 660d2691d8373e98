"""Hand a call for a run that another server leads on to that server, so that clients may call any of them.

What the leader answers is passed on as it comes. A batch it only records: the bytes are the same from any server, so
the one that was asked builds them. If the leader cannot be reached nothing was done, and the caller gets the leader's
address instead (503 `not-leader`).
"""

from __future__ import annotations

import asyncio
import ssl
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from replaybuf.client.addresses import base_url, socket_path
from replaybuf.errors import ServiceUnavailable
from replaybuf.logs import request_id
from replaybuf.service.http.body.append_bodies import MAX_FRAMES_BYTES, MAX_JSON_BYTES
from replaybuf.service.http.body.body_budget import STEP_BYTES
from replaybuf.service.http.body.requests import BodyParts, declared_media_type
from replaybuf.service.http.call.handlers import leaves
from replaybuf.service.turns import cancel_all
from replaybuf.wire.frame import MEDIA_TYPE
from replaybuf.wire.plan import MEDIA_TYPE as PLAN_TYPE

if TYPE_CHECKING:
    import httpx

FORWARDED = "x-replaybuf-forwarded"
"""Header of a call that another server has handed on; it is not handed on again."""
CONNECT_TIMEOUT_S = 2.0
ANSWER_TIMEOUT_S = 120.0
"""Longest silence of the leader: the longest wait of a call, and as long again."""
LOOK_S = 1.0
"""How often a waiting call looks whether its leader still leads."""
MOST_CALLS = 2048
"""Calls at one leader at once; further ones get its address."""
MOST_LEADERS = 32
RECORD_ONLY: Mapping[bytes, bytes] = {b"if-none-match": b"*", b"accept": PLAN_TYPE.encode()}
"""Headers of a call for a batch whose bytes are not wanted: 304 = it is recorded, and nothing was built."""
_DROPPED = frozenset(
    b"host connection keep-alive transfer-encoding te trailer upgrade proxy-authorization origin x-request-id "
    b"sec-fetch-site sec-fetch-mode sec-fetch-dest sec-fetch-user expect".split()
)
"""Headers of this connection, and of a page that was checked here."""


class Forwarding:
    """Calls to other servers. `certificate`: of this server; workers on `host` have the same one."""

    def __init__(self, host: str = "127.0.0.1", certificate: Path | None = None) -> None:
        self._host = host
        self._certificate = certificate
        self._clients: OrderedDict[str, httpx.AsyncClient] = OrderedDict()

    async def forward(
        self,
        request: Request,
        leader: str,
        leads: Callable[[], bool],
        body: bytes | None,
        instead: Mapping[bytes, bytes] | None = None,
    ) -> Relayed | None:
        """Return the leader's answer; None if it cannot be reached, or may not be asked.

        `leads`: whether it is still the leader. `body`: what was read of the request; None = nothing yet. `instead`:
        headers in place of the request's. Raises `ServiceUnavailable` if the leader loses the lead or breaks off: what
        the call asked for may be done.
        """
        if FORWARDED in request.headers:
            return None
        import httpx  # here: a tenth of the start of a service that may never need it

        client = await self._client_of(leader)
        read = asyncio.Event()
        target = httpx.URL(base_url(leader)).copy_with(raw_path=_raw_path(request.scope))
        replaced = instead or {}
        headers = [pair for pair in request.scope["headers"] if pair[0] not in _DROPPED and pair[0] not in replaced]
        headers += replaced.items()
        headers += [(FORWARDED.encode(), b"1"), (b"x-request-id", request_id.get().encode())]
        sent = client.build_request(request.method, target, headers=headers, content=_content(request, body, read))
        answering = asyncio.create_task(client.send(sent, stream=True))
        leaving = asyncio.create_task(_leaves(request, read))
        try:
            while not answering.done() and not leaving.done():
                await asyncio.wait((answering, leaving), timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                if not leads() and not answering.done():  # a suspended server still accepts connections
                    raise _unanswered(leader, "it has lost the lead")
            if not answering.done():
                leaving.result()  # raises: the caller is gone, or may not call any more
            return Relayed(await answering)
        # An AttributeError is anyio's, which asks a connection for its peer that was reset as it was made.
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, AttributeError):
            return None
        except httpx.HTTPError as error:
            raise _unanswered(leader, str(error) or type(error).__name__) from error
        finally:
            await cancel_all([task for task in (answering, leaving) if not task.done()])
            if leaving.done() and not leaving.cancelled():
                leaving.exception()  # the caller left as the answer came: nobody else asks

    async def aclose(self) -> None:
        """Close all connections."""
        while self._clients:
            await self._clients.popitem()[1].aclose()

    async def _client_of(self, leader: str) -> httpx.AsyncClient:
        client = self._clients.pop(leader, None) or self._open(leader)
        self._clients[leader] = client
        if len(self._clients) > MOST_LEADERS:
            await self._clients.popitem(last=False)[1].aclose()
        return client

    def _open(self, leader: str) -> httpx.AsyncClient:
        import httpx

        uds = socket_path(leader) or None
        limits = httpx.Limits(max_connections=MOST_CALLS, max_keepalive_connections=64, keepalive_expiry=30)
        transport = httpx.AsyncHTTPTransport(verify=self._trust(leader), limits=limits, uds=uds)
        timeout = httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S, pool=CONNECT_TIMEOUT_S)
        return httpx.AsyncClient(transport=transport, timeout=timeout, follow_redirects=False)

    def _trust(self, leader: str) -> ssl.SSLContext | bool:
        """Return what a leader's certificate is checked with: a worker of this host has ours, for another name."""
        if self._certificate is None or not leader.startswith("https:"):
            return leader.startswith("https:")
        context = ssl.create_default_context()
        if urlsplit(leader).hostname == self._host:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            context.load_verify_locations(self._certificate)
        return context


class Relayed(Response):
    """An answer of another server, passed on as it comes."""

    def __init__(self, answer: httpx.Response) -> None:
        super().__init__(None, answer.status_code)
        self._answer = answer
        self.raw_headers = [(name.lower(), value) for name, value in answer.headers.raw if name.lower() not in _DROPPED]

    async def aclose(self) -> None:
        """Leave the answer unread."""
        await self._answer.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send status, headers and body."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for part in self._answer.aiter_raw():
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await self._answer.aclose()


def _unanswered(leader: str, why: str) -> ServiceUnavailable:
    detail = f"the leader of the run at {leader} did not answer: {why}; the call may have been done. Repeat it"
    return ServiceUnavailable(detail, name="leader", value=leader)


def _raw_path(scope: Scope) -> bytes:
    query: bytes = scope["query_string"]
    path: bytes = scope["raw_path"]
    return path + (b"?" + query if query else b"")


def _content(request: Request, body: bytes | None, read: asyncio.Event) -> bytes | AsyncIterator[bytes]:
    """Return the body of a request; `read` is set when nothing more of it comes."""
    if body is not None or not _has_body(request):
        read.set()
        return body or b""
    return _parts(request, read)


def _has_body(request: Request) -> bool:
    return request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers


async def _parts(request: Request, read: asyncio.Event) -> AsyncIterator[bytes]:
    """Hand on a body, within the bounds of the largest one here: while it is sent, no refusal of the leader is read."""
    limit_bytes = MAX_FRAMES_BYTES if declared_media_type(request) == MEDIA_TYPE else MAX_JSON_BYTES
    async for part in BodyParts(request, limit_bytes, STEP_BYTES):
        yield part
    read.set()


async def _leaves(request: Request, read: asyncio.Event) -> None:
    await read.wait()
    await leaves(request)
