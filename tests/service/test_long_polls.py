"""Requests that wait: one decision per change for all of them, in the order of their arrival."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import socket
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest

from replaybuf.errors import Fenced
from replaybuf.service.bodies.writer import Part
from replaybuf.service.clock import Clock
from replaybuf.service.run import long_polls
from replaybuf.service.run import tickets as service_tickets
from replaybuf.service.run.journal import Journal
from replaybuf.service.run.long_polls import ANSWERED_AT_ONCE, Gone, LongPolls, Round, Waiter
from replaybuf.service.run.served_run import Run
from replaybuf.store import EmbeddedServer, Store
from replaybuf.wire.config import AdapterSpec, BatchSpec, TicketSpec
from replaybuf.wire.config_patch import ConfigPatch, StrategyChange
from replaybuf.wire.contract import AttachRequest, Tickets, WaitingAnswer
from tests.conftest import RunClient, group
from tests.led_run import append, on_a_run
from tests.waiting import eventually, until

RANKS = 512
PRODUCERS = 100
WAIT_S = 60.0


def count_calls(monkeypatch: pytest.MonkeyPatch, of: object, name: str) -> Counter[str]:
    """Count the calls of a method or of a module's function from now on."""
    calls: Counter[str] = Counter()
    method = getattr(of, name)

    def counted(*arguments: Any, **options: Any) -> Any:
        calls[name] += 1
        return method(*arguments, **options)

    monkeypatch.setattr(of, name, counted)
    return calls


async def all_wait(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Let the tasks run until none of them can go on."""
    for _ in range(200):
        await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)


async def ask_for_batches(run: Run, step: int, epoch: int, ranks: int) -> list[asyncio.Task[Part | WaitingAnswer]]:
    """Let each rank wait for the batch."""
    tasks = [asyncio.create_task(run.batches.part(step, epoch, rank, WAIT_S)) for rank in range(ranks)]
    await all_wait(tasks)
    return tasks


async def ask_for_tickets(run: Run, producers: int, adapter: str = "") -> list[asyncio.Task[Tickets]]:
    """Let each producer wait for one ticket."""
    tasks = [asyncio.create_task(run.tickets.issue(f"p{n}", 1, adapter, WAIT_S)) for n in range(producers)]
    await all_wait(tasks)
    return tasks


def served(tasks: Iterable[asyncio.Task[Tickets]]) -> list[int]:
    """List the positions of the producers that have a ticket."""
    return [position for position, task in enumerate(tasks) if task.done() and task.result().tickets]


# ---------------------------------------------------------------------- batches


def test_a_change_asks_the_strategy_once_however_many_ranks_wait(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An append beside 512 ranks took 25 times as long as alone, and held up the other runs."""
    appends = 20

    async def work(store: Store, run: Run) -> None:
        epoch = (await run.trainer_calls.attach(AttachRequest(dp_world_size=RANKS))).epoch
        calls = count_calls(monkeypatch, run.selector, "choose")
        ranks = await ask_for_batches(run, 0, epoch, RANKS)
        assert calls["choose"] == 1
        for number in range(appends):
            await append(run, f"g{number}")
        assert calls["choose"] <= 1 + appends
        assert not any(rank.done() for rank in ranks)
        await append(run, "last")
        parts = await asyncio.gather(*ranks)
        assert calls["choose"] <= 2 + appends
        assert all(isinstance(part, Part) for part in parts)
        assert len({id(part.batch) for part in parts if isinstance(part, Part)}) == 1
        assert [part.rank for part in parts if isinstance(part, Part)] == list(range(RANKS))

    on_a_run(server, work, batch=BatchSpec(groups_per_batch=appends + 1))


def test_ranks_that_poll_without_waiting_share_the_answer_until_a_change(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is kept for a short time only, by the clock of the run, which stands still here."""

    async def work(store: Store, run: Run) -> None:
        epoch = (await run.trainer_calls.attach(AttachRequest(dp_world_size=RANKS))).epoch
        now_s = run.journal.clock.monotonic()
        monkeypatch.setattr(run.journal, "clock", Clock(monotonic=lambda: now_s))
        calls = count_calls(monkeypatch, run.selector, "choose")

        async def poll() -> set[int]:
            answers = [await run.batches.part(0, epoch, rank, 0.0) for rank in range(RANKS)]
            return {answer.have.groups for answer in answers if isinstance(answer, WaitingAnswer)}

        assert await poll() == {0}
        assert calls["choose"] == 1
        await append(run, "a")
        calls.clear()
        assert await poll() == {1}
        assert calls["choose"] == 1
        await append(run, "b")
        assert isinstance(await run.batches.part(0, epoch, 0, 0.0), Part)

    on_a_run(server, work, batch=BatchSpec(groups_per_batch=2))


def test_a_time_out_answers_what_is_there_at_that_moment(server: EmbeddedServer) -> None:
    """Not what was there when the request came."""

    async def work(store: Store, run: Run) -> None:
        epoch = (await run.trainer_calls.attach(AttachRequest())).epoch
        poll = asyncio.create_task(run.batches.part(0, epoch, 0, 0.5))
        await all_wait([poll])
        await append(run, "a", "b")
        answer = await poll
        assert isinstance(answer, WaitingAnswer)
        assert (answer.reason, answer.have.groups) == ("too_few_groups", 2)

    on_a_run(server, work, batch=BatchSpec(groups_per_batch=3))


def test_an_attach_fences_all_ranks_that_wait(server: EmbeddedServer) -> None:
    async def work(store: Store, run: Run) -> None:
        epoch = (await run.trainer_calls.attach(AttachRequest(dp_world_size=8))).epoch
        ranks = await ask_for_batches(run, 0, epoch, 8)
        await run.trainer_calls.attach(AttachRequest(dp_world_size=8))
        outcomes = await asyncio.gather(*ranks, return_exceptions=True)
        assert all(isinstance(outcome, Fenced) for outcome in outcomes)

    on_a_run(server, work)


def test_a_closed_run_answers_all_that_wait(server: EmbeddedServer) -> None:
    """With why they waited; whoever asks then does not wait."""

    async def work(store: Store, run: Run) -> None:
        epoch = (await run.trainer_calls.attach(AttachRequest(dp_world_size=8))).epoch
        ranks = await ask_for_batches(run, 0, epoch, 8)
        polls = [asyncio.create_task(run.trainer_calls.policy_after(0, WAIT_S)) for _ in range(8)]
        await all_wait(polls)
        run.close()
        answers = await asyncio.gather(*ranks)
        assert {answer.reason for answer in answers if isinstance(answer, WaitingAnswer)} == {"no_producers"}
        assert {policy.version for policy in await asyncio.gather(*polls)} == {0}
        assert isinstance(await run.batches.part(0, epoch, 0, WAIT_S), WaitingAnswer)

    on_a_run(server, work)


# ---------------------------------------------------------------------- tickets


def test_tickets_go_to_the_producers_that_have_waited_longest(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Capacity for three answers three of a hundred, by one decision; nobody overtakes."""

    async def work(store: Store, run: Run) -> None:
        out = (await run.tickets.issue("first", 9, "", 0.0)).tickets
        assert len(out) == 6
        producers = await ask_for_tickets(run, PRODUCERS)
        calls = count_calls(monkeypatch, service_tickets, "decide_tickets")
        saved = count_calls(monkeypatch, store.tickets, "change")
        async with run.journal.decision():  # what comes back meanwhile is one change
            given_back = [asyncio.create_task(run.tickets.give_back(ticket.ticket, "shutdown")) for ticket in out[:3]]
            await asyncio.sleep(0)
        await asyncio.gather(*given_back)
        overtaking = await run.tickets.issue("late", 1, "", 0.0)
        assert overtaking.tickets == []
        await until(lambda: len(served(producers)) == 3)
        assert served(producers) == [0, 1, 2]
        assert calls["decide_tickets"] <= 6
        assert saved["change"] <= 6

    on_a_run(server, work, batch=BatchSpec(groups_per_batch=3))


def test_an_append_beside_waiting_producers_asks_for_the_capacity_once(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them was asked for: 500 took the appends of another run from 5.5 to 78 ms."""
    appends = 20

    async def work(store: Store, run: Run) -> None:
        await run.tickets.issue("first", 2, "", 0.0)
        producers = await ask_for_tickets(run, PRODUCERS)
        calls = count_calls(monkeypatch, service_tickets, "decide_tickets")
        for number in range(appends):
            await append(run, f"g{number}")
        assert calls["decide_tickets"] <= 1 + appends
        assert not any(producer.done() for producer in producers)
        for producer in producers:
            producer.cancel()

    on_a_run(server, work)


def test_a_producer_that_left_gets_no_ticket(server: EmbeddedServer) -> None:
    """The ticket goes to the next one: nobody would use it until it expires."""

    async def work(store: Store, run: Run) -> None:
        out = (await run.tickets.issue("first", 2, "", 0.0)).tickets
        killed = asyncio.Event()

        async def leaves() -> NoReturn:
            await killed.wait()
            raise ConnectionError

        first = asyncio.create_task(run.tickets.issue("killed", 1, "", WAIT_S, leaves))
        (second,) = await ask_for_tickets(run, 1)
        killed.set()
        with pytest.raises(ConnectionError):
            await first
        await run.tickets.give_back(out[0].ticket, "shutdown")
        assert len((await second).tickets) == 1
        assert run.book.counts["issued"] == 3

    on_a_run(server, work)


def test_producers_of_one_adapter_do_not_hold_up_those_of_another(server: EmbeddedServer) -> None:
    async def work(store: Store, run: Run) -> None:
        for name in ("code", "math"):
            await run.tickets.issue("first", 9, name, 0.0)
        code, math = [await ask_for_tickets(run, 2, name) for name in ("code", "math")]
        await run.patch(ConfigPatch(strategy=StrategyChange("one-step-off-policy", {"max_staleness": 2})))
        assert [len(tickets.tickets) for tickets in await asyncio.gather(code[0], math[0])] == [1, 1]
        assert served(code) == served(math) == [0]
        for producer in (code[1], math[1]):
            producer.cancel()

    adapter = AdapterSpec(groups_per_batch=1)
    on_a_run(server, work, batch=BatchSpec(), adapters={"code": adapter, "math": adapter})


async def _ack(run: Run, epoch: int) -> None:
    await run.trainer_calls.ack(0, epoch, None)


async def _patch(run: Run, epoch: int) -> None:
    wider = StrategyChange("one-step-off-policy", {"max_staleness": 3})
    await run.patch(ConfigPatch(strategy=wider))


async def _expire(run: Run, epoch: int) -> None:
    late_s = run.journal.clock.monotonic() + 3600.0
    run.journal.clock = Clock(monotonic=lambda: late_s)
    await run.tick()


@pytest.mark.parametrize("opens", [_ack, _patch, _expire])
def test_what_opens_the_window_wakes_the_producer(
    server: EmbeddedServer, opens: Callable[[Run, int], Awaitable[None]]
) -> None:
    """An ack with its publication, a wider window, tickets that expire."""

    async def work(store: Store, run: Run) -> None:
        epoch = (await run.trainer_calls.attach(AttachRequest())).epoch
        await append(run, "a")
        assert isinstance(await run.batches.part(0, epoch, 0, 0.0), Part)
        await run.tickets.issue("first", 9, "", 0.0)
        (producer,) = await ask_for_tickets(run, 1)
        await opens(run, epoch)
        if opens is _ack:
            await run.trainer_calls.publish(1, epoch, None, "")
        async with asyncio.timeout(30):
            assert len((await producer).tickets) == 1

    on_a_run(server, work, tickets=TicketSpec(ttl_s=60.0))


# ---------------------------------------------------------------------- policy


def test_a_publication_alone_wakes_those_that_wait_for_it(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each gets the version above its own."""

    async def work(store: Store, run: Run) -> None:
        epoch = (await run.trainer_calls.attach(AttachRequest())).epoch
        behind = [asyncio.create_task(run.trainer_calls.policy_after(0, WAIT_S)) for _ in range(PRODUCERS)]
        ahead = asyncio.create_task(run.trainer_calls.policy_after(1, WAIT_S))
        await all_wait([*behind, ahead])
        calls = count_calls(monkeypatch, run.trainer_calls, "policy")
        await append(run, "a", "b")
        assert isinstance(await run.batches.part(0, epoch, 0, 0.0), Part)
        await run.trainer_calls.ack(0, epoch, None)
        await all_wait([*behind, ahead])
        assert calls["policy"] == 0
        await run.trainer_calls.publish(1, epoch, None, "")
        assert {policy.version for policy in await asyncio.gather(*behind)} == {1}
        assert calls["policy"] <= 2, "one for the answer of the publication"
        assert not ahead.done()
        ahead.cancel()

    on_a_run(server, work)


# ---------------------------------------------------------------------- any question


class HandClock:
    """A clock that moves by the work and the pauses of a test alone."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds

    async def sleep(self, seconds: float) -> None:
        self.pass_time(seconds)
        await asyncio.sleep(0)


class Asked:
    """A question of its own: `serve` counts, then raises `fault`, or answers `waits` unless it is None."""

    def __init__(self) -> None:
        self.journal = Journal("r", cast(Store, None))
        self.polls = LongPolls(self.journal)
        self.waits: str | None = "wait"
        self.count = 0
        self.work: Callable[[], None] = lambda: None
        self.fault: Exception | None = None
        self.decided = asyncio.Event()
        self.decided.set()

    async def serve(self, waiters: Iterable[Waiter[int, str]]) -> Round[int, str]:
        """Answer all or none."""
        self._decide()
        await self.decided.wait()
        return Round([] if self.waits else [(waiter, "served") for waiter in waiters], self.waits)

    def _decide(self) -> None:
        self.count += 1
        if self.fault:
            raise self.fault
        with self.polls.pace.work():
            self.work()

    async def answer(self, wait_s: float = WAIT_S, gone: Gone | None = None) -> str:
        """Ask."""
        return await self.polls.question("key", self.serve, lambda: self.journal.changes).answer(0, wait_s, gone)


@pytest.mark.parametrize("ends", ["served", "wait"])
def test_thousands_of_answers_leave_the_loop_to_others_in_between(ends: str) -> None:
    """2,048 that are served, or that time out, at once would hold the event loop for 0.2 s."""

    async def main() -> None:
        asked, answered = Asked(), 0

        async def poll() -> None:
            nonlocal answered
            assert await asked.answer() == ends
            answered += 1

        polls = [asyncio.create_task(poll()) for _ in range(2048)]
        await all_wait(polls)
        if ends == "served":
            asked.waits = None
            asked.journal.notify()
        else:
            asked.journal.close()
        seen = [0]
        while answered < 2048:
            await asyncio.sleep(0)
            seen.append(answered)
        assert max(later - earlier for earlier, later in itertools.pairwise(seen)) <= ANSWERED_AT_ONCE

    asyncio.run(main())


def test_changes_without_end_leave_most_of_the_time_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question of 2 ms rests for 98 ms: it is asked 10 times a second at most, not once per change."""
    clock = HandClock()
    monkeypatch.setattr(long_polls, "time", clock)
    monkeypatch.setattr(long_polls, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": clock.sleep}))

    async def main() -> None:
        asked = Asked()
        asked.work = lambda: clock.pass_time(0.002)
        poll = asyncio.create_task(asked.answer())
        while asked.count < 12:
            asked.journal.notify()
            await asyncio.sleep(0)
        assert clock.now_s == pytest.approx(12 * 0.002 + 11 * 0.098)
        asked.waits = None
        asked.journal.notify()
        assert await poll == "served"

    asyncio.run(main())


def test_a_request_that_comes_during_a_decision_is_served_by_it() -> None:
    async def main() -> None:
        asked = Asked()
        asked.waits = None
        asked.decided.clear()
        polls = [asyncio.create_task(asked.answer())]
        await until(lambda: asked.count)
        polls.append(asyncio.create_task(asked.answer()))
        await all_wait(polls)
        asked.decided.set()
        assert await asyncio.gather(*polls) == ["served", "served"]
        assert asked.count == 1

    asyncio.run(main())


def test_a_fault_reaches_all_that_wait_and_the_next_request_asks_again() -> None:
    async def main() -> None:
        asked = Asked()
        polls = [asyncio.create_task(asked.answer()) for _ in range(3)]
        await all_wait(polls)
        asked.fault = ValueError("broken")
        asked.journal.notify()
        outcomes = await asyncio.gather(*polls, return_exceptions=True)
        assert [str(outcome) for outcome in outcomes] == ["broken"] * 3
        asked.fault = None
        assert await asked.answer(0.0) == "wait"

    asyncio.run(main())


class Left(Exception):
    """The caller has left."""


def test_a_caller_that_left_leaves_nothing_to_the_garbage_collector() -> None:
    """2,048 left 40,000 objects that referred to each other: a collection of such a number holds the event loop."""

    async def main() -> None:
        asked = Asked()
        left: list[weakref.ref[Left]] = []

        async def leaves() -> NoReturn:
            error = Left()
            left.append(weakref.ref(error))
            try:
                raise error
            finally:
                del error

        with contextlib.suppress(Left):
            await asked.answer(WAIT_S, leaves)
        await until(lambda: asked.polls.question("key", asked.serve, lambda: 0).idle)
        assert [error() for error in left] == [None]

    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()


@pytest.mark.parametrize("call", ["batches/0?epoch=1", "policy?after=0", "tickets"])
def test_a_closed_connection_ends_its_wait(run: RunClient, call: str) -> None:
    """It cost a decision per change until its wait was over."""
    run.put(batch={"groups_per_batch": 1})
    run.attach()
    run.post("tickets", producer="p", count=9)
    body = b'{"producer": "killed", "count": 1, "wait_ms": 60000}' if call == "tickets" else b""
    method, query = ("POST", "") if call == "tickets" else ("GET", "&wait_ms=60000")
    head = f"{method} {run.path}/{call}{query} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    url = run.http.base_url
    with socket.create_connection((url.host, url.port or 80)) as killed:
        killed.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        killed.settimeout(0.2)
        with pytest.raises(TimeoutError):
            killed.recv(1)

    def left() -> bool:
        ended = [line for line in run.http.get("/metrics").text.splitlines() if f'run="{run.run}",status="499"' in line]
        return any(call.partition("/")[0].partition("?")[0] in line for line in ended)

    eventually(left, 20.0)
    assert run.append(group("a"))[0]["status"] == "stored"
