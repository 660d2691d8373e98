"""HTTP to one engine: every call bounded in time, every failure told apart by who can help."""

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

T = TypeVar("T")

NOT_FOUND = 404
METHOD_NOT_ALLOWED = 405
_TOO_MANY_REQUESTS = 429
_SERVER_ERROR = 500
SHORT_TIMEOUT_S = 10.0
"""Bound of the calls that compute nothing."""
_EXCERPT_CHARS = 200
_KEEPALIVE_S = 2.0  # below the 5 s after which uvicorn closes an idle connection
_UNFIT_STATUSES = (401, 403, NOT_FOUND, METHOD_NOT_ALLOWED)


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """Status and body of an answer."""

    status: int
    content: bytes

    @property
    def excerpt(self) -> str:
        """How the body starts, for an error."""
        return self.content[:_EXCERPT_CHARS].decode("utf-8", "replace")


class Wire:
    """Calls to the server at `url`, with `api_key` as bearer token where there is one; it is never logged.

    Requests at the same time have connections of their own; one on which a request failed is not used again. A proxy
    is taken from the environment, as `urllib.request` does. Raises `Invalid` for an address that is none, or that holds
    a password: it would be in logs and metadata.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parsed = _split(url)
        if parsed.username is not None or parsed.password is not None:
            detail = f"engine at {parsed.hostname} has a user name or password in its address; use engine_api_key"
            raise Invalid(detail, name="engine", value=parsed.hostname)
        if parsed.scheme not in ("http", "https") or not parsed.hostname:
            needed = "http://HOST:PORT or sglang+http://HOST:PORT"
            raise Invalid(f"engine is {url!r}; needed: {needed}", name="engine", value=url)
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
        return self.decoded(await self.send(method, path, content, timeout_s=timeout_s), shape)

    async def send(
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        *,
        timeout_s: float = SHORT_TIMEOUT_S,
        answers: Sequence[int] = (),
    ) -> Reply:
        """Send one request; statuses in `answers` are answers too.

        Raises `EngineAway` (`engine_timeout`, `engine_away`, `engine_error`), `EngineUnfit`, `EngineFault`.
        """
        headers = {"content-type": "application/json"} if content else None
        self._session = self._session or self._new_session()
        sent = self._session.request(method, self.url + path, data=content, headers=headers, allow_redirects=False)
        try:
            async with asyncio.timeout(timeout_s), sent as response:
                reply = Reply(response.status, await response.read())
        except TimeoutError:
            detail = f"engine {self.url}{path} gave no answer within {timeout_s:g} s"
            raise EngineAway("engine_timeout", detail, name="engine", value=self.url, bound=timeout_s) from None
        except (aiohttp.ClientError, OSError) as error:
            detail = f"engine {self.url}{path}: {str(error) or type(error).__name__}"
            raise EngineAway("engine_away", detail, name="engine", value=self.url) from error
        if 200 <= reply.status < 300 or reply.status in answers:
            return reply
        raise self._fault(path, reply)

    def decoded(self, reply: Reply, shape: type[T]) -> T:
        """Decode an answer. Raises `EngineFault` where it has another shape."""
        try:
            return msgspec.json.decode(reply.content, type=shape)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self.bad_answer(f"{error}; it starts with {reply.excerpt!r}") from error

    def bad_answer(self, what: str) -> EngineFault:
        """Return the fault of an answer that cannot be used."""
        detail = f"engine {self.url} answered with {what}"
        return EngineFault("engine_bad_answer", detail, name="engine", value=self.url)

    async def aclose(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _new_session(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S, ssl=self._context)
        return aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            proxy=self._proxy,
            cookie_jar=aiohttp.DummyCookieJar(),
            # Every use is inside `asyncio.timeout`, which bounds the whole and not only each silence.
            timeout=aiohttp.ClientTimeout(),
        )

    def _fault(self, path: str, reply: Reply) -> EngineFault:
        status = reply.status
        detail = f"engine {self.url}{path} answered {status}: {reply.excerpt!r}"
        fields = {"name": "engine", "value": self.url}
        if status in _UNFIT_STATUSES:
            return EngineUnfit("engine_unfit", detail, **fields)
        if status >= _SERVER_ERROR or status == _TOO_MANY_REQUESTS:
            return EngineAway("engine_error", detail, **fields)
        return EngineFault("engine_refused", detail, **fields)


def _split(url: str) -> SplitResult:
    """Split an address; one that is none has no scheme."""
    try:
        parsed = urlsplit(url)
        _ = parsed.port
    except ValueError:
        return urlsplit("")
    return parsed


def _proxy_of(url: SplitResult) -> str | None:
    """Say through which proxy the environment wants a server to be asked."""
    if urllib.request.proxy_bypass(url.netloc):
        return None
    proxies = urllib.request.getproxies()
    return proxies.get(url.scheme) or proxies.get("all")
