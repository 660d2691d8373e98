"""Every call of the HTTP contract on one run, without any I/O.

A call is an exchange: a generator that yields `Request` and is sent the `httpx.Response` of each, and returns the
result. `replaybuf.client.client` carries the requests. Answers may hold more fields than are read here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Literal, TypeAlias, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from replaybuf.errors import InvalidGroups, Malformed, ReplaybufError, ServiceUnavailable, from_problem
from replaybuf.wire.config import Cost
from replaybuf.wire.frame import MEDIA_TYPE, encode_frame
from replaybuf.wire.group import Group, GroupLimits, check_group
from replaybuf.wire.plan import MEDIA_TYPE as PLAN_TYPE
from replaybuf.wire.plan import Plan

APPEND_BODY_BYTES = 32 << 20
"""An append is cut into bodies of about this size; one group is never cut."""

T = TypeVar("T")

_JSON = "application/json"
_BAD_GATEWAY = (502, 504)
_EXCERPT_CHARS = 200


class Amount(msgspec.Struct, frozen=True):
    """Groups and tokens."""

    groups: int = 0
    tokens: int = 0


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """Why there is no batch or no ticket: the reason, what is there, what is needed, who is waited for.

    `blocked_on` is `producers`, `trainer`, `operator` or `nothing`; ask again after `retry_after_s` seconds.
    `adapter`: the one that is nearest to a batch, where the run has any.
    """

    reason: str
    have: Amount = Amount()
    need: Amount = Amount()
    blocked_on: str = "nothing"
    retry_after_s: float = 0.5
    detail: str | None = None
    adapter: str = ""


class Attached(msgspec.Struct, frozen=True, kw_only=True):
    """What a trainer gets when it attaches: its `epoch` for every later call and the `step` to train next.

    `seq_len` and `pad_to_multiple_of` are tokens per micro-batch, `generation` counts rewinds of the run, `look_ahead`
    is how many steps beyond `step` may be fetched before it is acked.
    """

    epoch: int
    step: int
    generation: int = 0
    published_version: int = 0
    seq_len: int = 0
    dp_world_size: int = 1
    pad_to_multiple_of: int = 1
    look_ahead: int = 0


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The published version, where its weights lie, and the same per adapter."""

    version: int
    weights_uri: str | None = None
    adapters: dict[str, Any] = {}


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """Leave to generate the group of one prompt within `expires_in_s` seconds; `attempt` counts from 1."""

    ticket: str
    prompt_index: int
    attempt: int = 1
    expires_in_s: float = 600.0


class Tickets(msgspec.Struct, frozen=True, kw_only=True):
    """Tickets, or `waiting` where there are none; `published_version` is the version to generate with."""

    tickets: list[Ticket]
    published_version: int = 0
    waiting: Waiting | None = None


class AppendResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one group: `status` is `stored`, `duplicate` or `rejected`, the last with a `reason`."""

    group_id: str | None = None
    status: Literal["stored", "duplicate", "rejected"]
    reason: str | None = None
    detail: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One HTTP request below the address of a run.

    `accept`: media type asked for, where there are several; `wait_ms`: how long the service may hold it; `repeatable`:
    doing it twice does no harm; `answers`: statuses beside 2xx that are answers, not errors.
    """

    method: str
    path: str = ""
    params: dict[str, str | int] = dataclasses.field(default_factory=dict)
    content: bytes = b""
    media_type: str = _JSON
    accept: str | None = None
    wait_ms: int = 0
    repeatable: bool = True
    answers: frozenset[int] = frozenset()


Exchange: TypeAlias = Generator[Request, httpx.Response, T]
"""A call: yields requests, is sent the response of each, returns the result."""


class BatchFacts(msgspec.Struct, frozen=True):
    """Of a run's batches: room of one micro-batch and of a batch in tokens, and what happens to longer rollouts."""

    seq_len: int | None = None
    tokens_per_batch: int | None = None
    overlong: str = "reject"


class StrategyFacts(msgspec.Struct, frozen=True):
    """A run's strategy: its name, and its options with defaults filled in."""

    name: str = ""
    options: dict[str, Any] = {}


class RunFacts(msgspec.Struct, frozen=True):
    """The part of a run's configuration that a producer needs; fields of newer services are passed over."""

    batch: BatchFacts = BatchFacts()
    strategy: StrategyFacts = StrategyFacts()
    group_size: int | None = None
    vocab_size: int | None = None
    seed: int = 0
    advantage: str = "grpo"
    adapters: dict[str, Any] = {}


def facts_of(state: dict[str, Any]) -> RunFacts:
    """Read what `get_run` or `put_run` returned. Raises `Malformed` where the service speaks another contract."""
    return _convert(state.get("config", {}), RunFacts)


class _Results(msgspec.Struct, frozen=True):
    results: list[AppendResult]


class _Evaluations(msgspec.Struct, frozen=True):
    evaluations: list[dict[str, Any]]


# msgspec 0.22 looks a struct up at its first use, and crashes where two threads do so at once: here is its first use.
for _shape in (Waiting, Attached, Policy, Tickets, _Results, _Evaluations, RunFacts):
    msgspec.json.Decoder(_shape)


class RunCalls:
    """The calls of one run as exchanges. Keeps one thing: which groups the run takes, once an answer has told it."""

    def __init__(self) -> None:
        self._bounds: GroupLimits | None = None

    # ------------------------------------------------------------------ the run

    def get_run(self) -> Exchange[dict[str, Any]]:
        """Return the state of the run, its configuration under `config`."""
        return self._learn(answer_of((yield Request(method="GET")), dict[str, Any]))

    def put_run(self, config: dict[str, Any]) -> Exchange[dict[str, Any]]:
        """Create the run; the same configuration again changes nothing. Raises `Conflict`, `Invalid`."""
        return self._learn(answer_of((yield Request(method="PUT", content=_body(config))), dict[str, Any]))

    def patch_run(self, changes: dict[str, Any]) -> Exchange[dict[str, Any]]:
        """Change strategy, filters, limits or state while the run goes on. Raises `Conflict`, `Invalid`."""
        return self._learn(answer_of((yield Request(method="PATCH", content=_body(changes))), dict[str, Any]))

    # ------------------------------------------------------------------ trainer

    def attach(
        self,
        dp_world_size: int = 1,
        resume_step: int | None = None,
        on_resume: Literal["redeliver", "resample"] = "redeliver",
        seq_len: int | None = None,
        pad_to_multiple_of: int | None = None,
        cost: Cost | None = None,
    ) -> Exchange[Attached]:
        """Become the run's trainer at `resume_step` (steps done so far; None = where the run stands).

        Every older epoch is fenced. `seq_len` and `pad_to_multiple_of` in tokens; None takes the run's. `cost`
        of a rollout by its length, as `packing.cost.cost_of` counts it for a model, balances the ranks; None takes
        that of a typical model. Raises `Conflict` below the oldest checkpoint and above the step where the run stands.
        """
        body: dict[str, Any] = {"dp_world_size": dp_world_size, "on_resume": on_resume}
        optional = {
            "resume_step": resume_step,
            "seq_len": seq_len,
            "pad_to_multiple_of": pad_to_multiple_of,
            "cost": cost,
        }
        body |= {name: value for name, value in optional.items() if value is not None}
        # Not repeated blindly: a second attach fences the epoch that a first one, its answer delayed, may still bring.
        request = Request(method="POST", path="/attach", content=_body(body), repeatable=False)
        return answer_of((yield request), Attached)

    def fetch_batch(self, step: int, epoch: int, dp_rank: int = 0, wait_ms: int = 0) -> Exchange[bytes | Waiting]:
        """Return the body of one rank's part of a batch (see `replaybuf.wire.batch`), or why there is none yet.

        The service holds the call for up to `wait_ms`. Raises `Fenced`, `WrongStep`, `Gone`, `RunFinished`.
        """
        reply = yield _batch_request(step, epoch, dp_rank, wait_ms)
        return answer_of(reply, Waiting) if reply.status_code == httpx.codes.ACCEPTED else reply.content

    def fetch_plan(self, step: int, epoch: int, dp_rank: int = 0, wait_ms: int = 0) -> Exchange[Plan | Waiting]:
        """Return what to build that body from (see `replaybuf.wire.plan`), or why there is no batch yet.

        Raises as `fetch_batch` does, and `Malformed` where the service does not know plans.
        """
        reply = yield _batch_request(step, epoch, dp_rank, wait_ms, accept=PLAN_TYPE)
        return answer_of(reply, Waiting) if reply.status_code == httpx.codes.ACCEPTED else answer_of(reply, Plan)

    def ack(self, step: int, epoch: int, feedback: dict[str, Any] | None = None) -> Exchange[None]:
        """Say that `step` is trained; again is fine. Raises `Fenced`, `WrongStep`."""
        body = {"epoch": epoch} | ({"feedback": feedback} if feedback is not None else {})
        yield Request(method="POST", path=f"/batches/{step}/ack", content=_body(body))

    def publish_policy(
        self, version: int, epoch: int, weights_uri: str | None = None, adapter: str = ""
    ) -> Exchange[None]:
        """Announce `version` as loaded by the engines; the same again is fine. Raises `Fenced`, `Conflict`."""
        body = {"epoch": epoch, "version": version, "weights_uri": weights_uri, "adapter": adapter}
        yield Request(method="POST", path="/policy", content=_body(body))

    def checkpoint(self, step: int, epoch: int, keep: int | None = None) -> Exchange[None]:
        """Say that training can resume with `step` steps done; the newest `keep` checkpoints stay resumable."""
        body = {"epoch": epoch, "step": step} | ({"keep": keep} if keep is not None else {})
        yield Request(method="POST", path="/checkpoints", content=_body(body))

    # ------------------------------------------------------------------ producer

    def get_policy(self, after: int | None = None, wait_ms: int = 0, adapter: str = "") -> Exchange[Policy]:
        """Return the published version, of an adapter; with `after`, wait up to `wait_ms` for a newer one than that."""
        params: dict[str, str | int] = {"wait_ms": wait_ms}
        if after is not None:
            params["after"] = after
        if adapter:
            params["adapter"] = adapter
        return answer_of((yield Request(method="GET", path="/policy", params=params, wait_ms=wait_ms)), Policy)

    def take_tickets(self, producer: str, count: int, adapter: str = "", wait_ms: int = 0) -> Exchange[Tickets]:
        """Take leave to generate up to `count` groups, waiting up to `wait_ms` for the first. Never repeated."""
        body = {"producer": producer, "count": count, "adapter": adapter, "wait_ms": wait_ms}
        request = Request(method="POST", path="/tickets", content=_body(body), wait_ms=wait_ms, repeatable=False)
        return answer_of((yield request), Tickets)

    def return_ticket(self, ticket: str, reason: str) -> Exchange[None]:
        """Give a ticket back, saying why. Raises `NotFound` where it is not out any more. Never repeated."""
        yield Request(
            method="DELETE", path=f"/tickets/{quote(ticket, safe='')}", params={"reason": reason}, repeatable=False
        )

    def append(self, groups: Sequence[Group], *, compress: bool = False) -> Exchange[list[AppendResult]]:
        """Store groups; one result per group, in order. A group that was stored before is answered `duplicate`.

        Each is checked here before it is sent, against the run's bounds once `get_run` or `put_run` has told them.
        `compress`: token ids and mask by zstd, on the wire and in Redis; see `docs/frames.md` for gain and cost.
        Raises `NoRoom`, `TooLarge`, `RunFinished`; some groups may be stored by then, sending all again is fine.
        `TypeError` for what is no `Group`.
        """
        results = [self._refuse(group) for group in groups]
        sound = [number for number, result in enumerate(results) if result is None]
        for part in _parts(groups, sound, compress):
            body = b"".join(part.values())
            # 422 = every group refused: an answer like any other.
            answers = frozenset({InvalidGroups.status})
            reply = yield Request(method="POST", path="/groups", content=body, media_type=MEDIA_TYPE, answers=answers)
            for number, result in zip(part, _append_results(reply, len(part)), strict=True):
                results[number] = result
        return [result for result in results if result is not None]

    def record_evaluation(self, result: dict[str, Any]) -> Exchange[dict[str, Any]]:
        """Keep what an evaluation came to; again is fine. Fields as in docs/http.md. Raises `Invalid`."""
        return answer_of((yield Request(method="POST", path="/evaluations", content=_body(result))), dict[str, Any])

    # ------------------------------------------------------------------ reading

    def list_evaluations(self, limit: int = 100) -> Exchange[list[dict[str, Any]]]:
        """Return the newest results of evaluations, oldest first."""
        reply = yield Request(method="GET", path="/evaluations", params={"limit": limit})
        return answer_of(reply, _Evaluations).evaluations

    def get_record(self, step: int, generation: int | None = None) -> Exchange[dict[str, Any]]:
        """Return the record of a batch, of the current history or as `generation` saw it. Raises `NotFound`."""
        params: dict[str, str | int] = {} if generation is None else {"generation": generation}
        return answer_of((yield Request(method="GET", path=f"/batches/{step}/record", params=params)), dict[str, Any])

    def get_ledger(self, after: int = 0, limit: int = 1000) -> Exchange[dict[str, Any]]:
        """Return up to `limit` ledger entries after entry `after`."""
        params: dict[str, str | int] = {"after": after, "limit": limit}
        return answer_of((yield Request(method="GET", path="/ledger", params=params)), dict[str, Any])

    def get_group(self, group_id: str) -> Exchange[dict[str, Any]]:
        """Return where a group stands and what it holds. Raises `NotFound`."""
        return answer_of((yield Request(method="GET", path=f"/groups/{quote(group_id, safe='')}")), dict[str, Any])

    def list_groups(
        self, state: str | None = None, limit: int = 100, after: str | int | None = None
    ) -> Exchange[dict[str, Any]]:
        """List up to `limit` groups, of one state or of all, after the mark that an earlier answer gave."""
        given = {"state": state, "limit": limit, "after": after}
        params = {name: value for name, value in given.items() if value is not None}
        return answer_of((yield Request(method="GET", path="/groups", params=params)), dict[str, Any])

    # ------------------------------------------------------------------

    def _learn(self, document: dict[str, Any]) -> dict[str, Any]:
        if "config" in document:
            self._bounds = _bounds(facts_of(document))
        return document

    def _refuse(self, group: Group) -> AppendResult | None:
        if not isinstance(group, Group):
            needed = "group_from_json(msgspec.convert(it, GroupJson)), both of replaybuf.wire.group"
            raise TypeError(f"group is a {type(group).__name__}; needed: {needed}")
        # The published version is left to the service: what is known of it here may be old by now.
        bounds = self._bounds or GroupLimits(adapters=frozenset({group.adapter}))
        rejection = check_group(group, bounds)
        if rejection is None:
            return None
        return AppendResult(
            group_id=group.group_id, status="rejected", reason=rejection.reason, detail=rejection.detail
        )


def _batch_request(step: int, epoch: int, dp_rank: int, wait_ms: int, accept: str | None = None) -> Request:
    params: dict[str, str | int] = {"epoch": epoch, "dp_rank": dp_rank, "wait_ms": wait_ms}
    return Request(method="GET", path=f"/batches/{step}", params=params, accept=accept, wait_ms=wait_ms)


def _bounds(facts: RunFacts) -> GroupLimits:
    truncates = facts.batch.overlong == "truncate"
    return GroupLimits(
        adapters=frozenset(facts.adapters),
        group_size=facts.group_size,
        vocab_size=facts.vocab_size,
        seq_len=None if truncates else facts.batch.seq_len,
        tokens_per_batch=None if truncates else facts.batch.tokens_per_batch,
    )


def _body(value: dict[str, Any]) -> bytes:
    return msgspec.json.encode(value)


def answer_of(reply: httpx.Response, shape: type[T]) -> T:
    """Read the JSON of a reply. Raises `Malformed` where it is not of that shape."""
    try:
        return msgspec.json.decode(reply.content, type=shape)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Malformed(
            f"{reply.request.method} {reply.request.url} was answered with something else than the contract says: "
            f"{error}; it starts with {_excerpt(reply)!r}",
            name="answer",
        ) from error


def _convert(value: Any, shape: type[T]) -> T:
    try:
        return msgspec.convert(value, shape)
    except msgspec.ValidationError as error:
        raise Malformed(f"the service's answer does not fit the contract: {error}", name="answer") from error


def error_of(reply: httpx.Response) -> ReplaybufError:
    """Rebuild the error of a reply; one that is no problem document (a proxy's page) is told by status and excerpt."""
    try:
        document = msgspec.json.decode(reply.content, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        where = f"{reply.request.method} {reply.request.url}"
        document = {"detail": f"{where} was answered with status {reply.status_code}: {_excerpt(reply)!r}"}
    status = ServiceUnavailable.status if reply.status_code in _BAD_GATEWAY else reply.status_code
    return from_problem(status, document, _retry_after_s(reply))


def _retry_after_s(reply: httpx.Response) -> float | None:
    try:
        return max(0.0, float(reply.headers["retry-after"]))
    except (KeyError, ValueError):  # absent, or a date: the pauses of `Backoff` alone then
        return None


def _excerpt(reply: httpx.Response) -> str:
    return reply.content[:_EXCERPT_CHARS].decode("utf-8", "replace")


def _parts(groups: Sequence[Group], numbers: list[int], compress: bool) -> Iterator[dict[int, bytes]]:
    """Cut the groups with these numbers into bodies: frames by number, about `APPEND_BODY_BYTES` together."""
    part: dict[int, bytes] = {}
    size_bytes = 0
    for number in numbers:
        frame = encode_frame(groups[number], compress=compress)
        if part and size_bytes + len(frame) > APPEND_BODY_BYTES:
            yield part
            part, size_bytes = {}, 0
        part[number] = frame
        size_bytes += len(frame)
    if part:
        yield part


def _append_results(reply: httpx.Response, sent: int) -> list[AppendResult]:
    if reply.status_code == InvalidGroups.status:
        error = error_of(reply)
        if not isinstance(error, InvalidGroups):
            raise error
        results = _convert(error.results, list[AppendResult])
    else:
        results = answer_of(reply, _Results).results
    if len(results) != sent:
        raise Malformed(f"append of {sent} groups was answered with {len(results)} results", name="results", value=sent)
    return results
