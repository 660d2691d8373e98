"""Guarantees broken on purpose: how many schedules does the simulation need to find each?"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from unittest import mock

from starlette.requests import Request
from starlette.responses import Response

from replaybuf.client.http_reply import LateReply, NoReply, Reply
from replaybuf.client.transport import AsyncSocketTransport, Sending
from replaybuf.client.transport import _exchange_async as exchange_async
from replaybuf.errors import ReplaybufError
from replaybuf.kernel.state.pool import GroupPool
from replaybuf.kernel.state.tickets import TicketBook
from replaybuf.service.http import routes
from replaybuf.service.http.body.append_bodies import read_groups
from replaybuf.service.http.call import handlers
from replaybuf.service.http.call.calls import CALLS
from replaybuf.service.run.append.group_check import Incoming
from replaybuf.service.run.batches import Batches
from replaybuf.service.run.journal import Journal
from replaybuf.service.run.served_run import Run
from replaybuf.store import buckets
from replaybuf.store.buckets import BucketStore
from replaybuf.store.redis import cluster, inspection, sentinel
from replaybuf.store.redis.server import LIBRARY_CODE
from replaybuf.wire.answer.explain import Candidates
from replaybuf.wire.contract import AppendResult, AppendResults
from replaybuf.wire.ledger import AnyRecord
from tests.builders import arriving
from tests.simulation import copying, disturbing, faults, mix, servers
from tests.simulation.mix import CLUSTER, SENTINEL, SINGLE
from tests.simulation.plan import Plan
from tests.simulation.redis_model import replicated
from tests.simulation.schedule import Outcome, simulate

UNFENCED = """
local function unfenced(callback)
  return function(keys, args)
    args[1] = redis.call('GET', keys[1]) or ''
    return callback(keys, args)
  end
end
"""
"""Calls a function with the newest token, whatever token the caller has."""


def _library(before: str, after: str) -> AbstractContextManager[object]:
    if before not in LIBRARY_CODE:
        raise LookupError(f"library.lua lacks {before!r}, which is to be broken")
    return mock.patch.object(inspection, "LIBRARY_CODE", LIBRARY_CODE.replace(before, after))


def _without_deduplication() -> AbstractContextManager[object]:
    """Store a group again under an id that is stored."""
    return _library("local number = redis.call('HGET', ids, id)", "local number = false")


def _unfence(name: str) -> AbstractContextManager[object]:
    """Let a former leader call one function, `rb_{name}`."""
    registered = f"register('rb_{name}', led({name}))"
    return _library(registered, UNFENCED + f"register('rb_{name}', unfenced(led({name})))")


@contextlib.contextmanager
def _unfence_handover() -> Iterator[None]:
    """Let a former leader hand over a run, in a world where servers are stopped right before they do: rare else."""
    with (
        _unfence("hand_over"),
        mock.patch.dict(faults.KINDS, {SINGLE: ("handover",) * len(faults.SINGLE_KINDS)}),
        mock.patch.object(servers, "STOPPED_HANDOVERS", 1.0),
    ):
        yield


@contextlib.contextmanager
def _without_use_count() -> Iterator[None]:
    """Forget that a batch has used its groups."""
    count_use = GroupPool.use

    def use(pool: GroupPool, numbers, record):  # type: ignore[no-untyped-def]
        pool.index["times_sampled"][pool.index.rows_of(numbers)] -= 1
        return count_use(pool, numbers, record)

    with mock.patch.object(GroupPool, "use", use):
        yield


@contextlib.contextmanager
def _apply_before_write() -> Iterator[None]:
    """Apply a record before it is written."""

    async def append(journal: Journal, record: AnyRecord, candidates: Candidates | None = None) -> None:
        number = journal.state.entries + 1
        freed = journal.state.apply(number, record)
        entry = await journal.store.ledger.append(journal.name, journal.token, number, record, candidates)
        journal._entry_key = entry.key
        journal._record_ends()
        if len(freed):
            journal._to_free.append((number, freed))

    with mock.patch.object(Journal, "append", append):
        yield


@contextlib.contextmanager
def _many_rewinds() -> Iterator[None]:
    """Let each trainer rewind often, and followers hear of it late."""
    with mock.patch.object(mix, "REWOUND", 1.0), mock.patch.object(faults, "NEWS_MIXES", (1.0,)):
        yield


@contextlib.contextmanager
def _serve_before_rewind() -> Iterator[None]:
    """Let a follower serve a batch that a rewind behind the attach takes back, as until November 2026."""
    settled = mock.patch.object(Batches, "_is_settled", lambda batches, step: step in batches._state.batches)
    with _many_rewinds(), settled:
        yield


@contextlib.contextmanager
def _without_token() -> Iterator[None]:
    """Let a server that lost the lead while it decides write without a token, in a world of many lost leads.

    As until November 2026.
    """
    kinds = ("lease",) * (len(faults.SINGLE_KINDS) - 3) + ("handover", "stop", "pause")
    with (
        _library("return 'fenced', newest_fence(run.fence)", "return callback(keys, args, run)"),
        mock.patch.dict(faults.KINDS, {SINGLE: kinds}),
    ):
        yield


@contextlib.contextmanager
def _without_rules() -> Iterator[None]:
    """Store groups by the rules of before a rewind or a change of the run, in a world where groups are often late."""
    without = _library("tonumber(table.remove(args)) < newest_rules(run)", "not table.remove(args)")
    with _many_rewinds(), without, mock.patch.object(faults, "SEND_MIXES", (3.0,)):
        yield


def _without_ends() -> AbstractContextManager[object]:
    """Write to a Redis that holds less than the caller, or another server, knows to be stored."""
    own = "if holds_less(run, incarnation, own, entries, stored, entry_key)"
    return _library(
        own + "\n      or shown and holds_less(run, incarnation, shown, entries, stored, entry_key) then",
        "if false then",
    )


def _without_settling() -> AbstractContextManager[object]:
    """Let a server lead at once on a Redis that has just begun to answer."""
    return _library("return serving_since_ms + SETTLE_MS - now_ms()", "return 0")


@contextlib.contextmanager
def _without_lease_of_restore() -> Iterator[None]:
    """Let a restore that lost its lease write on, in a world where each schedule has some that stand still."""
    before = "if not held or redis.call('SISMEMBER', keys[2], args[3]) == 1 or string.find(mark, '^deleting') then"
    with (
        _library(before, "if string.find(mark, '^deleting') then"),
        mock.patch.object(mix, "COPIED", 1.0),
        mock.patch.object(copying, "DISTURBED", 0.8),
    ):
        yield


def _without_slots() -> AbstractContextManager[object]:
    """Let a batch of exact slots skip the slots that wait for a ticket."""
    return mock.patch.object(TicketBook, "first_awaited", lambda book, adapter, most: ())


@contextlib.contextmanager
def _in_buckets(broken: AbstractContextManager[object]) -> Iterator[None]:
    """Break a guarantee in a world where each schedule has a run that loses a payload."""
    with broken, mock.patch.object(mix, "LOST", 1.0):
        yield


def _without_bucket_check() -> AbstractContextManager[object]:
    """Write payloads to a bucket that has lost some."""
    return _in_buckets(_library("if written < tonumber(args[1]) then", "if false then"))


def _without_bucket_count() -> AbstractContextManager[object]:
    """Take a payload for freed that its bucket has lost: the count of the bucket is not read."""

    async def find_nothing(store: BucketStore, run: str, buckets: Iterable[int] = ()) -> None:
        return None

    return _in_buckets(mock.patch.object(BucketStore, "find_loss", find_nothing))


def _with_known_counts() -> AbstractContextManager[object]:
    """Compare a bucket with the counts that a server read when it met the run, as until November 2026."""
    read = BucketStore._read_published

    async def read_once(store: BucketStore, run: str) -> tuple[dict[int, int], int]:
        known = vars(store).setdefault("_read_once", {})
        if run not in known:
            known[run] = await read(store, run)
        return known[run][0], 0

    return _in_buckets(mock.patch.object(BucketStore, "_read_published", read_once))


def _without_second_check() -> AbstractContextManager[object]:
    """Publish what a suspended server wrote without reading again what is published."""
    return _in_buckets(mock.patch.object(buckets, "SUSPENDED_S", float("inf")))


@contextlib.contextmanager
def _with_old_attempts() -> Iterator[None]:
    """Publish groups of an attempt that began more than two rounds ago, in a world where servers often stop in one."""
    with (
        _library("if tonumber(args[1]) < newest - 1 then", "if false then"),
        mock.patch.object(servers, "STOPPED_APPENDS", 0.2),
        mock.patch.object(servers, "SHORTEST_STOP_S", 5.0),
    ):
        yield


@contextlib.contextmanager
def _without_notes() -> Iterator[None]:
    """Write payloads without a note of the append, in a world where servers are often killed while they stop in one."""
    kinds = ("kill",) * len(faults.KINDS[CLUSTER])
    with (
        _library("redis.call('ZADD', keys[1], args[2] +", "local _ = (args[2] +"),
        mock.patch.object(servers, "STOPPED_APPENDS", 0.2),
        mock.patch.dict(faults.KINDS, {CLUSTER: kinds}),
    ):
        yield


@contextlib.contextmanager
def _without_replicas_check(topology: ModuleType, redis: str) -> Iterator[None]:
    """Use a primary that restarted before its replicas follow it, in a world where nodes with two replicas often crash.

    As until November 2026.
    """
    with (
        mock.patch.object(topology, "find_split", lambda info, replicas, down_after_s: None),
        mock.patch.object(mix, "TWO_REPLICAS", 1.0),
        mock.patch.object(mix, "CONFIRMING", (1,)),
        mock.patch.object(replicated, "SLOW_LINKS", 0.5),
        mock.patch.object(replicated, "SLOWEST_LINK_S", 12.0),
        mock.patch.object(disturbing, "CRASHES_AGAIN", 1.0),
        mock.patch.dict(faults.KINDS, {redis: ("crash",) * len(faults.KINDS[redis])}),
    ):
        yield


@contextlib.contextmanager
def _with_late_replies() -> Iterator[None]:
    """Let clients send the next request on a connection whose reply is late, in a world of producers by HTTP."""

    async def send(transport: AsyncSocketTransport, request: Sending) -> Reply:
        connection = transport._reuse() or await transport._connect()
        try:
            received = await exchange_async(connection, transport._pieces(request), request.read_s)
        except TimeoutError as error:
            transport._idle.append((time.monotonic(), connection))
            raise LateReply(str(error)) from error
        except OSError as error:
            raise NoReply(str(error)) from error
        return transport._finish(connection, received, request)

    with mock.patch.object(AsyncSocketTransport, "send", send), mock.patch.object(mix, "BY_HTTP", 1.0):
        yield


@contextlib.contextmanager
def _with_early_answers() -> Iterator[None]:
    """Answer an append before its groups are stored, in a world of producers by HTTP."""

    async def store(run: Run, groups: list[Incoming]) -> None:
        with contextlib.suppress(ReplaybufError):
            await run.appends.append(arriving(groups))

    async def post_groups(request: Request) -> Response:
        run = await handlers.service_of(request).storing(request.path_params["run"])
        limit = run.journal.config.limits.max_group_bytes
        groups = [group async for group in read_groups(request, limit, request.app.state.decoders)]
        asyncio.create_task(store(run, groups))  # noqa: RUF006 - the loop of a schedule keeps all tasks
        results = [AppendResult(group_id=None, status="stored") for _ in groups]
        return handlers.json_response(AppendResults(results=results))

    calls = [
        dataclasses.replace(call, handler=post_groups) if call.handler is handlers.post_groups else call
        for call in CALLS
    ]
    with mock.patch.object(routes, "CALLS", calls), mock.patch.object(mix, "BY_HTTP", 1.0):
        yield


BROKEN: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "deduplication": _without_deduplication,
    "fencing": functools.partial(_unfence, "tickets"),
    "ledger-fencing": functools.partial(_unfence, "append"),
    "handover": _unfence_handover,
    "token": _without_token,
    "exact-slots": _without_slots,
    "rules": _without_rules,
    "restore": _without_lease_of_restore,
    "shorter-history": _without_ends,
    "settling": _without_settling,
    "use-count": _without_use_count,
    "journal-order": _apply_before_write,
    "rewind-order": _serve_before_rewind,
    "bucket": _without_bucket_check,
    "bucket-count": _without_bucket_count,
    "bucket-known": _with_known_counts,
    "bucket-suspended": _without_second_check,
    "old-attempt": _with_old_attempts,
    "attempt-note": _without_notes,
    "restarted-primary": functools.partial(_without_replicas_check, cluster, CLUSTER),
    "restarted-under-sentinel": functools.partial(_without_replicas_check, sentinel, SENTINEL),
    "late-reply": _with_late_replies,
    "early-answer": _with_early_answers,
}
"""By name: what breaks the guarantee during its body."""
ELSEWHERE = dict.fromkeys(
    [
        "bucket",
        "bucket-count",
        "bucket-known",
        "bucket-suspended",
        "old-attempt",
        "attempt-note",
        "restarted-primary",
    ],
    CLUSTER,
) | {"restarted-under-sentinel": SENTINEL}
"""The kind of Redis of those that are not looked for on one server."""


def redis_of(broken: str | None) -> str | None:
    """Return the kind of Redis on which a broken guarantee is looked for; None = drawn from each seed."""
    return None if broken is None else ELSEWHERE.get(broken, SINGLE)


def simulate_broken(plan: Plan, *, traced: bool = False) -> Outcome:
    """Run a schedule, with a broken guarantee if one is named."""
    with BROKEN[plan.broken]() if plan.broken else contextlib.nullcontext():
        return simulate(plan, traced=traced)
