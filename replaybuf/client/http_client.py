"""HTTP clients of a run, blocking and asyncio: they send the requests of `calls` and wait for the answers."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from replaybuf.client.addresses import addresses_of, authorization, base_url
from replaybuf.client.calls import Exchange, HttpRequest, RunCalls
from replaybuf.client.http_reply import LateReply, NoReply, Reply
from replaybuf.client.replies import error_of
from replaybuf.client.retries import Patience
from replaybuf.client.transport import Sending, async_transport_to, path_with, transport_to
from replaybuf.errors import NoRoom, NotLeader, ReplaybufError, ServiceUnavailable
from replaybuf.missing_run import in_words_of
from replaybuf.tracing import Headers, spans
from replaybuf.wire.config import check_run_name

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_WAY_OUT = "create it with Client.put_run, or wait for it with Client.wait_for_run"


class _Servers:
    """The servers of a run for both clients: addresses, headers, timeouts, errors. `address` is tried first."""

    def __init__(
        self, url: str, run: str, token: str | None, timeout_s: float, retry_for_s: float, compress: bool
    ) -> None:
        self._run = check_run_name(run)
        self.addresses = addresses_of(url)
        self.address = self.addresses[0]
        coding = "zstd, identity;q=0.5" if compress else "identity"
        self.headers = {"accept-encoding": coding, "accept": "*/*"} | authorization(token)
        self.retry_for_s = retry_for_s
        self._timeout_s = timeout_s

    def _base(self, request: HttpRequest) -> str:
        return "/v1/runs" if request.every_run else f"/v1/runs/{self._run}"

    def sending(self, request: HttpRequest, tracing: Headers) -> Sending:
        """Return what is sent for a request."""
        headers = {"content-type": request.media_type, **tracing} if request.content else {**tracing}
        if request.accept is not None:
            headers["accept"] = request.accept
        return Sending(
            method=request.method,
            path=path_with(self._base(request) + request.path, request.params),
            headers=headers,
            content=request.content,
            connect_s=self._timeout_s,
            read_s=self._timeout_s + request.wait_ms / 1000,
        )

    def span(self, request: HttpRequest, address: str) -> AbstractContextManager[Headers]:
        """Record a request; gives the headers to send with it."""
        return spans.request(request.method, request.path, base_url(address) + self._base(request))

    def unreachable(self, request: HttpRequest, address: str, error: NoReply) -> ServiceUnavailable:
        """Return the error of a request that got no answer, with address and cause."""
        cause = str(error)
        if isinstance(error, LateReply):
            cause = f"no answer within {self._timeout_s + request.wait_ms / 1000:g} s ({cause})"
        url = address + self._base(request)
        detail = f"{request.method} {url}{request.path}: {cause}"
        return ServiceUnavailable(detail, retry_after_s=0.0, name="url", value=url)

    def checked(self, request: HttpRequest, reply: Reply) -> Reply:
        """Return `reply` if it is an answer. Raises the error that it describes."""
        if reply.is_success or reply.status_code in request.answers:
            return reply
        raise in_words_of(error_of(reply), _WAY_OUT)

    def switch(self, address: str, error: ServiceUnavailable) -> None:
        """Try another server first from now on: the leader that `error` names, or the next one."""
        named = str(error.value).rstrip("/") if isinstance(error, NotLeader) else None
        if named in self.addresses:
            self.address = named
        elif self.address == address:  # else another thread has switched already
            self.address = self.addresses[(self.addresses.index(address) + 1) % len(self.addresses)]


class _Tries:
    """The tries of one request; `address` is the server of the next one."""

    def __init__(self, servers: _Servers, request: HttpRequest) -> None:
        self.address = servers.address
        self._servers = servers
        self._repeatable = request.repeatable
        self._patience = Patience(servers.retry_for_s)
        self._failed: set[str] = set()

    def pause_s(self, error: NoRoom | ServiceUnavailable) -> float:
        """Choose the server of the next try; return the pause before it. Raises `error` if there is no next try."""
        if isinstance(error, ServiceUnavailable):
            self._servers.switch(self.address, error)
            self._failed.add(self.address)
            self.address = self._servers.address
        if not self._repeatable and not isinstance(error, NotLeader):
            raise error
        elsewhere = isinstance(error, ServiceUnavailable) and self.address not in self._failed
        if not elsewhere:
            self._failed.clear()
        return self._patience.pause_s(error, elsewhere=elsewhere)


def _blocking(call: Callable[Concatenate[RunCalls, P], Exchange[T]]) -> Callable[Concatenate[HttpClient, P], T]:
    """Make a method of `HttpClient` from a call."""

    @functools.wraps(call)
    def method(self: HttpClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._drive(call(self._calls, *args, **kwargs))

    _show_result(method, call)
    return method


def _show_result(method: Callable[..., Any], call: Callable[..., Exchange[Any]]) -> None:
    """Show the result in `help` and editors instead of the exchange."""
    signature = inspect.signature(call)
    result = str(signature.return_annotation).removeprefix("Exchange[").removesuffix("]")
    method.__signature__ = signature.replace(return_annotation=result)  # type: ignore[attr-defined]


def _awaiting(
    call: Callable[Concatenate[RunCalls, P], Exchange[T]],
) -> Callable[Concatenate[AsyncHttpClient, P], Coroutine[Any, Any, T]]:
    """Make a method of `AsyncHttpClient` from a call."""

    @functools.wraps(call)
    async def method(self: AsyncHttpClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._drive(call(self._calls, *args, **kwargs))

    _show_result(method, call)
    return method


class HttpClient:
    """The calls of a blocking client. Threads may share it."""

    def __init__(
        self,
        url: str,
        run: str,
        token: str | None = None,
        timeout_s: float = 30.0,
        retry_for_s: float = 0.0,
        compress: bool = False,
    ) -> None:
        self._servers = _Servers(url, run, token, timeout_s, retry_for_s, compress)
        self._calls = RunCalls()
        self._transports = {
            address: transport_to(address, self._servers.headers) for address in self._servers.addresses
        }

    @property
    def address(self) -> str:
        """Address of the server that is tried first: the one that served last."""
        return self._servers.address

    def close(self) -> None:
        """Close the connections."""
        for transport in self._transports.values():
            transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    get_run = _blocking(RunCalls.get_run)
    list_runs = _blocking(RunCalls.list_runs)
    wait_for_run = _blocking(RunCalls.wait_for_run)
    put_run = _blocking(RunCalls.put_run)
    patch_run = _blocking(RunCalls.patch_run)
    accept_loss = _blocking(RunCalls.accept_loss)
    delete_run = _blocking(RunCalls.delete_run)
    attach = _blocking(RunCalls.attach)
    fetch_batch = _blocking(RunCalls.fetch_batch)
    fetch_plan = _blocking(RunCalls.fetch_plan)
    ack = _blocking(RunCalls.ack)
    publish_policy = _blocking(RunCalls.publish_policy)
    checkpoint = _blocking(RunCalls.checkpoint)
    get_policy = _blocking(RunCalls.get_policy)
    take_tickets = _blocking(RunCalls.take_tickets)
    send_heartbeat = _blocking(RunCalls.send_heartbeat)
    list_producers = _blocking(RunCalls.list_producers)
    return_ticket = _blocking(RunCalls.return_ticket)
    append = _blocking(RunCalls.append)
    add_columns = _blocking(RunCalls.add_columns)
    record_evaluation = _blocking(RunCalls.record_evaluation)
    list_evaluations = _blocking(RunCalls.list_evaluations)
    get_history = _blocking(RunCalls.get_history)
    get_record = _blocking(RunCalls.get_record)
    explain_batch = _blocking(RunCalls.explain_batch)
    get_ledger = _blocking(RunCalls.get_ledger)
    get_group = _blocking(RunCalls.get_group)
    list_groups = _blocking(RunCalls.list_groups)
    list_samples = _blocking(RunCalls.list_samples)
    list_dead_letters = _blocking(RunCalls.list_dead_letters)
    purge_dead_letters = _blocking(RunCalls.purge_dead_letters)
    read_cursor = _blocking(RunCalls.read_cursor)
    advance_cursor = _blocking(RunCalls.advance_cursor)
    delete_cursor = _blocking(RunCalls.delete_cursor)
    list_cursors = _blocking(RunCalls.list_cursors)

    def _drive(self, exchange: Exchange[T]) -> T:
        try:
            request = next(exchange)
            while True:
                if request.pause_s:
                    time.sleep(request.pause_s)
                request = exchange.send(self._send(request))
        except StopIteration as end:
            result: T = end.value
            return result

    def _send(self, request: HttpRequest) -> Reply:
        tries = _Tries(self._servers, request)
        while True:
            try:
                return self._try(request, tries.address)
            except (NoRoom, ServiceUnavailable) as error:
                pause_s = tries.pause_s(error)
                _log_pause(pause_s, error)
                time.sleep(pause_s)

    def _try(self, request: HttpRequest, address: str) -> Reply:
        with self._servers.span(request, address) as tracing:
            try:
                reply = self._transports[address].send(self._servers.sending(request, tracing))
            except NoReply as error:
                raise self._servers.unreachable(request, address, error) from error
            return self._servers.checked(request, reply)


class AsyncHttpClient:
    """The calls of an asyncio client. It belongs to one event loop."""

    def __init__(
        self,
        url: str,
        run: str,
        token: str | None = None,
        timeout_s: float = 30.0,
        retry_for_s: float = 0.0,
        compress: bool = False,
    ) -> None:
        # For work in threads: a reader waits in one.
        self.make_blocking = functools.partial(HttpClient, url, run, token, timeout_s, retry_for_s, compress)
        self._servers = _Servers(url, run, token, timeout_s, retry_for_s, compress)
        self._calls = RunCalls()
        self._transports = {
            address: async_transport_to(address, self._servers.headers) for address in self._servers.addresses
        }

    @property
    def address(self) -> str:
        """Address of the server that is tried first: the one that served last."""
        return self._servers.address

    async def aclose(self) -> None:
        """Close the connections."""
        for transport in self._transports.values():
            await transport.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    get_run = _awaiting(RunCalls.get_run)
    list_runs = _awaiting(RunCalls.list_runs)
    wait_for_run = _awaiting(RunCalls.wait_for_run)
    put_run = _awaiting(RunCalls.put_run)
    patch_run = _awaiting(RunCalls.patch_run)
    accept_loss = _awaiting(RunCalls.accept_loss)
    delete_run = _awaiting(RunCalls.delete_run)
    attach = _awaiting(RunCalls.attach)
    fetch_batch = _awaiting(RunCalls.fetch_batch)
    fetch_plan = _awaiting(RunCalls.fetch_plan)
    ack = _awaiting(RunCalls.ack)
    publish_policy = _awaiting(RunCalls.publish_policy)
    checkpoint = _awaiting(RunCalls.checkpoint)
    get_policy = _awaiting(RunCalls.get_policy)
    take_tickets = _awaiting(RunCalls.take_tickets)
    send_heartbeat = _awaiting(RunCalls.send_heartbeat)
    list_producers = _awaiting(RunCalls.list_producers)
    return_ticket = _awaiting(RunCalls.return_ticket)
    append = _awaiting(RunCalls.append)
    add_columns = _awaiting(RunCalls.add_columns)
    record_evaluation = _awaiting(RunCalls.record_evaluation)
    list_evaluations = _awaiting(RunCalls.list_evaluations)
    get_history = _awaiting(RunCalls.get_history)
    get_record = _awaiting(RunCalls.get_record)
    explain_batch = _awaiting(RunCalls.explain_batch)
    get_ledger = _awaiting(RunCalls.get_ledger)
    get_group = _awaiting(RunCalls.get_group)
    list_groups = _awaiting(RunCalls.list_groups)
    list_samples = _awaiting(RunCalls.list_samples)
    list_dead_letters = _awaiting(RunCalls.list_dead_letters)
    purge_dead_letters = _awaiting(RunCalls.purge_dead_letters)
    read_cursor = _awaiting(RunCalls.read_cursor)
    advance_cursor = _awaiting(RunCalls.advance_cursor)
    delete_cursor = _awaiting(RunCalls.delete_cursor)
    list_cursors = _awaiting(RunCalls.list_cursors)

    async def _drive(self, exchange: Exchange[T]) -> T:
        try:
            request = next(exchange)
            while True:
                if request.pause_s:
                    await asyncio.sleep(request.pause_s)
                request = exchange.send(await self._send(request))
        except StopIteration as end:
            result: T = end.value
            return result

    async def _send(self, request: HttpRequest) -> Reply:
        tries = _Tries(self._servers, request)
        while True:
            try:
                return await self._try(request, tries.address)
            except (NoRoom, ServiceUnavailable) as error:
                pause_s = tries.pause_s(error)
                _log_pause(pause_s, error)
                await asyncio.sleep(pause_s)

    async def _try(self, request: HttpRequest, address: str) -> Reply:
        with self._servers.span(request, address) as tracing:
            try:
                reply = await self._transports[address].send(self._servers.sending(request, tracing))
            except NoReply as error:
                raise self._servers.unreachable(request, address, error) from error
            return self._servers.checked(request, reply)


def _log_pause(pause_s: float, error: ReplaybufError) -> None:
    logger.warning("retrying a call in %.1f s: %s", pause_s, error)
