"""The HTTP contract, version 1: one table of routes; handlers read a request, ask the run, write the answer.

Errors become RFC 9457 problem documents. `openapi.py` describes the same table.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from importlib.resources import files
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Match, Route

from replaybuf.config import ConfigPatch, RunConfig
from replaybuf.errors import NotFound, ReplaybufError
from replaybuf.service import sending
from replaybuf.service.answers import Counted, WaitingAnswer
from replaybuf.service.auth import Tokens
from replaybuf.service.browse import describe_dead_letters, describe_group, list_failed_prompts, list_groups
from replaybuf.service.evaluations import Evaluation, EvaluationRequest, list_evaluations, record_evaluation
from replaybuf.service.metrics import exposition
from replaybuf.service.openapi import describe
from replaybuf.service.requests import (
    ADAPTER,
    AFTER,
    DP_RANK,
    EPOCH,
    GENERATION,
    LIMIT,
    NEWER_THAN,
    REASON,
    STATE,
    STEP,
    WAIT_MS,
    AckRequest,
    CheckpointRequest,
    GroupsRequest,
    Number,
    PolicyRequest,
    Text,
    TicketRequest,
    check_query,
    number,
    optional_number,
    page,
    read_groups,
    read_json,
    wait_s,
)
from replaybuf.service.run import Run
from replaybuf.service.service import Service
from replaybuf.service.session import AttachRequest
from replaybuf.service.traffic import started

logger = logging.getLogger(__name__)

CONSOLE = files("replaybuf.service").joinpath("console.html").read_text()
"""One page that shows every run of this server, without anything fetched from elsewhere."""
READ = frozenset({"reader"})
OPEN: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One row of the contract: method, path, handler, roles besides operator, shapes for the description.

    `query`: the parameters it takes, None = whatever: a probe is asked in the ways of others. `result`: fields that the
    answer has among others.
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

    @property
    def template(self) -> str:
        """The path as docs/http.md has it."""
        return self.path.replace(":path}", "}")


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Encode an answer as JSON."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _run(request: Request) -> Run:
    return await _service(request).run(request.path_params["run"])


async def _serving(request: Request) -> Run:
    return await _service(request).serving(request.path_params["run"])


async def _led(request: Request) -> Run:
    return await _service(request).led(request.path_params["run"])


# ---------------------------------------------------------------------- runs


async def put_run(request: Request) -> Response:
    config = await read_json(request, RunConfig)
    run, created = await _service(request).create(request.path_params["run"], config)
    return json_response(run.describe(), 201 if created else 200)


async def get_runs(request: Request) -> Response:
    service = _service(request)
    runs = [run.describe() for _, run in sorted(service.runs.items())]
    return json_response({"runs": runs, "unreadable": service.unread.reasons})


async def get_run(request: Request) -> Response:
    run = await _run(request)
    return json_response(run.describe())


async def patch_run(request: Request) -> Response:
    patch = await read_json(request, ConfigPatch)
    run = await _led(request)
    await run.patch(patch)
    return json_response(run.describe())


# ---------------------------------------------------------------------- producers


async def post_tickets(request: Request) -> Response:
    run = await _led(request)
    asked = await read_json(request, TicketRequest)
    wait_s = asked.wait_ms / 1000
    gone = functools.partial(_is_gone, request)
    return json_response(await run.door.take_tickets(asked.producer, asked.count, asked.adapter, wait_s, gone))


def _is_gone(request: Request) -> bool:
    """Say whether the caller of a request that was read went away.

    As `Request.is_disconnected`, without its cancel scope, which takes a fifth of the time of a ticket.
    """
    receiving = request.receive().__await__()
    try:
        next(receiving)  # what came is told at once; for anything else it would wait
    except StopIteration as received:
        return bool(received.value["type"] == "http.disconnect")
    finally:
        receiving.close()
    return False


async def delete_ticket(request: Request) -> Response:
    run = await _led(request)
    ticket = request.path_params["ticket"]
    await run.door.return_ticket(ticket, request.query_params.get(REASON.name, "returned"))
    return json_response({"ticket": ticket, "state": "returned"})


async def post_groups(request: Request) -> Response:
    run = await _led(request)
    groups = await read_groups(request, run.journal.config.limits.max_group_bytes)
    return json_response({"results": await run.door.append(groups)})


async def post_evaluation(request: Request) -> Response:
    run = await _led(request)
    return json_response(await record_evaluation(run, await read_json(request, EvaluationRequest)))


# ---------------------------------------------------------------------- policy and trainer


async def get_policy(request: Request) -> Response:
    run = await _run(request)
    after, adapter = optional_number(request, NEWER_THAN), request.query_params.get(ADAPTER.name, "")
    return json_response(await run.session.policy_after(after, wait_s(request), adapter))


async def post_policy(request: Request) -> Response:
    run = await _led(request)
    asked = await read_json(request, PolicyRequest)
    return json_response(await run.session.publish(asked.version, asked.epoch, asked.weights_uri, asked.adapter))


async def post_attach(request: Request) -> Response:
    run = await _led(request)
    return json_response(await run.session.attach(await read_json(request, AttachRequest)))


async def get_batch(request: Request) -> Response:
    run = await _serving(request)
    step, epoch, rank = number(request, STEP), number(request, EPOCH), number(request, DP_RANK)
    as_body = not sending.wants_plan(request)
    outcome = await run.batches.part(step, epoch, rank, wait_s(request), as_body=as_body)
    if isinstance(outcome, WaitingAnswer):
        return json_response(outcome, 202, {"Retry-After": "1"})
    return await sending.answer(request, outcome)


async def post_ack(request: Request) -> Response:
    run = await _led(request)
    asked = await read_json(request, AckRequest)
    return json_response(await run.session.ack(number(request, STEP), asked.epoch, asked.feedback))


async def post_checkpoint(request: Request) -> Response:
    run = await _led(request)
    asked = await read_json(request, CheckpointRequest)
    keep = 1 if asked.keep is None else asked.keep
    return json_response(await run.session.checkpoint(asked.step, asked.epoch, keep))


# ---------------------------------------------------------------------- looking


async def get_groups(request: Request) -> Response:
    run = await _run(request)
    after, limit = page(request)
    return json_response(await list_groups(run, request.query_params.get(STATE.name), after, limit))


async def get_group(request: Request) -> Response:
    run = await _run(request)
    return json_response(await describe_group(run, request.path_params["group_id"], _service(request).tokenizer))


async def get_record(request: Request) -> Response:
    run = await _run(request)
    generation = optional_number(request, GENERATION)
    return json_response(await run.batches.record(number(request, STEP), generation))


async def get_evaluations(request: Request) -> Response:
    run = await _run(request)
    return json_response(await list_evaluations(run, number(request, LIMIT)))


async def get_failed_prompts(request: Request) -> Response:
    run = await _run(request)
    return json_response(list_failed_prompts(run, number(request, LIMIT)))


async def get_ledger(request: Request) -> Response:
    run = await _run(request)
    after, limit = page(request)
    records = [{"entry": n} | msgspec.to_builtins(record) async for n, record in run.journal.records(after, limit)]
    return json_response({"records": records, "next": records[-1]["entry"] if len(records) == limit else None})


async def get_dead_letters(request: Request) -> Response:
    run = await _run(request)
    return json_response(await describe_dead_letters(run))


async def delete_dead_letters(request: Request) -> Response:
    run = await _led(request)
    return json_response({"purged": await run.purge()})


# ---------------------------------------------------------------------- server


async def get_metrics(request: Request) -> Response:
    return Response(await exposition(_service(request)), media_type="text/plain; version=0.0.4; charset=utf-8")


async def get_healthz(request: Request) -> Response:
    return json_response({"status": "ok"})


async def get_readyz(request: Request) -> Response:
    service = _service(request)
    report = service.report
    lost = [run.journal.lost.detail for run in service.runs.values() if run.journal.lost]
    trouble = service.trouble or (lost[0] if lost else None)
    ready = trouble is None and report is not None
    answer = {
        "status": "ready" if ready else "not ready",
        "durability": report.durability if report else "unknown",
        "durability_wanted": report.wanted.level if report else "unknown",
        "durability_met_by": report.met_by if report else "unknown",
        "durability_reasons": list(report.reasons) if report else [],
        "replicas": report.replicas if report else 0,
        "wait_replicas": report.wanted.replicas if report else 0,
        "redis_version": report.version if report else None,
        "waiting_for": trouble,
        "runs": sorted(service.runs),
        "unreadable": service.unread.reasons,
        "leaders": {name: run.journal.leader_url for name, run in sorted(service.runs.items())},
    }
    return json_response(answer, 200 if ready else 503)


async def get_console(request: Request) -> Response:
    return HTMLResponse(CONSOLE)


async def get_openapi(request: Request) -> Response:
    return json_response(request.app.state.openapi)


_R = "/v1/runs/{run}"
_PRODUCER = frozenset({"producer"})
_TRAINER = frozenset({"trainer"})
_ANYBODY = READ | _TRAINER | _PRODUCER
_CHANGED = ("200", "409")

CALLS = (
    Call("PUT", _R, put_run, OPEN, "Create a run", RunConfig, ("200", "201", "409"), result=Counted),
    Call("GET", "/v1/runs", get_runs, READ | _TRAINER, "List runs with their state"),
    Call("GET", _R, get_run, _ANYBODY, "State of a run", result=Counted),
    Call(
        "PATCH", _R, patch_run, OPEN, "Change strategy, filters, limits or state", ConfigPatch, _CHANGED, result=Counted
    ),
    Call("POST", f"{_R}/tickets", post_tickets, _PRODUCER, "Ask for leave to generate groups", TicketRequest),
    Call("DELETE", f"{_R}/tickets/{{ticket:path}}", delete_ticket, _PRODUCER, "Give a ticket back", query=(REASON,)),
    Call("POST", f"{_R}/groups", post_groups, _PRODUCER, "Append groups", GroupsRequest, ("200", "413", "422", "429")),
    Call("GET", f"{_R}/groups", get_groups, READ, "Browse groups", query=(STATE, LIMIT, AFTER)),
    Call("GET", f"{_R}/groups/{{group_id:path}}", get_group, READ, "One group with its rollouts"),
    Call(
        "POST", f"{_R}/evaluations", post_evaluation, _PRODUCER, "Keep a result", EvaluationRequest, result=Evaluation
    ),
    Call("GET", f"{_R}/evaluations", get_evaluations, _ANYBODY, "Results of evaluations", query=(LIMIT,)),
    Call("GET", f"{_R}/policy", get_policy, _ANYBODY, "Published policy", query=(NEWER_THAN, WAIT_MS, ADAPTER)),
    Call("POST", f"{_R}/policy", post_policy, _TRAINER, "Publish a version", PolicyRequest, _CHANGED),
    Call("POST", f"{_R}/attach", post_attach, _TRAINER, "Attach a trainer", AttachRequest, _CHANGED),
    Call(
        "GET",
        f"{_R}/batches/{{step}}",
        get_batch,
        _TRAINER,
        "Batch of a step for one rank, as safetensors or as a plan",
        None,
        ("200", "202", "304", "406", "409", "410"),
        (EPOCH, DP_RANK, WAIT_MS),
    ),
    Call(
        "POST", f"{_R}/batches/{{step}}/ack", post_ack, _TRAINER, "Count a step as trained", AckRequest, ("200", "409")
    ),
    Call(
        "GET",
        f"{_R}/batches/{{step}}/record",
        get_record,
        READ | _TRAINER,
        "What a step was trained on",
        None,
        ("200", "404"),
        (GENERATION,),
    ),
    Call(
        "POST", f"{_R}/checkpoints", post_checkpoint, _TRAINER, "Record a checkpoint", CheckpointRequest, ("200", "409")
    ),
    Call("GET", f"{_R}/ledger", get_ledger, READ | _TRAINER, "Ledger records", query=(AFTER, LIMIT)),
    Call("GET", f"{_R}/failed-prompts", get_failed_prompts, _ANYBODY, "Prompts that failed, and why", query=(LIMIT,)),
    Call("GET", f"{_R}/dead-letters", get_dead_letters, READ, "Stored groups that turned out unusable"),
    Call("DELETE", f"{_R}/dead-letters", delete_dead_letters, OPEN, "Let the bytes of dead letters go"),
    Call("GET", "/metrics", get_metrics, READ, "Prometheus text", query=None),
)
UNGUARDED = (
    Route("/healthz", get_healthz),
    Route("/readyz", get_readyz),
    Route("/openapi.json", get_openapi),
    Route("/", get_console),
)


def application(service: Service, tokens: Tokens) -> Starlette:
    """Wire the routes of one service."""
    app = Starlette(
        routes=[
            *(Route(call.path, _guarded(call, tokens), methods=[call.method]) for call in CALLS),
            *UNGUARDED,
        ],
        exception_handlers={ReplaybufError: _problem, HTTPException: _http_problem, Exception: _fault},
    )
    app.state.service = service
    app.state.openapi = describe(CALLS)
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
