"""The table of HTTP calls: method, path, handler, roles, and the shapes of request and answer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from replaybuf.service.http.body.requests import (
    ADAPTER,
    AFTER,
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
    WAIT_MS,
    Number,
    Real,
    Text,
)
from replaybuf.service.http.call import (
    column_calls,
    console_files,
    cursor_calls,
    explain,
    group_pages,
    handlers,
    overview_calls,
)
from replaybuf.service.http.reply import sending
from replaybuf.wire import contract
from replaybuf.wire.answer import browse, cursors, evaluations, overview, samples
from replaybuf.wire.answer.explain import BatchExplanation
from replaybuf.wire.answer.run_status import AcceptedLoss, LossRequest, RunList, RunStatus
from replaybuf.wire.config import RunConfig
from replaybuf.wire.config_patch import ConfigPatch
from replaybuf.wire.plan import MEDIA_TYPE as PLAN_TYPE
from replaybuf.wire.plan import Plan


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of the contract.

    - `roles` that may make it; an operator always may
    - `body`, `result`: shapes of the request and of a JSON answer; `answers`: statuses it may return
    - `query`: the parameters that it accepts; None = any, because probes append parameters of their own
    - `media_types` of the answer
    - `lists_runs`: the answer has one item per run that the caller may see
    - `of_records`: any server can answer once the leader has recorded what is asked for
    """

    method: str
    path: str
    handler: Callable[[Request], Awaitable[Response]]
    roles: frozenset[str]
    body: Any = None
    result: Any = None
    answers: tuple[str, ...] = ("200",)
    query: tuple[Number | Real | Text, ...] | None = ()
    media_types: tuple[str, ...] = ("application/json",)
    lists_runs: bool = False
    of_records: bool = False

    @property
    def summary(self) -> str:
        """The first line of the handler's docstring."""
        return (self.handler.__doc__ or "").partition("\n")[0].rstrip(".")

    @property
    def template(self) -> str:
        """The path as the pages in docs/http/ have it."""
        return self.path.replace(":path}", "}")

    @functools.cached_property
    def name(self) -> str:
        """Method and template, as metrics have them."""
        return f"{self.method} {self.template}"


_R = "/v1/runs/{run}"
_OPERATOR: frozenset[str] = frozenset()
_READER = frozenset({"reader"})
_PRODUCER = frozenset({"producer"})
_TRAINER = frozenset({"trainer"})
_BOTH = _READER | _TRAINER
_ALL = _BOTH | _PRODUCER
_CHANGED = ("200", "409")

# One row per call: method, path, handler, roles; then body, result, statuses, query, media types.
# fmt: off
RUN_CALLS = (
    Call("PUT", _R, handlers.put_run, _OPERATOR, RunConfig, RunStatus, ("200", "201", "409"), (IF_ABSENT,)),
    Call("DELETE", _R, handlers.delete_run, _OPERATOR, answers=("204", "409", "410")),
    Call("POST", f"{_R}/accept-loss", handlers.post_accept_loss, _OPERATOR,
         LossRequest, AcceptedLoss, _CHANGED),
    Call("GET", "/v1/runs", handlers.get_runs, _BOTH, result=RunList, lists_runs=True),
    Call("GET", _R, handlers.get_run, _ALL, result=RunStatus),
    Call("PATCH", _R, handlers.patch_run, _OPERATOR, ConfigPatch, RunStatus, _CHANGED,
         (DRY_RUN, IF_REVISION)),
)
PRODUCER_CALLS = (
    Call("POST", f"{_R}/tickets", handlers.post_tickets, _PRODUCER, contract.TicketRequest, contract.Tickets),
    Call("DELETE", f"{_R}/tickets/{{ticket:path}}", handlers.delete_ticket, _PRODUCER,
         result=contract.ReturnedTicket, query=(REASON,)),
    Call("PUT", f"{_R}/producers/{{producer:path}}", handlers.put_producer, _PRODUCER,
         contract.HeartbeatRequest, contract.Heartbeat),
    Call("GET", f"{_R}/producers", handlers.get_producers, _ALL, result=contract.ProducerList),
    Call("POST", f"{_R}/groups", handlers.post_groups, _PRODUCER,
         contract.GroupsRequest, contract.AppendResults, ("200", "413", "422", "429")),
    Call("PUT", f"{_R}/groups/{{group_id:path}}/columns", column_calls.put_columns, _PRODUCER,
         contract.ColumnsRequest, contract.StoredColumns, ("200", "404", "409", "410")),
    Call("POST", f"{_R}/evaluations", handlers.post_evaluation, _PRODUCER,
         evaluations.EvaluationRequest, evaluations.Evaluation),
)
TRAINER_CALLS = (
    Call("POST", f"{_R}/attach", handlers.post_attach, _TRAINER,
         contract.AttachRequest, contract.Attachment, _CHANGED),
    Call("GET", f"{_R}/batches/{{step}}", handlers.get_batch, _TRAINER,
         None, Plan, ("200", "202", "304", "406", "409", "410"), (EPOCH, DP_RANK, WAIT_MS),
         (sending.MEDIA_TYPE, PLAN_TYPE), of_records=True),
    Call("POST", f"{_R}/batches/{{step}}/ack", handlers.post_ack, _TRAINER,
         contract.AckRequest, contract.AckedStep, _CHANGED),
    Call("POST", f"{_R}/policy", handlers.post_policy, _TRAINER, contract.PolicyRequest, contract.Policy, _CHANGED),
    Call("GET", f"{_R}/policy", handlers.get_policy, _ALL,
         result=contract.Policy, query=(NEWER_THAN, WAIT_MS, ADAPTER)),
    Call("POST", f"{_R}/checkpoints", handlers.post_checkpoint, _TRAINER,
         contract.CheckpointRequest, contract.Checkpoints, _CHANGED),
)
BROWSE_CALLS = (
    Call("GET", "/v1/overview", overview_calls.get_overview, _BOTH, result=overview.Overview, lists_runs=True),
    Call("GET", f"{_R}/flow", overview_calls.get_flow, _BOTH, result=overview.Flow),
    Call("GET", f"{_R}/history", overview_calls.get_history, _BOTH, result=overview.History,
         query=overview_calls.HISTORY_PARAMETERS),
    Call("GET", f"{_R}/report", overview_calls.get_report, _BOTH, media_types=("text/html",)),
    Call("GET", f"{_R}/groups", handlers.get_groups, _READER | _PRODUCER, result=browse.GroupPage,
         answers=("200", "422"), query=group_pages.PARAMETERS),
    Call("GET", f"{_R}/groups/{{group_id:path}}", handlers.get_group, _READER | _PRODUCER,
         None, browse.StoredGroup, ("200", "404", "410"), (PIECES,)),
    Call("GET", f"{_R}/samples", handlers.get_samples, _READER | _PRODUCER, result=samples.SampleList,
         query=handlers.SAMPLE_PARAMETERS),
    Call("GET", f"{_R}/cursors", cursor_calls.get_cursors, _READER, result=cursors.CursorList),
    Call("GET", f"{_R}/cursors/{{name}}", cursor_calls.get_cursor, _READER,
         None, cursors.CursorPage, _CHANGED, cursor_calls.PARAMETERS),
    Call("POST", f"{_R}/cursors/{{name}}", cursor_calls.post_cursor, _READER,
         cursors.CursorRequest, cursors.CursorState, ("200", "404")),
    Call("DELETE", f"{_R}/cursors/{{name}}", cursor_calls.delete_cursor, _READER, answers=("204",)),
    Call("GET", f"{_R}/batches/{{step}}/record", handlers.get_record, _BOTH,
         None, browse.StepRecord, ("200", "404", "410"), (GENERATION,)),
    Call("GET", f"{_R}/batches/{{step}}/explain", explain.get_explanation, _BOTH,
         None, BatchExplanation, ("200", "404", "410"), (GENERATION, explain.SHOWN)),
    Call("GET", f"{_R}/ledger", handlers.get_ledger, _BOTH, result=browse.LedgerPage, query=(AFTER, LIMIT)),
    Call("GET", f"{_R}/evaluations", handlers.get_evaluations, _ALL, result=evaluations.Evaluations, query=(LIMIT,)),
    Call("GET", f"{_R}/failed-prompts", handlers.get_failed_prompts, _ALL,
         result=browse.FailedPrompts, query=(LIMIT,)),
    Call("GET", f"{_R}/dead-letters", handlers.get_dead_letters, _READER,
         result=browse.DeadLetters, query=(LIMIT, AFTER)),
    Call("DELETE", f"{_R}/dead-letters", handlers.delete_dead_letters, _OPERATOR, result=browse.PurgedDeadLetters),
    Call("GET", "/metrics", handlers.get_metrics, _READER, query=None, media_types=("text/plain",)),
)
CALLS = (*RUN_CALLS, *PRODUCER_CALLS, *TRAINER_CALLS, *BROWSE_CALLS)

OPEN_CALLS = (
    Call("GET", "/healthz", handlers.get_healthz, _OPERATOR, result=contract.Health, query=None),
    Call("GET", "/readyz", handlers.get_readyz, _OPERATOR, None, contract.Readiness, ("200", "503"), None),
    Call("GET", "/openapi.json", handlers.get_openapi, _OPERATOR, query=None),
    Call("GET", "/", console_files.get_console, _OPERATOR, query=None, media_types=("text/html",)),
    Call("GET", "/console/{file:path}", console_files.get_console_file, _OPERATOR,
         None, None, ("200", "304", "404"), None, ("text/javascript", "text/css", "text/html")),
)
"""Calls that need no token."""
