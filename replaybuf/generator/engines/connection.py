"""HTTP calls to one engine, bounded in time; every failure becomes an `EngineFault` that names who can help."""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
import urllib.request
from collections.abc import Sequence
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

import aiohttp
import msgspec

from replaybuf.errors import EngineAway, EngineFault, EngineUnfit, Invalid
from replaybuf.tracing import spans
from replaybuf.wire.decoding import prepared

T = TypeVar("T")

NOT_FOUND = 404
METHOD_NOT_ALLOWED = 405
_TOO_MANY_REQUESTS = 429
_SERVER_ERROR = 500
_UNFIT_STATUSES = (401, 403, NOT_FOUND, METHOD_NOT_ALLOWED)
SHORT_TIMEOUT_S = 10.0
"""Timeout of calls that compute nothing."""
_EXCERPT_CHARS = 200
_KEEPALIVE_S = 2.0  # below the 5 s after which uvicorn closes an idle connection


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """Status and body of an HTTP answer."""

    status: int
    content: bytes

    @property
    def excerpt(self) -> str:
        """The start of the body, for an error message."""
        return self.content[:_EXCERPT_CHARS].decode("utf-8", "replace")


class Connection:
    """HTTP connections to the server at `url`; `api_key` is sent as bearer token and never logged.

    Parallel requests use separate connections. A connection on which a request failed is not used again. The proxy
    comes from the environment, as in `urllib.request`. Raises `Invalid` for an address that is not one, or that holds a
    password, because logs and metadata show the address.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parsed = _split(url)
        if parsed.username is not None or parsed.password is not None:
            detail = f"engine at {parsed.hostname} has a user name or password in its address; use engine_api_key"
            raise Invalid(detail, name="engine", value=parsed.hostname)
        if parsed.scheme not in ("http", "https") or not parsed.hostname:
            needed = "http://HOST:PORT or sglang+http://HOST:PORT"
            raise Invalid(f"engine is {url!r}; it must be {needed}", name="engine", value=url)
        self.url = url.rstrip("/")
        self._proxy = _proxy_of(parsed)
        self._context = ssl.create_default_context()
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._session: aiohttp.ClientSession | None = None

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
        return self.decode(await self.send(method, path, content, timeout_s=timeout_s), shape)

    async def send(
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        *,
        timeout_s: float = SHORT_TIMEOUT_S,
        accepted: Sequence[int] = (),
    ) -> Reply:
        """Send one request and return the reply; `accepted` lists error statuses that are valid replies.

        Raises `EngineAway` (`engine_timeout`, `engine_away`, `engine_error`), `EngineUnfit`, `EngineFault`.
        """
        headers = {"content-type": "application/json"} if content else {}
        self._session = self._session or self._new_session()
        try:
            with spans.subrequest(method, path, self.url) as tracing:
                sent = self._session.request(
                    method, self.url + path, data=content, headers={**headers, **tracing}, allow_redirects=False
                )
                async with asyncio.timeout(timeout_s), sent as response:
                    reply = Reply(response.status, await response.read())
        except TimeoutError:
            detail = f"engine {self.url}{path} gave no answer within {timeout_s:g} s"
            raise EngineAway("engine_timeout", detail, name="engine", value=self.url, bound=timeout_s) from None
        except (aiohttp.ClientError, OSError) as error:
            detail = f"engine {self.url}{path}: {str(error) or type(error).__name__}"
            raise EngineAway("engine_away", detail, name="engine", value=self.url) from error
        if 200 <= reply.status < 300 or reply.status in accepted:
            return reply
        raise self._status_fault(path, reply)

    def decode(self, reply: Reply, shape: type[T]) -> T:
        """Decode a JSON reply. Raises `EngineFault` where it has another shape."""
        try:
            return msgspec.json.decode(reply.content, type=prepared(shape))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self.bad_answer(f"{error}; it starts with {reply.excerpt!r}") from error

    def bad_answer(self, what: str) -> EngineFault:
        """Return the fault of an unusable answer."""
        detail = f"engine {self.url} answered with {what}"
        return EngineFault("engine_bad_answer", detail, name="engine", value=self.url)

    async def aclose(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _new_session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S, ssl=self._context),
            headers=self._headers,
            proxy=self._proxy,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(),  # `asyncio.timeout` in `send` bounds the whole request
        )

    def _status_fault(self, path: str, reply: Reply) -> EngineFault:
        status = reply.status
        detail = f"engine {self.url}{path} answered {status}: {reply.excerpt!r}"
        fields = {"name": "engine", "value": self.url}
        if status in _UNFIT_STATUSES:
            return EngineUnfit("engine_unfit", detail, **fields)
        if status >= _SERVER_ERROR or status == _TOO_MANY_REQUESTS:
            return EngineAway("engine_error", detail, **fields)
        return EngineFault("engine_refused", detail, **fields)


def _split(url: str) -> SplitResult:
    """Split an address; an invalid one comes back empty."""
    try:
        parsed = urlsplit(url)
        _ = parsed.port
    except ValueError:
        return urlsplit("")
    return parsed


def _proxy_of(url: SplitResult) -> str | None:
    """Return the proxy that the environment sets for a server."""
    if urllib.request.proxy_bypass(url.netloc):
        return None
    proxies = urllib.request.getproxies()
    return proxies.get(url.scheme) or proxies.get("all")
