"""HTTP to one engine: every call bounded in time, every failure told apart by who can help."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeVar

import httpx
import msgspec

from replaybuf.errors import EngineAway, EngineFault, EngineUnfit, Invalid

T = TypeVar("T")

NOT_FOUND = 404
METHOD_NOT_ALLOWED = 405
SHORT_TIMEOUT_S = 10.0
"""Bound of the calls that compute nothing."""
_EXCERPT_CHARS = 200
_KEEPALIVE_S = 2.0  # below the 5 s after which uvicorn closes an idle connection
_UNFIT_STATUSES = (401, 403, NOT_FOUND, METHOD_NOT_ALLOWED)


class Wire:
    """Calls to the server at `url`, with `api_key` as bearer token where there is one; it is never logged.

    Raises `Invalid` for an address that is none, or that holds a password: it would be in logs and metadata.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parsed = httpx.URL(url)
        if parsed.userinfo:
            detail = f"engine at {parsed.host} has a user name or password in its address; use engine_api_key"
            raise Invalid(detail, name="engine", value=parsed.host)
        if parsed.scheme not in ("http", "https") or not parsed.host:
            needed = "http://HOST:PORT or sglang+http://HOST:PORT"
            raise Invalid(f"engine is {url!r}; needed: {needed}", name="engine", value=url)
        self.url = url.rstrip("/")
        self._context = ssl.create_default_context()
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._idle: list[httpx.AsyncClient] = []

    async def ask(
        self,
        method: str,
        path: str,
        shape: type[T],
        body: dict[str, Any] | None = None,
        *,
        timeout_s: float = SHORT_TIMEOUT_S,
    ) -> T:
        """Send a JSON body and decode the answer. Raises as `send` does, `EngineFault` where it has another shape."""
        content = None if body is None else msgspec.json.encode(body)
        return self.decoded(await self.send(method, path, content, timeout_s=timeout_s), shape)

    async def send(
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        *,
        timeout_s: float = SHORT_TIMEOUT_S,
        answers: Sequence[int] = (),
    ) -> httpx.Response:
        """Send one request; statuses in `answers` are answers too.

        Raises `EngineAway` (`engine_timeout`, `engine_away`, `engine_error`), `EngineUnfit`, `EngineFault`.
        """
        try:
            async with asyncio.timeout(timeout_s), self._connection() as connection:
                headers = {"content-type": "application/json"} if content else None
                reply = await connection.request(method, self.url + path, content=content, headers=headers)
        except (TimeoutError, httpx.TimeoutException):
            detail = f"engine {self.url}{path} gave no answer within {timeout_s:g} s"
            raise EngineAway("engine_timeout", detail, name="engine", value=self.url, bound=timeout_s) from None
        except httpx.TransportError as error:
            detail = f"engine {self.url}{path}: {str(error) or type(error).__name__}"
            raise EngineAway("engine_away", detail, name="engine", value=self.url) from error
        if reply.is_success or reply.status_code in answers:
            return reply
        raise self._fault(path, reply)

    def decoded(self, reply: httpx.Response, shape: type[T]) -> T:
        """Decode an answer. Raises `EngineFault` where it has another shape."""
        try:
            return msgspec.json.decode(reply.content, type=shape)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self.bad_answer(f"{error}; it starts with {_excerpt(reply)!r}") from error

    def bad_answer(self, what: str) -> EngineFault:
        """Return the fault of an answer that cannot be used."""
        detail = f"engine {self.url} answered with {what}"
        return EngineFault("engine_bad_answer", detail, name="engine", value=self.url)

    async def aclose(self) -> None:
        """Close the connections."""
        while self._idle:
            await self._idle.pop().aclose()

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[httpx.AsyncClient]:
        """Lend a connection of its own to one request; one that failed is not used again.

        One client per connection, since httpx walks its whole pool on every request: with 32 in flight that is 2.5 ms
        of this process per request instead of 0.7.
        """
        # The last one returned is the one least likely to have been closed by the server meanwhile.
        connection = self._idle.pop() if self._idle else self._new_connection()
        try:
            yield connection
        except BaseException:
            await connection.aclose()
            raise
        self._idle.append(connection)

    def _new_connection(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=_KEEPALIVE_S)
        # Every use is inside `asyncio.timeout`, which bounds the whole and not only each silence.
        return httpx.AsyncClient(limits=limits, headers=self._headers, verify=self._context, timeout=None)

    def _fault(self, path: str, reply: httpx.Response) -> EngineFault:
        status = reply.status_code
        detail = f"engine {self.url}{path} answered {status}: {_excerpt(reply)!r}"
        fields = {"name": "engine", "value": self.url}
        if status in _UNFIT_STATUSES:
            return EngineUnfit("engine_unfit", detail, **fields)
        if reply.is_server_error or status == httpx.codes.TOO_MANY_REQUESTS:
            return EngineAway("engine_error", detail, **fields)
        return EngineFault("engine_refused", detail, **fields)


def _excerpt(reply: httpx.Response) -> str:
    return reply.content[:_EXCERPT_CHARS].decode("utf-8", "replace")
