"""Clients of the HTTP contract, for producers and trainers: `Client` (blocking) and `AsyncClient`.

What is asked and what an answer means stands in `calls`, without I/O; the two clients only carry requests and
wait. Their methods are the calls of `RunCalls`, with the same names, arguments, results and errors.

Every call raises the errors of `replaybuf.errors` that the service answered with, `ServiceUnavailable` naming address
and cause where it cannot be reached in time, and `Malformed` where the answer is not what the contract says. With
`retry_for_s` > 0 the calls that may be repeated without harm are repeated on `ServiceUnavailable` and `NoRoom`, with
growing pauses, for at most that long; on `NotLeader`, which says that nothing was done, every call is.

A `url` may name several servers of the same Redis, comma-separated. What one of them does not serve goes to the next,
or to the leader that `NotLeader` names if it is one of them: at once the first time round, then after a pause. The
address that served last is asked first. No address but these is ever sent anything, least of all the bearer token.
`unix:/PATH` is the address of a service on this machine that listens on a unix socket.

Batch bodies come as they are: `compress` asks for zstd, which saves network and costs both sides time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import logging
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import httpx

from replaybuf.client.addresses import addresses_of, authorization, base_url, unix_mounts
from replaybuf.client.calls import Exchange, HttpRequest, RunCalls, error_of
from replaybuf.client.transport import mounts_of, needs_certificates
from replaybuf.errors import NoRoom, NotLeader, ReplaybufError, ServiceUnavailable, UnsupportedServer
from replaybuf.wire.config import check_run_name

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

# Below the 5 s after which uvicorn closes an idle connection: a request must not meet a connection being closed.
_KEEPALIVE_S = 2.0
_LIMITS = httpx.Limits(max_connections=32, max_keepalive_connections=8, keepalive_expiry=_KEEPALIVE_S)


@dataclasses.dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses between repetitions: `first_s`, then each `factor` times the one before, at most `ceiling_s` seconds.

    Each is shortened by up to half at random, so that many clients do not return at once.
    """

    first_s: float = 0.1
    factor: float = 2.0
    ceiling_s: float = 5.0

    def pauses_s(self) -> Iterator[float]:
        """Yield one pause after the other, in seconds."""
        pause_s = self.first_s
        while True:
            yield pause_s * random.uniform(0.5, 1.0)
            pause_s = min(pause_s * self.factor, self.ceiling_s)


class Patience:
    """How long one request is repeated: until `for_s` seconds have passed since this object was made."""

    def __init__(self, for_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends_s = clock() + for_s
        self._pauses_s = Backoff().pauses_s()

    def pause_s(self, error: ReplaybufError, *, elsewhere: bool = False) -> float:
        """Return the pause before the next try; raises `error` where it would end too late or cannot help.

        `elsewhere`: the next try goes to a server that has not failed yet; there is no pause before it.
        """
        if isinstance(error, UnsupportedServer):
            raise error
        pause_s = 0.0 if elsewhere else max(next(self._pauses_s), error.retry_after_s or 0.0)
        if self._clock() + pause_s > self._ends_s:
            raise error
        return pause_s


class _Line:
    """What both clients share: addresses, headers, timeouts, and the reading of errors. `address` is asked first."""

    def __init__(
        self, url: str, run: str, token: str | None, timeout_s: float, retry_for_s: float, compress: bool
    ) -> None:
        self._path = f"/v1/runs/{check_run_name(run)}"
        self.addresses = addresses_of(url)
        self.address = self.addresses[0]
        # Said either way: httpx asks for zstd by itself where the library for it is installed.
        self.headers = {"accept-encoding": "zstd, identity;q=0.5" if compress else "identity"} | authorization(token)
        self.retry_for_s = retry_for_s
        self._timeout_s = timeout_s

    def message(self, request: HttpRequest, address: str) -> dict[str, Any]:
        """Turn a request into the arguments of `httpx.Client.request`."""
        headers = {"content-type": request.media_type} if request.content else {}
        if request.accept is not None:
            headers["accept"] = request.accept
        return {
            "method": request.method,
            "url": base_url(address) + self._path + request.path,
            "params": request.params or None,
            "content": request.content or None,
            "headers": headers,
            "timeout": httpx.Timeout(self._timeout_s + request.wait_ms / 1000, connect=self._timeout_s),
        }

    def unreachable(self, request: HttpRequest, address: str, error: httpx.TransportError) -> ServiceUnavailable:
        """Name address and cause of a failed request."""
        cause = str(error) or type(error).__name__
        if isinstance(error, httpx.TimeoutException):
            cause = f"no answer within {self._timeout_s + request.wait_ms / 1000:g} s ({type(error).__name__})"
        detail = f"{request.method} {address}{self._path}{request.path}: {cause}"
        return ServiceUnavailable(detail, retry_after_s=0.0, name="url", value=address + self._path)

    def checked(self, request: HttpRequest, reply: httpx.Response) -> httpx.Response:
        """Return `reply` if it is an answer; raises the error that it describes."""
        if reply.is_success or reply.status_code in request.answers:
            return reply
        raise error_of(reply)

    def leave(self, address: str, error: ServiceUnavailable) -> None:
        """Ask another server from now on: the leader that `error` names, or the next one."""
        named = str(error.value).rstrip("/") if isinstance(error, NotLeader) else None
        if named in self.addresses:
            self.address = named
        elif self.address == address:  # else another thread has left it already
            self.address = self.addresses[(self.addresses.index(address) + 1) % len(self.addresses)]


class _Tries:
    """The tries of one request: `address` is where the next one goes."""

    def __init__(self, line: _Line, request: HttpRequest) -> None:
        self.address = line.address
        self._line = line
        self._repeatable = request.repeatable
        self._patience = Patience(line.retry_for_s)
        self._failed: set[str] = set()

    def pause_s(self, error: NoRoom | ServiceUnavailable) -> float:
        """Return the pause before the next try, and choose its address. Raises `error` where there is none."""
        if isinstance(error, ServiceUnavailable):
            self._line.leave(self.address, error)
            self._failed.add(self.address)
            self.address = self._line.address
        if not self._repeatable and not isinstance(error, NotLeader):
            raise error
        elsewhere = isinstance(error, ServiceUnavailable) and self.address not in self._failed
        if not elsewhere:
            self._failed.clear()
        return self._patience.pause_s(error, elsewhere=elsewhere)


def _blocking(call: Callable[Concatenate[RunCalls, P], Exchange[T]]) -> Callable[Concatenate[Client, P], T]:
    """Make a method of `Client` from a call."""

    @functools.wraps(call)
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._drive(call(self._calls, *args, **kwargs))

    _tell_result(method, call)
    return method


def _tell_result(method: Callable[..., Any], call: Callable[..., Exchange[Any]]) -> None:
    """Let `help` and editors show what the method returns, and not that it is made of an exchange."""
    signature = inspect.signature(call)
    result = str(signature.return_annotation).removeprefix("Exchange[").removesuffix("]")
    method.__signature__ = signature.replace(return_annotation=result)  # type: ignore[attr-defined]


def _awaiting(
    call: Callable[Concatenate[RunCalls, P], Exchange[T]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """Make a method of `AsyncClient` from a call."""

    @functools.wraps(call)
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._drive(call(self._calls, *args, **kwargs))

    _tell_result(method, call)
    return method


class Client:
    """Blocking client of one run; see the module docstring for errors. Threads may share it.

    `url` is one address or several, comma-separated; `timeout_s` bounds every wait for the service, beside the
    `wait_ms` of a call; `retry_for_s` bounds repetition; `compress` asks for zstd bodies.
    """

    def __init__(
        self,
        url: str,
        run: str,
        token: str | None = None,
        timeout_s: float = 30.0,
        retry_for_s: float = 0.0,
        compress: bool = False,
    ) -> None:
        self._line = _Line(url, run, token, timeout_s, retry_for_s, compress)
        self._calls = RunCalls()
        mounts, verify = mounts_of(self._line.addresses, _KEEPALIVE_S), needs_certificates(self._line.addresses)
        self._http = httpx.Client(headers=self._line.headers, limits=_LIMITS, mounts=mounts, verify=verify)

    @property
    def address(self) -> str:
        """Address of the server that is asked first: the one that served last."""
        return self._line.address

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    get_run = _blocking(RunCalls.get_run)
    put_run = _blocking(RunCalls.put_run)
    patch_run = _blocking(RunCalls.patch_run)
    attach = _blocking(RunCalls.attach)
    fetch_batch = _blocking(RunCalls.fetch_batch)
    fetch_plan = _blocking(RunCalls.fetch_plan)
    ack = _blocking(RunCalls.ack)
    publish_policy = _blocking(RunCalls.publish_policy)
    checkpoint = _blocking(RunCalls.checkpoint)
    get_policy = _blocking(RunCalls.get_policy)
    take_tickets = _blocking(RunCalls.take_tickets)
    return_ticket = _blocking(RunCalls.return_ticket)
    append = _blocking(RunCalls.append)
    record_evaluation = _blocking(RunCalls.record_evaluation)
    list_evaluations = _blocking(RunCalls.list_evaluations)
    get_record = _blocking(RunCalls.get_record)
    get_ledger = _blocking(RunCalls.get_ledger)
    get_group = _blocking(RunCalls.get_group)
    list_groups = _blocking(RunCalls.list_groups)

    def _drive(self, exchange: Exchange[T]) -> T:
        try:
            request = next(exchange)
            while True:
                request = exchange.send(self._send(request))
        except StopIteration as end:
            result: T = end.value
            return result

    def _send(self, request: HttpRequest) -> httpx.Response:
        tries = _Tries(self._line, request)
        while True:
            try:
                return self._try(request, tries.address)
            except (NoRoom, ServiceUnavailable) as error:
                pause_s = tries.pause_s(error)
                _log_pause(pause_s, error)
                time.sleep(pause_s)

    def _try(self, request: HttpRequest, address: str) -> httpx.Response:
        try:
            reply = self._http.request(**self._line.message(request, address))
        except httpx.TransportError as error:
            raise self._line.unreachable(request, address, error) from error
        return self._line.checked(request, reply)


class AsyncClient:
    """Client of one run for asyncio, with the methods of `Client` as coroutines. One event loop owns it."""

    def __init__(
        self,
        url: str,
        run: str,
        token: str | None = None,
        timeout_s: float = 30.0,
        retry_for_s: float = 0.0,
        compress: bool = False,
    ) -> None:
        self._line = _Line(url, run, token, timeout_s, retry_for_s, compress)
        self._calls = RunCalls()
        verify = needs_certificates(self._line.addresses)
        mounts = unix_mounts(
            self._line.addresses, lambda path: httpx.AsyncHTTPTransport(uds=path, limits=_LIMITS, verify=False)
        )
        self._http = httpx.AsyncClient(headers=self._line.headers, limits=_LIMITS, mounts=mounts, verify=verify)

    @property
    def address(self) -> str:
        """Address of the server that is asked first: the one that served last."""
        return self._line.address

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    get_run = _awaiting(RunCalls.get_run)
    put_run = _awaiting(RunCalls.put_run)
    patch_run = _awaiting(RunCalls.patch_run)
    attach = _awaiting(RunCalls.attach)
    fetch_batch = _awaiting(RunCalls.fetch_batch)
    fetch_plan = _awaiting(RunCalls.fetch_plan)
    ack = _awaiting(RunCalls.ack)
    publish_policy = _awaiting(RunCalls.publish_policy)
    checkpoint = _awaiting(RunCalls.checkpoint)
    get_policy = _awaiting(RunCalls.get_policy)
    take_tickets = _awaiting(RunCalls.take_tickets)
    return_ticket = _awaiting(RunCalls.return_ticket)
    append = _awaiting(RunCalls.append)
    record_evaluation = _awaiting(RunCalls.record_evaluation)
    list_evaluations = _awaiting(RunCalls.list_evaluations)
    get_record = _awaiting(RunCalls.get_record)
    get_ledger = _awaiting(RunCalls.get_ledger)
    get_group = _awaiting(RunCalls.get_group)
    list_groups = _awaiting(RunCalls.list_groups)

    async def _drive(self, exchange: Exchange[T]) -> T:
        try:
            request = next(exchange)
            while True:
                request = exchange.send(await self._send(request))
        except StopIteration as end:
            result: T = end.value
            return result

    async def _send(self, request: HttpRequest) -> httpx.Response:
        tries = _Tries(self._line, request)
        while True:
            try:
                return await self._try(request, tries.address)
            except (NoRoom, ServiceUnavailable) as error:
                pause_s = tries.pause_s(error)
                _log_pause(pause_s, error)
                await asyncio.sleep(pause_s)

    async def _try(self, request: HttpRequest, address: str) -> httpx.Response:
        try:
            reply = await self._http.request(**self._line.message(request, address))
        except httpx.TransportError as error:
            raise self._line.unreachable(request, address, error) from error
        return self._line.checked(request, reply)


def _log_pause(pause_s: float, error: ReplaybufError) -> None:
    logger.warning("waiting %.1f s to repeat a call: %s", pause_s, error)
