"""The HTTP contract, version 1: one table of routes. Errors become RFC 9457 problem documents.

`handlers.py` does what the rows name; `openapi.py` describes the same table.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route

from replaybuf.errors import NotFound, ReplaybufError
from replaybuf.service.host import Service
from replaybuf.service.http import handlers, sending
from replaybuf.service.http.auth import Tokens
from replaybuf.service.http.openapi import describe
from replaybuf.service.http.requests import (
    ADAPTER,
    AFTER,
    DP_RANK,
    EPOCH,
    GENERATION,
    LIMIT,
    NEWER_THAN,
    REASON,
    STATE,
    WAIT_MS,
    Number,
    Text,
    check_query,
)
from replaybuf.service.traffic import started
from replaybuf.wire import contract
from replaybuf.wire.config import ConfigPatch, RunConfig
from replaybuf.wire.contract import (
    AckRequest,
    AttachRequest,
    CheckpointRequest,
    Evaluation,
    EvaluationRequest,
    GroupsRequest,
    PolicyRequest,
    TicketRequest,
)
from replaybuf.wire.plan import MEDIA_TYPE as PLAN_TYPE
from replaybuf.wire.plan import Plan

logger = logging.getLogger(__name__)

READ = frozenset({"reader"})
OPEN: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One row of the contract: method, path, handler, roles besides operator, shapes for the description.

    `query`: the parameters it takes, None = whatever: a probe is asked in the ways of others. `result`: the shape of an
    answer in JSON; `media_types`: the forms an answer comes in.
    """

    method: str
    path: str
    handler: Callable[[Request], Awaitable[Response]]
    roles: frozenset[str]
    summary: str
    body: Any = None
    answers: tuple[str, ...] = ("200",)
    query: tuple[Number | Text, ...] | None = ()
    result: Any = None
    media_types: tuple[str, ...] = ("application/json",)

    @property
    def template(self) -> str:
        """The path as docs/http.md has it."""
        return self.path.replace(":path}", "}")


_R = "/v1/runs/{run}"
_PRODUCER = frozenset({"producer"})
_TRAINER = frozenset({"trainer"})
_ANYBODY = READ | _TRAINER | _PRODUCER
_CHANGED = ("200", "409")

CALLS = (
    Call("PUT", _R, handlers.put_run, OPEN, "Create a run", RunConfig, ("200", "201", "409"), result=contract.RunShown),
    Call(
        "GET", "/v1/runs", handlers.get_runs, READ | _TRAINER, "List runs with their state", result=contract.RunsShown
    ),
    Call("GET", _R, handlers.get_run, _ANYBODY, "State of a run", result=contract.RunShown),
    Call(
        "PATCH",
        _R,
        handlers.patch_run,
        OPEN,
        "Change strategy, filters, limits or state",
        ConfigPatch,
        _CHANGED,
        result=contract.RunShown,
    ),
    Call(
        "POST",
        f"{_R}/tickets",
        handlers.post_tickets,
        _PRODUCER,
        "Ask for leave to generate groups",
        TicketRequest,
        result=contract.TicketsShown,
    ),
    Call(
        "DELETE",
        f"{_R}/tickets/{{ticket:path}}",
        handlers.delete_ticket,
        _PRODUCER,
        "Give a ticket back",
        query=(REASON,),
        result=contract.TicketReturned,
    ),
    Call(
        "POST",
        f"{_R}/groups",
        handlers.post_groups,
        _PRODUCER,
        "Append groups",
        GroupsRequest,
        ("200", "413", "422", "429"),
        result=contract.AppendShown,
    ),
    Call(
        "GET",
        f"{_R}/groups",
        handlers.get_groups,
        READ,
        "Browse groups",
        query=(STATE, LIMIT, AFTER),
        result=contract.GroupsPage,
    ),
    Call(
        "GET",
        f"{_R}/groups/{{group_id:path}}",
        handlers.get_group,
        READ,
        "One group with its rollouts",
        answers=("200", "404", "410"),
        result=contract.GroupShown,
    ),
    Call(
        "POST",
        f"{_R}/evaluations",
        handlers.post_evaluation,
        _PRODUCER,
        "Keep a result",
        EvaluationRequest,
        result=Evaluation,
    ),
    Call(
        "GET",
        f"{_R}/evaluations",
        handlers.get_evaluations,
        _ANYBODY,
        "Results of evaluations",
        query=(LIMIT,),
        result=contract.EvaluationsShown,
    ),
    Call(
        "GET",
        f"{_R}/policy",
        handlers.get_policy,
        _ANYBODY,
        "Published policy",
        query=(NEWER_THAN, WAIT_MS, ADAPTER),
        result=contract.PolicyShown,
    ),
    Call(
        "POST",
        f"{_R}/policy",
        handlers.post_policy,
        _TRAINER,
        "Publish a version",
        PolicyRequest,
        _CHANGED,
        result=contract.PolicyShown,
    ),
    Call(
        "POST",
        f"{_R}/attach",
        handlers.post_attach,
        _TRAINER,
        "Attach a trainer",
        AttachRequest,
        _CHANGED,
        result=contract.AttachShown,
    ),
    Call(
        "GET",
        f"{_R}/batches/{{step}}",
        handlers.get_batch,
        _TRAINER,
        "Batch of a step for one rank, as safetensors or as a plan",
        None,
        ("200", "202", "304", "406", "409", "410"),
        (EPOCH, DP_RANK, WAIT_MS),
        result=Plan,
        media_types=(sending.MEDIA_TYPE, PLAN_TYPE),
    ),
    Call(
        "POST",
        f"{_R}/batches/{{step}}/ack",
        handlers.post_ack,
        _TRAINER,
        "Count a step as trained",
        AckRequest,
        _CHANGED,
        result=contract.AckShown,
    ),
    Call(
        "GET",
        f"{_R}/batches/{{step}}/record",
        handlers.get_record,
        READ | _TRAINER,
        "What a step was trained on",
        None,
        ("200", "404", "410"),
        (GENERATION,),
        result=contract.RecordShown,
    ),
    Call(
        "POST",
        f"{_R}/checkpoints",
        handlers.post_checkpoint,
        _TRAINER,
        "Record a checkpoint",
        CheckpointRequest,
        _CHANGED,
        result=contract.CheckpointsShown,
    ),
    Call(
        "GET",
        f"{_R}/ledger",
        handlers.get_ledger,
        READ | _TRAINER,
        "Ledger records",
        query=(AFTER, LIMIT),
        result=contract.LedgerPage,
    ),
    Call(
        "GET",
        f"{_R}/failed-prompts",
        handlers.get_failed_prompts,
        _ANYBODY,
        "Prompts that failed, and why",
        query=(LIMIT,),
        result=contract.FailedPromptsShown,
    ),
    Call(
        "GET",
        f"{_R}/dead-letters",
        handlers.get_dead_letters,
        READ,
        "Stored groups that turned out unusable",
        result=contract.DeadLettersShown,
    ),
    Call(
        "DELETE",
        f"{_R}/dead-letters",
        handlers.delete_dead_letters,
        OPEN,
        "Let the bytes of dead letters go",
        result=contract.Purged,
    ),
    Call("GET", "/metrics", handlers.get_metrics, READ, "Prometheus text", query=None, media_types=("text/plain",)),
)
UNGUARDED = (
    Call(
        "GET",
        "/healthz",
        handlers.get_healthz,
        OPEN,
        "Does the process answer",
        query=None,
        result=contract.HealthShown,
    ),
    Call(
        "GET",
        "/readyz",
        handlers.get_readyz,
        OPEN,
        "Does Redis answer",
        None,
        ("200", "503"),
        query=None,
        result=contract.ReadinessShown,
    ),
    Call("GET", "/openapi.json", handlers.get_openapi, OPEN, "This description", query=None),
    Call("GET", "/", handlers.get_console, OPEN, "A page that shows every run", query=None, media_types=("text/html",)),
)
"""For everybody, without a token."""


def application(service: Service, tokens: Tokens) -> Starlette:
    """Wire the routes of one service."""
    app = Starlette(
        routes=[
            *(Route(call.path, _guarded(call, tokens), methods=[call.method]) for call in CALLS),
            *(Route(call.path, call.handler, methods=[call.method]) for call in UNGUARDED),
        ],
        exception_handlers={ReplaybufError: _problem, HTTPException: _http_problem, Exception: _fault},
    )
    app.state.service = service
    app.state.openapi = describe(CALLS, UNGUARDED)
    return app


def _guarded(call: Call, tokens: Tokens) -> Callable[[Request], Awaitable[Response]]:
    name = f"{call.method} {call.template}"

    async def endpoint(request: Request) -> Response:
        watch, status = started(), 500
        try:
            tokens.check(request.headers.get("authorization"), call.roles)
            if call.query is not None:
                check_query(request, call.query)
            response = await call.handler(request)
            status = response.status_code
        except ClientDisconnect:
            status = 499
            return Response(status_code=status)  # nobody is left to read it
        except ReplaybufError as error:
            status = error.status
            raise
        else:
            return response
        finally:
            run = request.path_params.get("run", "")
            service: Service = request.app.state.service
            # A name that is no run's is not told: whoever calls could make up any number of them.
            service.traffic.count(run if run in service.runs else "", name, status, watch.seconds)
            logger.debug("%s %s status=%d seconds=%.4f", call.method, request.scope["path"], status, watch.seconds)

    return endpoint


def _problem_response(document: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(
        msgspec.json.encode(document, enc_hook=str), document["status"], headers, media_type="application/problem+json"
    )


async def _problem(_: Request, error: Any) -> Response:  # a `ReplaybufError`; starlette's own type is wider
    headers = {"Retry-After": str(max(1, round(error.retry_after_s)))} if error.retry_after_s is not None else None
    if error.status == 401:
        headers = {"WWW-Authenticate": "Bearer"}
    return _problem_response(error.problem(), headers)


async def _http_problem(request: Request, error: Any) -> Response:  # an `HTTPException`
    status = HTTPStatus(error.status_code)
    detail = f"{request.method} {request.url.path}: {error.detail}"
    if status == HTTPStatus.NOT_FOUND:
        return _problem_response(NotFound(detail, name="path", value=request.url.path).problem())
    headers = dict(error.headers or {})
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = ", ".join(_methods_at(request))
    return _problem_response(
        {"type": "about:blank", "title": status.phrase, "status": status, "detail": detail}, headers
    )


def _methods_at(request: Request) -> list[str]:
    """List what the path takes, over all of its routes; starlette tells those of the first."""
    here = [route for route in request.app.routes if route.matches(request.scope)[0] != Match.NONE]
    return sorted({method for route in here for method in route.methods})


async def _fault(request: Request, error: Exception) -> Response:
    logger.exception("%s %s failed", request.method, request.url.path, exc_info=error)
    return _problem_response(ReplaybufError(f"{type(error).__name__}: {error}").problem())
