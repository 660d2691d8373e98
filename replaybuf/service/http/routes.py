"""The HTTP application of a service: routes, authorisation, and errors as RFC 9457 problem documents."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route

from replaybuf.errors import NotFound, ReplaybufError
from replaybuf.service.host import Service
from replaybuf.service.http.auth import Tokens
from replaybuf.service.http.body_budget import BodyBudget
from replaybuf.service.http.calls import CALLS, OPEN_CALLS, Call
from replaybuf.service.http.decoders import DecoderPool
from replaybuf.service.http.openapi import describe
from replaybuf.service.http.problems import document_response, error_response
from replaybuf.service.http.requests import check_query
from replaybuf.service.http.start_gate import StartGate
from replaybuf.service.options import BODY_BUDGET_BYTES
from replaybuf.service.traffic import started

logger = logging.getLogger(__name__)


def application(service: Service, tokens: Tokens, body_budget_bytes: int = BODY_BUDGET_BYTES) -> Starlette:
    """Build the ASGI application of one service."""
    bodies = BodyBudget(body_budget_bytes, service.traffic)
    app = Starlette(
        routes=[
            *(Route(call.path, _guarded(call, tokens, bodies), methods=[call.method]) for call in CALLS),
            *(Route(call.path, call.handler, methods=[call.method]) for call in OPEN_CALLS),
        ],
        middleware=[Middleware(StartGate)],
        exception_handlers={ReplaybufError: _problem, HTTPException: _http_problem, Exception: _fault},
    )
    app.state.service = service
    app.state.decoders = DecoderPool()
    app.state.openapi = describe(CALLS, OPEN_CALLS)
    return app


def _guarded(call: Call, tokens: Tokens, bodies: BodyBudget) -> Callable[[Request], Awaitable[Response]]:
    name = f"{call.method} {call.template}"

    async def endpoint(request: Request) -> Response:
        watch, status = started(), 500
        try:
            tokens.check(request.headers.get("authorization"), call.roles)
            if call.query is not None:
                check_query(request, call.query)
            with bodies.share() as request.state.body_share:
                response = await call.handler(request)
            status = response.status_code
        except ClientDisconnect:
            status = 499
            return Response(status_code=status)  # the caller is gone
        except ReplaybufError as error:
            status = error.status
            raise
        else:
            return response
        finally:
            run = request.path_params.get("run", "")
            service: Service = request.app.state.service
            # Without the name of an unknown run: callers could make the number of series grow without bound.
            service.traffic.count(run if run in service.runs else "", name, status, watch.seconds)
            logger.debug("%s %s status=%d seconds=%.4f", call.method, request.scope["path"], status, watch.seconds)

    return endpoint


async def _problem(_: Request, error: Any) -> Response:  # a `ReplaybufError`; the type that starlette asks for is wider
    return error_response(error)


async def _http_problem(request: Request, error: Any) -> Response:  # an `HTTPException`
    status = HTTPStatus(error.status_code)
    detail = f"{request.method} {request.url.path}: {error.detail}"
    if status == HTTPStatus.NOT_FOUND:
        return error_response(NotFound(detail, name="path", value=request.url.path))
    headers = dict(error.headers or {})
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = ", ".join(_methods_at(request))
    return document_response(
        {"type": "about:blank", "title": status.phrase, "status": status, "detail": detail}, headers
    )


def _methods_at(request: Request) -> list[str]:
    """List the methods of the path over all of its routes; starlette names only those of the first route."""
    here = [route for route in request.app.routes if route.matches(request.scope)[0] != Match.NONE]
    return sorted({method for route in here for method in route.methods})


async def _fault(request: Request, error: Exception) -> Response:
    logger.exception("%s %s failed", request.method, request.url.path, exc_info=error)
    return error_response(ReplaybufError(f"{type(error).__name__}: {error}"))
