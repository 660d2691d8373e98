"""The HTTP application of a service: routes, authorisation, and errors as RFC 9457 problem documents.

A route is found by method and one part of the path. A router with four layers of middleware took twice as long.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import re
from collections import defaultdict
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import Receive, Scope, Send

from replaybuf.errors import Forbidden, NotFound, NotLeader, ReplaybufError, ServiceUnavailable, Unauthorized
from replaybuf.logs import RequestIds, request_id
from replaybuf.service.host import Service
from replaybuf.service.http.body.body_budget import BodyBudget, BodyShare
from replaybuf.service.http.body.decoders import DecoderPool
from replaybuf.service.http.body.requests import check_query
from replaybuf.service.http.call.call_guard import Guard
from replaybuf.service.http.call.calls import CALLS, OPEN_CALLS, Call
from replaybuf.service.http.call.metrics import Exposition
from replaybuf.service.http.call.openapi import describe, describe_plugins
from replaybuf.service.http.call.visible_runs import hide_others
from replaybuf.service.http.forwarding import RECORD_ONLY, Forwarding
from replaybuf.service.http.guard.auth import ANYONE, Permission, Tokens
from replaybuf.service.http.reply.json_pieces import document_response, error_response
from replaybuf.service.options import BODY_BUDGET_BYTES
from replaybuf.service.run.journal import Journal
from replaybuf.service.traffic import started
from replaybuf.tracing import spans

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
"""Ids that callers may give their requests."""
KNOWN_PATHS = 128
"""Paths whose route is kept: a producer sends all its groups to one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shared:
    """What the handlers of one application share."""

    service: Service
    decoders: DecoderPool
    openapi: Callable[[], dict[str, Any]]
    exposition: Exposition


@dataclasses.dataclass(frozen=True, slots=True)
class _Route:
    call: Call
    path: re.Pattern[str]
    open: bool


class Application:
    """The ASGI application of one service; `state` is what its handlers share."""

    def __init__(self, service: Service, tokens: Tokens, bodies: BodyBudget, forwarding: Forwarding) -> None:
        self.state = Shared(service, DecoderPool(), functools.cache(_openapi), Exposition(service))
        self._guard = Guard(tokens)
        self._request_ids = RequestIds()
        self._bodies = bodies
        self._forwarding = forwarding
        self._routes: defaultdict[tuple[str, str], list[_Route]] = defaultdict(list)
        self._find_route = functools.lru_cache(KNOWN_PATHS)(self._look_up)
        for call in (*CALLS, *OPEN_CALLS):
            route = _Route(call, compile_path(call.path)[0], open=call in OPEN_CALLS)
            for method in _methods(call):
                self._routes[method, _section(call.path)].append(route)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        scope["app"] = self
        request = Request(scope, receive, send)
        try:
            route, scope["path_params"] = self._find_route(scope["method"], scope["path"])
            if route is None:
                response = self._refuse(scope["method"], scope["path"])
            elif route.open:
                request.state.caller = self._guard.recognise(request)
                response = await route.call.handler(request)
            else:
                response = await self._call(route.call, request)
        except ReplaybufError as error:
            response = error_response(hide_others(request, error), request_id.get())
        except Exception as error:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            response = error_response(ReplaybufError(f"{type(error).__name__}: {error}"), request_id.get())
        await response(scope, receive, send)

    def _look_up(self, method: str, path: str) -> tuple[_Route | None, dict[str, str]]:
        """Return the route of a request, and the parameters of its path, which nobody may change."""
        for asked_path in (path, path.removesuffix("/")):  # clients with a base URL send a last slash
            for route in self._routes.get((method, _section(asked_path)), ()):
                if parameters := route.path.match(asked_path):
                    return route, parameters.groupdict()
        return None, {}

    async def _call(self, call: Call, request: Request) -> Response:
        """Authorise, handle and count a call."""
        watch, status, scope = started(), 500, request.scope
        run, client = scope["path_params"].get("run"), scope.get("client")
        headers = dict(reversed(scope["headers"]))  # the first one of a name counts
        sent_id = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id.set(sent_id if sent_id and _REQUEST_ID.fullmatch(sent_id) else self._request_ids.new())
        # The memory of a body is held by address and run. No name of a run has a dot or a colon.
        share = self._bodies.share(*([client[0]] if client else []), run or "")
        authorization = headers.get(b"authorization", b"").decode("latin-1") or None
        permission = Permission(self._guard.tokens, authorization, call.roles, run, call.lists_runs)
        state = scope.setdefault("state", {})  # what `request.state` shows
        state |= {"body_share": share, "permission": permission, "caller": ANYONE}
        try:
            state["caller"] = self._guard.check(request, permission)
            if call.query is not None and scope["query_string"]:
                check_query(request, call.query)
            if spans.enabled():
                with spans.answer(call.method, call.path, request.headers, run or ""):
                    response = await self._handle(call, request, share)
            else:
                response = await self._handle(call, request, share)
            if call.method == "GET":
                permission.check()  # the answer may be of the turn in which the permission ended
            status = response.status_code
        except ClientDisconnect:
            status = 499
            return Response(status_code=status)  # the caller is gone
        except asyncio.CancelledError as cancelled:
            # By uvicorn, which waits `DRAIN_TIMEOUT_S` for the calls of a service that ends, and would answer 500.
            status = ServiceUnavailable.status
            raise ServiceUnavailable("the service ends before it could answer; send it again") from cancelled
        except ReplaybufError as error:
            status = error.status
            if isinstance(error, Unauthorized | Forbidden):
                self._guard.log_refusal(request, error)
            raise
        else:
            return response
        finally:
            share.end()
            self._guard.settle(request, call, share.read_bytes, status)
            service, seconds = self.state.service, watch.seconds
            # Without the name of an unknown run: callers could make the number of series grow without bound.
            known = run if run in service.runs else None
            service.traffic.count(known or "", call.name, status, seconds)
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("%s %s status=%d seconds=%.4f", call.method, scope["path"], status, seconds)

    async def _handle(self, call: Call, request: Request, share: BodyShare) -> Response:
        """Answer a call, or let the leader of its run answer it."""
        record_only = RECORD_ONLY if call.of_records else None
        while True:
            try:
                return await call.handler(request)
            except NotLeader as error:
                run = self.state.service.runs.get(request.path_params["run"])  # it may have been dropped meanwhile
                if run is None or not error.value or (share.read_bytes and share.kept is None):
                    raise  # a body that came in parts is gone
                leader = str(error.value)
                leads = functools.partial(_leads, run.journal, leader)
                answer = await self._forwarding.forward(request, leader, leads, share.kept, record_only)
                if answer is None:
                    raise
            if not record_only or answer.status_code != HTTPStatus.NOT_MODIFIED:
                return answer
            await answer.aclose()
            await run.read_streams()
            record_only = None  # a rewind may have taken the record back: the leader answers then

    def _refuse(self, method: str, path: str) -> Response:
        """Answer 405 at a path that has other methods, else 404."""
        routes = [route for listed in self._routes.values() for route in listed if route.path.match(path)]
        if not routes:
            return error_response(NotFound(f"{method} {path}: {HTTPStatus.NOT_FOUND.phrase}", name="path", value=path))
        status = HTTPStatus.METHOD_NOT_ALLOWED
        document = {"type": "about:blank", "title": status.phrase, "status": status}
        document["detail"] = f"{method} {path}: {status.phrase}"
        allowed = sorted({method for route in routes for method in _methods(route.call)})
        return document_response(document, {"Allow": ", ".join(allowed)})


def _openapi() -> dict[str, Any]:
    """Build the OpenAPI document, which takes 50 ms: at the start of a service nobody asks for it."""
    return describe(CALLS, OPEN_CALLS) | {"x-plugins": describe_plugins()}


def application(
    service: Service,
    tokens: Tokens,
    body_budget_bytes: int = BODY_BUDGET_BYTES,
    forwarding: Forwarding | None = None,
) -> Application:
    """Build the ASGI application of one service."""
    return Application(service, tokens, BodyBudget(body_budget_bytes, service.traffic), forwarding or Forwarding())


def _leads(journal: Journal, leader: str) -> bool:
    return not journal.leading and journal.leader_url == leader


def _section(path: str) -> str:
    """Return the part of a path behind the name of a run, "" without one: few routes have the same."""
    parts = path.split("/", 5)
    return parts[4] if len(parts) > 4 else ""


def _methods(call: Call) -> tuple[str, ...]:
    return ("GET", "HEAD") if call.method == "GET" else (call.method,)
