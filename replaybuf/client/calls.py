"""Every call of the HTTP API on one run, without I/O.

A call is an exchange (`http_request`). The clients of `replaybuf.client.http_client` send its requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Literal, Unpack

from replaybuf.client.append_bodies import read_results, reject, split_frames
from replaybuf.client.http_reply import Reply
from replaybuf.client.http_request import Exchange as Exchange
from replaybuf.client.http_request import HttpRequest as HttpRequest
from replaybuf.client.http_request import encode_body, fields, finite_metrics, segment
from replaybuf.client.replies import answer_of, error_of
from replaybuf.errors import Gone, InvalidGroups
from replaybuf.missing_run import in_words_of
from replaybuf.wire.answer.browse import DeadLetters, GroupPage, LedgerPage, PurgedDeadLetters, StepRecord, StoredGroup
from replaybuf.wire.answer.cursors import CursorList, CursorPage, CursorState
from replaybuf.wire.answer.evaluations import Evaluation, EvaluationRequest, Evaluations
from replaybuf.wire.answer.explain import BatchExplanation
from replaybuf.wire.answer.overview import History
from replaybuf.wire.answer.run_status import AcceptedLoss, RunList, RunStatus
from replaybuf.wire.answer.samples import SampleList
from replaybuf.wire.config import Cost, RunConfig
from replaybuf.wire.config_patch import ConfigPatch
from replaybuf.wire.contract import (
    AppendResult,
    Attachment,
    BodyOptions,
    Heartbeat,
    Policy,
    ProducerFailure,
    ProducerList,
    ProducerStatus,
    StoredColumns,
    Tickets,
    WaitingAnswer,
)
from replaybuf.wire.frame import MEDIA_TYPE
from replaybuf.wire.group import Group
from replaybuf.wire.group_check import GroupLimits
from replaybuf.wire.late_columns import encode_columns, late_columns
from replaybuf.wire.plan import MEDIA_TYPE as PLAN_TYPE
from replaybuf.wire.plan import Plan

_ABSENT = frozenset({HTTPStatus.NOT_FOUND})
_LOG_EVERY_S = 30.0

logger = logging.getLogger(__name__)


class RunCalls:
    """The calls of one run, as exchanges. Remembers the run's bounds of a group after `get_run` or `put_run`."""

    def __init__(self) -> None:
        self._bounds: GroupLimits | None = None

    # ------------------------------------------------------------------ the run

    def get_run(self) -> Exchange[RunStatus]:
        """Return the status of the run."""
        return self._remember((yield HttpRequest()))

    def list_runs(self) -> Exchange[list[RunStatus]]:
        """Return the status of every run of the service that this token may see, by name."""
        return answer_of((yield HttpRequest(every_run=True)), RunList).runs

    def wait_for_run(self, timeout_s: float = 600.0, poll_s: float = 1.0) -> Exchange[RunStatus]:
        """Wait until somebody has created the run, for at most `timeout_s`; return its status.

        For a producer that may start first. What it waits for is logged every 30 s. Raises `NotFound` after that time.
        """
        began_s = logged_s = time.monotonic()
        pause_s = 0.0
        while True:
            reply = yield HttpRequest(answers=_ABSENT, pause_s=pause_s)
            if reply.status_code not in _ABSENT:
                return self._remember(reply)
            error, waited_s = error_of(reply), time.monotonic() - began_s
            if waited_s >= timeout_s:
                raise in_words_of(error, f"waited {waited_s:.0f} s for it. Create it with Client.put_run")
            if pause_s == 0.0 or time.monotonic() - logged_s >= _LOG_EVERY_S:
                logged_s = time.monotonic()
                logger.info("waiting for a run: %s", in_words_of(error, "Client.put_run creates it").detail)
            pause_s = min(poll_s, max(0.0, timeout_s - waited_s))

    def put_run(self, config: RunConfig | dict[str, Any], if_absent: bool = False) -> Exchange[RunStatus]:
        """Create the run. The same configuration again changes nothing.

        `if_absent`: a run that exists keeps its configuration, whatever `config` says. Raises `Conflict`, `Invalid`.
        """
        params: dict[str, str | int] = {"if_absent": "true"} if if_absent else {}
        return self._remember((yield HttpRequest(method="PUT", params=params, content=encode_body(config))))

    def patch_run(self, changes: ConfigPatch | dict[str, Any], if_revision: int | None = None) -> Exchange[RunStatus]:
        """Change strategy, filters, limits or state of a live run. Raises `Conflict`, `Invalid`.

        `if_revision`: that of the status which the caller has read; if the run changed since, nothing happens.
        """
        params: dict[str, str | int] = {} if if_revision is None else {"if_revision": if_revision}
        return self._remember((yield HttpRequest(method="PATCH", content=encode_body(changes), params=params)))

    def accept_loss(self, entries: int, groups: int) -> Exchange[AcceptedLoss]:
        """Let the run go on without what Redis lost, as `DataLost` has it; operator. Every trainer is fenced."""
        body = encode_body({"entries": entries, "groups": groups})
        return answer_of((yield HttpRequest(method="POST", path="/accept-loss", content=body)), AcceptedLoss)

    def delete_run(self) -> Exchange[None]:
        """Delete a finished run: its groups, its ledger, its results. A repetition does no harm. Raises `Conflict`."""
        yield HttpRequest(method="DELETE", answers=frozenset({Gone.status}))

    # ------------------------------------------------------------------ trainer

    def attach(
        self,
        dp_world_size: int = 1,
        resume_step: int | None = None,
        on_resume: Literal["redeliver", "resample"] = "redeliver",
        seq_len: int | None = None,
        pad_to_multiple_of: int | None = None,
        cost: Cost | None = None,
        fixed: bool = False,
        **options: Unpack[BodyOptions],
    ) -> Exchange[Attachment]:
        """Become the run's trainer at `resume_step`, the number of steps done (None = the next unacked step).

        Every older epoch is fenced. `seq_len` and `pad_to_multiple_of` in tokens; None = the run's. `cost`: cost of a
        rollout by its length, from `client.cost.cost_of`, to balance the ranks; None = a typical model's. `fixed`: this
        trainer needs equal batches, so nobody may change `batch` meanwhile. `options` add to the bodies. Raises
        `WrongStep` for a step below the oldest checkpoint or above the next unacked step.
        """
        body: dict[str, Any] = {"dp_world_size": dp_world_size, "on_resume": on_resume, **options}
        body |= fields(resume_step=resume_step, seq_len=seq_len, pad_to_multiple_of=pad_to_multiple_of, cost=cost)
        body |= {"fixed": True} if fixed else {}  # older services do not know the field
        # Not repeatable: the first answer may be late, and a second attach fences its epoch.
        reply = yield HttpRequest(method="POST", path="/attach", content=encode_body(body), repeatable=False)
        return answer_of(reply, Attachment)

    def fetch_batch(self, step: int, epoch: int, dp_rank: int = 0, wait_ms: int = 0) -> Exchange[bytes | WaitingAnswer]:
        """Return the batch body of one rank (see `replaybuf.wire.batch`), or why there is none yet.

        The service holds the call for at most `wait_ms`. Raises `Fenced`, `WrongStep`, `Gone`, `RunFinished`.
        """
        reply = yield _batch_request(step, epoch, dp_rank, wait_ms)
        return answer_of(reply, WaitingAnswer) if reply.status_code == HTTPStatus.ACCEPTED else reply.content

    def fetch_plan(self, step: int, epoch: int, dp_rank: int = 0, wait_ms: int = 0) -> Exchange[Plan | WaitingAnswer]:
        """Return the plan of that body (see `replaybuf.wire.plan`), or why there is no batch yet.

        Raises as `fetch_batch` does, and `Malformed` if the service has no plans.
        """
        reply = yield _batch_request(step, epoch, dp_rank, wait_ms, accept=PLAN_TYPE)
        return answer_of(reply, WaitingAnswer) if reply.status_code == HTTPStatus.ACCEPTED else answer_of(reply, Plan)

    def ack(
        self,
        step: int,
        epoch: int,
        feedback: dict[str, Any] | None = None,
        metrics: Mapping[str, float | None] | None = None,
    ) -> Exchange[None]:
        """Report that `step` is trained. A repetition does no harm. Raises `Fenced`, `WrongStep`.

        `metrics`: at most 64 numbers of this step that people want to see, by name; NaN and infinity count as missing.
        """
        body = {"epoch": epoch} | fields(feedback=feedback, metrics=metrics and finite_metrics(metrics))
        yield HttpRequest(method="POST", path=f"/batches/{step}/ack", content=encode_body(body))

    def publish_policy(
        self, version: int, epoch: int, weights_uri: str | None = None, adapter: str = ""
    ) -> Exchange[None]:
        """Announce that the engines loaded `version`. A repetition does no harm. Raises `Fenced`, `Conflict`."""
        body = {"epoch": epoch, "version": version, "weights_uri": weights_uri, "adapter": adapter}
        yield HttpRequest(method="POST", path="/policy", content=encode_body(body))

    def checkpoint(self, step: int, epoch: int, keep: int | None = None) -> Exchange[None]:
        """Record that training can resume after `step` steps. The newest `keep` checkpoints stay resumable."""
        body = {"epoch": epoch, "step": step} | fields(keep=keep)
        yield HttpRequest(method="POST", path="/checkpoints", content=encode_body(body))

    # ------------------------------------------------------------------ producer

    def get_policy(self, after: int | None = None, wait_ms: int = 0, adapter: str = "") -> Exchange[Policy]:
        """Return the published version of an adapter. With `after`, wait up to `wait_ms` for a newer version."""
        params = {"wait_ms": wait_ms} | fields(after=after, adapter=adapter or None)
        return answer_of((yield HttpRequest(path="/policy", params=params, wait_ms=wait_ms)), Policy)

    def take_tickets(
        self, producer: str, count: int, adapter: str = "", wait_ms: int = 0, max_tokens: int | None = None
    ) -> Exchange[Tickets]:
        """Take tickets for up to `count` groups; wait up to `wait_ms` for the first one. Never repeated.

        `max_tokens`: most tokens that you sample per rollout. The service expects groups of that size until it has one.
        """
        body = {"producer": producer, "count": count, "adapter": adapter, "wait_ms": wait_ms}
        body |= fields(max_tokens=max_tokens)
        request = HttpRequest(
            method="POST", path="/tickets", content=encode_body(body), wait_ms=wait_ms, repeatable=False
        )
        return answer_of((yield request), Tickets)

    def send_heartbeat(
        self,
        producer: str,
        in_flight: int | None = None,
        slots: int | None = None,
        engines: int | None = None,
        held_back_by: str | None = None,
        failure: ProducerFailure | None = None,
    ) -> Exchange[Heartbeat]:
        """Report that a producer is at work. After `heartbeat_s` of silence it loses its tickets. Never repeated.

        `failure`: the newest since the last heartbeat, by `replaybuf.client.producers.describe_failure`.
        """
        body = fields(in_flight=in_flight, slots=slots, engines=engines, held_back_by=held_back_by, failure=failure)
        path = f"/producers/{segment(producer)}"
        request = HttpRequest(method="PUT", path=path, content=encode_body(body), repeatable=False)
        return answer_of((yield request), Heartbeat)

    def list_producers(self) -> Exchange[list[ProducerStatus]]:
        """Return the producers that called within the last hour, by name."""
        return answer_of((yield HttpRequest(path="/producers")), ProducerList).producers

    def return_ticket(self, ticket: str, reason: str) -> Exchange[None]:
        """Return a ticket with the reason. Raises `NotFound` if it is no longer out. Never repeated."""
        path = f"/tickets/{segment(ticket)}"
        yield HttpRequest(method="DELETE", path=path, params={"reason": reason}, repeatable=False)

    def append(self, groups: Sequence[Group], *, compress: bool = False) -> Exchange[list[AppendResult]]:
        """Store groups; return one result per group, in order. A group that was stored before is a `duplicate`.

        Each group is checked here first, against the run's bounds after `get_run` or `put_run`. `compress`: token ids
        and mask by zstd, on the wire and in Redis (`docs/frames.md`). Raises `NoRoom`, `TooLarge`, `RunFinished`: some
        groups may be stored then, and all can be sent again. Raises `TypeError` for anything but a `Group`.
        """
        results = [reject(group, self._bounds) for group in groups]
        valid = [position for position, result in enumerate(results) if result is None]
        for frames in split_frames(groups, valid, compress):
            body = b"".join(frames.values())
            # 422 means that every group was rejected. The answer has a result for each one.
            answers = frozenset({InvalidGroups.status})
            reply = yield HttpRequest(
                method="POST", path="/groups", content=body, media_type=MEDIA_TYPE, answers=answers
            )
            for position, result in zip(frames, read_results(reply, len(frames)), strict=True):
                results[position] = result
        return [result for result in results if result is not None]

    def record_evaluation(self, result: EvaluationRequest) -> Exchange[Evaluation]:
        """Record the result of an evaluation. A repetition does no harm. Raises `Invalid`."""
        reply = yield HttpRequest(method="POST", path="/evaluations", content=encode_body(result))
        return answer_of(reply, Evaluation)

    def add_columns(self, group_id: str, columns: Mapping[str, Sequence[Any]]) -> Exchange[int]:
        """Add columns to a stored group before a batch draws it; return how many it did not have.

        `ref_logprobs`, `old_logprobs`, `teacher_logprobs`, `token_advantages`: one list or array per rollout;
        `rewards`, `advantages` and reward parts `rewards.<name>`: one number per rollout. A repetition does no harm.
        Raises `Invalid`, `NotFound`, `Gone`, and `Conflict` for other values than before or a group that was drawn.
        """
        path, content = f"/groups/{segment(group_id)}/columns", encode_columns(late_columns(group_id, columns))
        reply = yield HttpRequest(method="PUT", path=path, content=content, media_type=MEDIA_TYPE)
        return answer_of(reply, StoredColumns).added

    # ------------------------------------------------------------------ reading

    def list_evaluations(self, limit: int = 100) -> Exchange[list[Evaluation]]:
        """Return the newest results of evaluations, oldest first."""
        return answer_of((yield HttpRequest(path="/evaluations", params={"limit": limit})), Evaluations).evaluations

    def get_history(self, points: int = 500) -> Exchange[History]:
        """Return figures of the run over its steps, in at most so many rows."""
        return answer_of((yield HttpRequest(path="/history", params={"points": points})), History)

    def get_record(self, step: int, generation: int | None = None) -> Exchange[StepRecord]:
        """Return the record of a batch, in the current history or in that of `generation`. Raises `NotFound`."""
        params = fields(generation=generation)
        return answer_of((yield HttpRequest(path=f"/batches/{step}/record", params=params)), StepRecord)

    def explain_batch(
        self, step: int, generation: int | None = None, limit: int | None = None
    ) -> Exchange[BatchExplanation]:
        """Return why a batch has its groups, the first `limit` of them in order, or why the next one is not there."""
        params = fields(generation=generation, limit=limit)
        return answer_of((yield HttpRequest(path=f"/batches/{step}/explain", params=params)), BatchExplanation)

    def get_ledger(self, after: int = 0, limit: int = 1000) -> Exchange[LedgerPage]:
        """Return up to `limit` ledger records after entry `after`."""
        return answer_of((yield HttpRequest(path="/ledger", params={"after": after, "limit": limit})), LedgerPage)

    def get_group(self, group_id: str) -> Exchange[StoredGroup]:
        """Return the state and content of a group. Raises `NotFound`, `Gone`."""
        return answer_of((yield HttpRequest(path=f"/groups/{segment(group_id)}")), StoredGroup)

    def list_groups(
        self,
        state: str | None = None,
        limit: int = 100,
        after: int | None = None,
        *,
        step: int | None = None,
        min_reward: float | None = None,
        max_reward: float | None = None,
        min_staleness: int | None = None,
        max_staleness: int | None = None,
        version: int | None = None,
        prompt_id: str | None = None,
        id_prefix: str | None = None,
        source: str | None = None,
        adapter: str | None = None,
        contains: str | None = None,
        lacks: str | None = None,
        order: Literal["arrival", "reward", "staleness"] = "arrival",
        desc: bool = False,
    ) -> Exchange[GroupPage]:
        """List up to `limit` groups that meet all conditions, after the `next` of an earlier page; None = any.

        A page may be short and have a `next`. `step`: whose batch used the group; staleness: at the next step to
        assemble; `source`: in the metadata, "" = none; `contains`: letters of a prompt or completion, in any case, in
        groups that are not freed; `lacks`: a column that may still be added. Only groups that are not freed are sorted
        by reward or staleness. Raises `Invalid`.
        """
        params: dict[str, str | int] = {"limit": limit, "order": order} | ({"desc": "true"} if desc else {})
        params |= fields(state=state, step=step, version=version, prompt_id=prompt_id, source=source, adapter=adapter)
        params |= fields(min_reward=min_reward, max_reward=max_reward, after=after)
        params |= fields(min_staleness=min_staleness, max_staleness=max_staleness, lacks=lacks, id_prefix=id_prefix)
        params |= fields(contains=contains)
        return answer_of((yield HttpRequest(path="/groups", params=params)), GroupPage)

    def list_samples(
        self, step: int | None = None, before: int | None = None, contains: str | None = None, limit: int = 25
    ) -> Exchange[SampleList]:
        """Return rollouts of up to `limit` trained steps that stay readable, newest first; None = any.

        `before`: the `next` of an earlier page; `contains`: letters of the prompt or the completion, in any case.
        """
        params = {"limit": limit} | fields(step=step, before=before, contains=contains)
        return answer_of((yield HttpRequest(path="/samples", params=params)), SampleList)

    def list_dead_letters(self, limit: int = 100, after: int = 0) -> Exchange[DeadLetters]:
        """List up to `limit` stored groups that turned out unusable, after the `next` of an earlier page."""
        request = HttpRequest(path="/dead-letters", params={"limit": limit, "after": after})
        return answer_of((yield request), DeadLetters)

    def purge_dead_letters(self) -> Exchange[int]:
        """Delete the bytes of dead letters that no resume needs; return how many. Needs the role operator."""
        request = HttpRequest(method="DELETE", path="/dead-letters")
        return answer_of((yield request), PurgedDeadLetters).purged

    # ------------------------------------------------------------------ cursors

    def read_cursor(
        self,
        name: str,
        kind: Literal["stored", "trained"] | None = None,
        limit: int = 100,
        wait_ms: int = 0,
        lifetime_s: int | None = None,
    ) -> Exchange[CursorPage]:
        """Return up to `limit` groups behind a cursor with their rollouts; wait up to `wait_ms` for the first one.

        The first call creates it over `stored` (default) or `trained` groups; the service forgets it after
        `lifetime_s` without a call, None = never. The same page comes again until `advance_cursor`. Raises `Conflict`
        for another kind and for too many cursors, `NoRoom` if one of these may give way soon.
        """
        params = {"limit": limit, "wait_ms": wait_ms} | fields(kind=kind, lifetime_s=lifetime_s)
        request = HttpRequest(path=f"/cursors/{segment(name)}", params=params, wait_ms=wait_ms)
        return answer_of((yield request), CursorPage)

    def advance_cursor(self, name: str, position: str) -> Exchange[CursorState]:
        """Report that all groups up to the `position` of a page are done. A repetition does no harm."""
        body = encode_body({"position": position})
        reply = yield HttpRequest(method="POST", path=f"/cursors/{segment(name)}", content=body)
        return answer_of(reply, CursorState)

    def delete_cursor(self, name: str) -> Exchange[None]:
        """Forget a cursor. A repetition does no harm."""
        yield HttpRequest(method="DELETE", path=f"/cursors/{segment(name)}")

    def list_cursors(self) -> Exchange[list[CursorState]]:
        """Return the cursors of the run with their lag."""
        return answer_of((yield HttpRequest(path="/cursors")), CursorList).cursors

    # ------------------------------------------------------------------

    def _remember(self, reply: Reply) -> RunStatus:
        status = answer_of(reply, RunStatus)
        self._bounds = status.facts().group_limits()
        return status


def _batch_request(step: int, epoch: int, dp_rank: int, wait_ms: int, accept: str | None = None) -> HttpRequest:
    params: dict[str, str | int] = {"epoch": epoch, "dp_rank": dp_rank, "wait_ms": wait_ms}
    return HttpRequest(path=f"/batches/{step}", params=params, accept=accept, wait_ms=wait_ms)
