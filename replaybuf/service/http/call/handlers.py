"""Handlers of the HTTP calls: read the request, call the run, encode the answer. `calls.py` is their table."""

from __future__ import annotations

import asyncio
import functools
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from replaybuf.service.host import Service
from replaybuf.service.http.body.append_bodies import read_ack, read_groups
from replaybuf.service.http.body.requests import (
    ADAPTER,
    DP_RANK,
    DRY_RUN,
    EPOCH,
    GENERATION,
    IF_ABSENT,
    IF_REVISION,
    LIMIT,
    NEWER_THAN,
    PIECES,
    REASON,
    STEP,
    Number,
    Text,
    number,
    optional_number,
    page,
    read_json,
    read_patch,
    text,
    wait_s,
)
from replaybuf.service.http.call.browse import describe_dead_letters, describe_group, list_failed_prompts, list_groups
from replaybuf.service.http.call.group_pages import PREVIEW, read_query
from replaybuf.service.http.call.visible_runs import describe_lost, list_runs, list_unreadable
from replaybuf.service.http.guard.auth import Permission
from replaybuf.service.http.reply import sending
from replaybuf.service.http.reply.json_pieces import JsonResponse, json_in_pieces
from replaybuf.service.lost_data import accept_loss
from replaybuf.service.run.heartbeats import list_producers, record_heartbeat
from replaybuf.service.run.served_run import Run
from replaybuf.service.turns import in_turns
from replaybuf.tracing import spans
from replaybuf.wire.answer.browse import LedgerPage, PurgedDeadLetters
from replaybuf.wire.answer.evaluations import EvaluationRequest
from replaybuf.wire.answer.run_status import LossRequest, RunList
from replaybuf.wire.config import RunConfig
from replaybuf.wire.contract import (
    AppendResults,
    AttachRequest,
    CheckpointRequest,
    Health,
    HeartbeatRequest,
    PolicyRequest,
    Readiness,
    ReturnedTicket,
    TicketRequest,
    WaitingAnswer,
)
from replaybuf.wire.names import check_string

LARGEST_PAGE_BYTES = 8 << 20
"""A page of the ledger ends with the record that exceeds it; 1,000 acks with feedback may have 1 GB."""
_STEP, _BEFORE = Number("step"), Number("before")
_CONTAINS = Text("contains")
_LIMIT = Number("limit", 25, 1, 250)
SAMPLE_PARAMETERS: tuple[Number | Text, ...] = (_STEP, _BEFORE, _CONTAINS, _LIMIT)


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Encode an answer as JSON."""
    return JsonResponse(msgspec.json.encode(content), status, headers)


def service_of(request: Request) -> Service:
    """Return the service that got the request."""
    service: Service = request.app.state.service
    return service


async def run_of(request: Request) -> Run:
    """Return the run of the path, to read it."""
    return await service_of(request).run(request.path_params["run"])


async def _serving(request: Request) -> Run:
    return await service_of(request).serving(request.path_params["run"])


async def led_run_of(request: Request) -> Run:
    """Return the run of the path, to change it."""
    return await service_of(request).led(request.path_params["run"])


# ---------------------------------------------------------------------- runs


async def put_run(request: Request) -> Response:
    """Create a run, or return the one that exists."""
    config, if_absent = await read_json(request, RunConfig), text(request, IF_ABSENT) == "true"
    name, by = request.path_params["run"], request.state.caller.name
    run, created = await service_of(request).create(name, config, if_absent=if_absent, by=by)
    return json_response(run.describe(), 201 if created else 200)


async def delete_run(request: Request) -> Response:
    """Delete a finished run."""
    await service_of(request).delete(request.path_params["run"], by=request.state.caller.name)
    return Response(status_code=204)


async def post_accept_loss(request: Request) -> Response:
    """Let a run go on without what Redis lost."""
    body, service = await read_json(request, LossRequest), service_of(request)
    return json_response(await accept_loss(service, request.path_params["run"], body, by=request.state.caller.name))


async def get_runs(request: Request) -> Response:
    """List the runs with their status."""
    runs = [run.describe() async for _, run in in_turns(list_runs(request))]
    return json_response(RunList(runs=runs, unreadable=list_unreadable(request)))


async def get_run(request: Request) -> Response:
    """Return the status of a run."""
    run = await run_of(request)
    return json_response(run.describe())


async def patch_run(request: Request) -> Response:
    """Change strategy, filters, limits or state of a run."""
    patch = await read_patch(request)
    run = await led_run_of(request)
    revision = optional_number(request, IF_REVISION)
    if text(request, DRY_RUN) == "true":
        return json_response(run.preview(patch, revision))
    await run.patch(patch, revision, by=request.state.caller.name)
    return json_response(run.describe())


# ---------------------------------------------------------------------- producers


async def post_tickets(request: Request) -> Response:
    """Issue tickets for groups."""
    run = await led_run_of(request)
    body = await read_json(request, TicketRequest)
    run.journal.presence.record_producer(body.producer)
    gone = functools.partial(leaves, request)
    wait_s = body.wait_ms / 1000
    issued = await run.tickets.issue(body.producer, body.count, body.adapter, wait_s, gone, body.max_tokens)
    request.state.permission.check()  # as after each GET; tickets that nobody gets expire
    return json_response(issued)


async def leaves(request: Request) -> NoReturn:
    """Wait until the caller disconnects or loses its permission. For use after the body was read.

    Raises `ClientDisconnect`, and what a new call would be refused with.
    """
    permission: Permission = request.state.permission
    while True:
        permission.check()
        async with permission.watch():
            while (await request.receive())["type"] != "http.disconnect":
                pass
            raise ClientDisconnect


async def delete_ticket(request: Request) -> Response:
    """Take back a ticket that a producer returns."""
    run = await led_run_of(request)
    ticket = request.path_params["ticket"]
    await run.tickets.give_back(ticket, text(request, REASON) or "")
    return json_response(ReturnedTicket(ticket=ticket))


async def put_producer(request: Request) -> Response:
    """Record a heartbeat of a producer."""
    run, name = await led_run_of(request), request.path_params["producer"]
    check_string("producer", name)
    return json_response(record_heartbeat(run, name, await read_json(request, HeartbeatRequest)))


async def get_producers(request: Request) -> Response:
    """List the producers that called within the last hour."""
    return json_response(list_producers(await led_run_of(request)))


async def post_groups(request: Request) -> Response:
    """Append groups."""
    shared, name = request.scope["app"].state, request.scope["path_params"]["run"]
    run = await shared.service.storing(name)
    run.journal.presence.record_producer()
    groups = read_groups(request, run.journal.config.limits.max_group_bytes, shared.decoders)
    return json_response(AppendResults(results=await run.appends.append(groups)))


async def post_evaluation(request: Request) -> Response:
    """Record the result of an evaluation."""
    run = await led_run_of(request)
    return json_response(await run.evaluations.record(await read_json(request, EvaluationRequest)))


# ---------------------------------------------------------------------- policy and trainer


async def get_policy(request: Request) -> Response:
    """Return the published policy."""
    run = await run_of(request)
    after, adapter = optional_number(request, NEWER_THAN), text(request, ADAPTER) or ""
    gone = functools.partial(leaves, request)
    return json_response(await run.trainer_calls.policy_after(after, wait_s(request), adapter, gone))


async def post_policy(request: Request) -> Response:
    """Publish a version."""
    run = await led_run_of(request)
    body = await read_json(request, PolicyRequest)
    step = body.version * run.journal.config.steps_per_publish - 1  # the last one trained into this version
    with _span(run, "publish", step):
        return json_response(await run.trainer_calls.publish(body.version, body.epoch, body.weights_uri, body.adapter))


async def post_attach(request: Request) -> Response:
    """Attach a trainer and fence older epochs."""
    run = await led_run_of(request)
    return json_response(await run.trainer_calls.attach(await read_json(request, AttachRequest)))


async def get_batch(request: Request) -> Response:
    """Return the batch of a step for one rank, as safetensors or as a plan."""
    run = await _serving(request)
    step, epoch, rank = number(request, STEP), number(request, EPOCH), number(request, DP_RANK)
    as_body = not sending.wants_plan(request)
    gone = functools.partial(leaves, request)
    outcome = await run.batches.part(step, epoch, rank, wait_s(request), as_body=as_body, gone=gone)
    if isinstance(outcome, WaitingAnswer):
        return json_response(outcome, 202, {"Retry-After": "1"})
    with spans.batch("deliver", run.name, outcome.batch.record.generation, step, dp_rank=rank):
        return await sending.answer(request, outcome)


async def post_ack(request: Request) -> Response:
    """Count a step as trained."""
    run = await led_run_of(request)
    body = await read_ack(request, request.app.state.decoders)
    step = number(request, STEP)
    with _span(run, "ack", step):
        return json_response(await run.trainer_calls.ack(step, body.epoch, body.feedback, body.metrics))


def _span(run: Run, name: str, step: int) -> AbstractContextManager[object]:
    """Record what happens to the batch of a step, if the current history has it."""
    batch = run.state.batches.get(step)
    return spans.batch(name, run.name, batch.generation if batch else None, step)


async def post_checkpoint(request: Request) -> Response:
    """Record a checkpoint."""
    run = await led_run_of(request)
    body = await read_json(request, CheckpointRequest)
    keep = 1 if body.keep is None else body.keep
    return json_response(await run.trainer_calls.checkpoint(body.step, body.epoch, keep))


# ---------------------------------------------------------------------- browsing


async def get_groups(request: Request) -> Response:
    """List groups."""
    run = await run_of(request)
    preview = text(request, PREVIEW) == "true"
    return json_response(await list_groups(run, *read_query(request, run), preview=preview))


async def get_group(request: Request) -> Response:
    """Return one group with its rollouts."""
    run = await run_of(request)
    tokenizer, pieces = service_of(request).tokenizer, text(request, PIECES) == "true"
    described = await describe_group(run, request.path_params["group_id"], tokenizer, pieces=pieces)
    return await json_in_pieces(described)


async def get_record(request: Request) -> Response:
    """Return the groups and the packing of a batch."""
    run = await run_of(request)
    generation = optional_number(request, GENERATION)
    record = await run.batches.record(number(request, STEP), generation)
    fields = msgspec.to_builtins(msgspec.structs.replace(record, groups=[]))
    return await json_in_pieces(fields | {"groups": record.groups})


async def get_evaluations(request: Request) -> Response:
    """List results of evaluations."""
    run = await run_of(request)
    return json_response(await run.evaluations.list_newest(number(request, LIMIT)))


async def get_ledger(request: Request) -> Response:
    """List ledger records."""
    run = await run_of(request)
    after, limit = page(request)
    records: list[Any] = []
    size, last = 0, after
    async for entry, record in run.journal.records(after, limit):
        records.append(msgspec.Raw(b'{"entry":%d,' % entry + msgspec.json.encode(record)[1:]))
        size, last = size + len(records[-1]), entry
        if size > LARGEST_PAGE_BYTES:
            break
    more = len(records) == limit or size > LARGEST_PAGE_BYTES
    return json_response(LedgerPage(records=records, next=last if more else None))


async def get_failed_prompts(request: Request) -> Response:
    """List prompts that failed, with the reason."""
    run = await run_of(request)
    return json_response(list_failed_prompts(run, number(request, LIMIT)))


async def get_dead_letters(request: Request) -> Response:
    """List stored groups that turned out unusable."""
    run = await run_of(request)
    after, limit = page(request)
    return json_response(await describe_dead_letters(run, after, limit))


async def delete_dead_letters(request: Request) -> Response:
    """Delete the bytes of dead letters."""
    run = await led_run_of(request)
    return json_response(PurgedDeadLetters(purged=await run.purge(by=request.state.caller.name)))


async def get_samples(request: Request) -> Response:
    """List rollouts of trained steps that stay readable."""
    run = await run_of(request)
    step, before = optional_number(request, _STEP), optional_number(request, _BEFORE)
    listed = await run.samples.list_newest(
        number(request, _LIMIT), step=step, before=before, contains=text(request, _CONTAINS)
    )
    samples = [msgspec.to_builtins(sample) for sample in listed.samples]
    return await json_in_pieces(msgspec.structs.asdict(listed) | {"samples": samples})


# ---------------------------------------------------------------------- server


async def get_metrics(request: Request) -> Response:
    """Return the metrics as Prometheus text."""
    return Response(await request.app.state.exposition.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def get_healthz(request: Request) -> Response:
    """Check that the process answers."""
    return json_response(Health())


async def get_readyz(request: Request) -> Response:
    """Check that Redis answers and holds every acknowledged write. Names only runs that the caller may see."""
    service, seen = service_of(request), list_runs(request)
    report = service.report
    trouble = service.outage or service.store.connection.trouble or describe_lost(request)
    ready = trouble is None and report is not None
    answer = Readiness(
        status="ready" if ready else "not ready",
        durability=report.durability if report else "unknown",
        durability_wanted=report.policy.level if report else "unknown",
        durability_met_by=report.met_by if report else "unknown",
        durability_reasons=list(report.reasons) if report else [],
        replicas=report.replicas if report else 0,
        wait_replicas=report.policy.replicas if report else 0,
        redis_version=report.version if report else None,
        server=report.name if report else None,
        waiting_for=trouble,
        runs=[name for name, _ in seen],
        unreadable=list_unreadable(request),
        leaders={name: run.journal.leader_url for name, run in seen},
    )
    return json_response(answer, 200 if ready else 503)


async def get_openapi(request: Request) -> Response:
    """Return this document, with the options of installed plug-ins under `x-plugins`."""
    return json_response(await asyncio.to_thread(request.app.state.openapi))
