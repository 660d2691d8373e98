"""Long polls of one run: requests that ask the same question wait together and share its answer.

    request -> question -> serve: answers for the first requests, or why all of them wait
                             ^ once per change, at a pace; when a request is due

A question is a batch of a step, tickets of an adapter or a publication. One task asks it, however many requests wait:
a change costs one call of `serve`, not one per request. Requests are served in the order of their arrival.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

from replaybuf.service.run.journal import Journal
from replaybuf.service.traffic import exclude_wait

R = TypeVar("R")
T = TypeVar("T")

LONGEST_WAIT_S = 60.0
ANSWERED_AT_ONCE = 32
"""Requests answered in one turn of the event loop: 2,048 that time out together would hold it for 0.2 s."""
ANSWER_KEPT_S = 0.25
"""An answer to wait is shared for so long while nothing changes: a strategy may go by measured rates."""
REST = 49
"""A question that took t and found no answer rests questions of its kind for 49 t: 2 % of the time at most."""
LONGEST_REST_S = 0.25
KEPT_QUESTIONS = 64
"""Questions kept with the answer that callers without `wait_ms` share."""


class Pace:
    """Bounds the time that the questions of one run take while their answer is to wait."""

    def __init__(self) -> None:
        self._took_s = 0.0
        self._rest_until_s = 0.0

    @functools.cached_property
    def _turn(self) -> asyncio.Lock:
        """Made for the first question: a service may have thousands of runs that nobody asks."""
        return asyncio.Lock()

    @property
    def resting(self) -> bool:
        """Return whether the rest is not over."""
        return time.monotonic() < self._rest_until_s

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """Measure the body: part of a question, without the time that it waits for others."""
        begun_s = time.monotonic()
        try:
            yield
        finally:
            self._took_s += time.monotonic() - begun_s

    def end(self, *, waits: bool) -> None:
        """End a question; rest if its answer was to wait."""
        if waits:
            self._rest_until_s = time.monotonic() + min(REST * self._took_s, LONGEST_REST_S)
        self._took_s = 0.0

    async def rest(self) -> None:
        """Wait until the next question may be asked."""
        async with self._turn:  # one question after the other, in the order of arrival
            await asyncio.sleep(max(0.0, self._rest_until_s - time.monotonic()))


class Waiter(Generic[R, T]):
    """One request: what it asks for, whether it waits no longer, its answer and when that was asked for."""

    __slots__ = ("answer", "due", "parked_s", "request")

    def __init__(self, request: R, *, due: bool) -> None:
        self.request = request
        self.due = due
        self.parked_s: float | None = None
        self.answer: asyncio.Future[tuple[T, float]] = asyncio.get_running_loop().create_future()

    def leave(self, gone: asyncio.Future[NoReturn]) -> None:
        """Give up with the exception of `gone`: the caller has left."""
        if not gone.cancelled() and (error := gone.exception()) and not self.answer.done():
            self.answer.set_exception(error)


class Round(NamedTuple, Generic[R, T]):
    """Result of asking once: the requests that are served, and the answer for all others, to wait.

    `waits` is None if nobody has to wait, or if the others may be served by asking again.
    """

    served: Sequence[tuple[Waiter[R, T], T]]
    waits: T | None = None


Serve = Callable[[Iterable[Waiter[R, T]]], Awaitable[Round[R, T]]]
Gone = Callable[[], Coroutine[Any, Any, NoReturn]]


class Question(Generic[R, T]):
    """One question of a run. The first request starts a task, which ends when no request is left.

    - `serve`: asks once, for the requests in the order of their arrival; only this task calls it
    - `moment`: the same moment, the same answer; compared after each change
    - `asked`: questions of this kind that somebody waits for
    """

    def __init__(
        self,
        journal: Journal,
        pace: Pace,
        serve: Serve[R, T],
        moment: Callable[[], object],
        asked: dict[Question[Any, Any], None],
    ) -> None:
        self._journal = journal
        self._asked = asked
        self._pace = pace
        self._serve = serve
        self._moment = moment
        self._waiters: dict[Waiter[R, T], None] = {}
        self._expecting: list[Waiter[R, T]] = []
        self._kept: tuple[object, float, T] | None = None
        self._asked_s = 0.0
        self._awake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def idle(self) -> bool:
        """Return whether nobody waits."""
        return self._task is None

    def wake(self) -> None:
        """Ask again if a change may have changed the answer."""
        if self._kept is None or self._kept[0] != self._moment() or self._journal.closed:
            self._awake.set()

    async def answer(self, request: R, wait_s: float, gone: Gone | None = None) -> T:
        """Return the answer; for up to `wait_s` another one than to wait.

        `gone` raises when the caller leaves, which ends the request with this exception.
        """
        wait_s = 0.0 if self._journal.closed else min(max(wait_s, 0.0), LONGEST_WAIT_S)
        kept = self._shared()
        if kept and not wait_s:
            return kept[2]
        waiter: Waiter[R, T] = Waiter(request, due=not wait_s)
        timer = asyncio.get_running_loop().call_later(wait_s, self._expire, waiter) if wait_s else None
        leaving = asyncio.create_task(gone()) if gone else None
        if leaving:
            leaving.add_done_callback(waiter.leave)
        self._waiters[waiter] = None
        self._expecting.append(waiter)
        self._awake.set()
        if self._task is None:
            self._task = asyncio.create_task(self._work())
            self._asked[self] = None
        try:
            answer, asked_s = await waiter.answer
            if waiter.parked_s is not None:
                exclude_wait(max(0.0, asked_s - waiter.parked_s))
            return answer
        finally:
            self._waiters.pop(waiter, None)
            if timer:
                timer.cancel()
            if leaving:
                leaving.cancel()
            if not self._waiters:
                self._awake.set()
            del waiter, leaving  # else an exception and this frame would refer to each other

    def _expire(self, waiter: Waiter[R, T]) -> None:
        """Let the next round answer a request whose time is over."""
        waiter.due = True
        self._expecting.append(waiter)
        self._awake.set()

    def _shared(self) -> tuple[object, float, T] | None:
        """Return the last answer to wait while it holds."""
        kept = self._kept
        if kept and kept[0] == self._moment() and 0 <= self._journal.clock.monotonic() - kept[1] < ANSWER_KEPT_S:
            return kept
        return None

    async def _work(self) -> None:
        """Ask after each change, and answer, until no request is left."""
        try:
            while True:
                await self._awake.wait()
                self._awake.clear()
                if not self._waiters:
                    return
                try:
                    await self._round()
                except Exception as error:  # noqa: BLE001 - each request raises it
                    self._pace.end(waits=False)
                    await self._answer([(waiter, error) for waiter in self._waiters])
        finally:
            self._task = None
            del self._asked[self]
            self._expecting.clear()

    async def _round(self) -> None:
        """Serve requests, answer those that are due, and park those that are new."""
        kept = self._shared() or await self._ask()
        if kept is None:
            self._awake.set()  # there may be more for the others
            return
        closed = self._journal.closed
        expecting, self._expecting = list(self._waiters) if closed else self._expecting, []
        now_s = asyncio.get_running_loop().time()
        for waiter in expecting:
            waiter.parked_s = now_s if waiter.parked_s is None else waiter.parked_s
        await self._answer([(waiter, kept[2]) for waiter in expecting if waiter.due or closed])

    async def _ask(self) -> tuple[object, float, T] | None:
        """Ask once and serve; return the answer for the others."""
        await self._pace.rest()
        self._asked_s = asyncio.get_running_loop().time()
        moment, at_s = self._moment(), self._journal.clock.monotonic()
        served, waits = await self._serve(self._unanswered())
        self._pace.end(waits=waits is not None)
        await self._answer(served)
        self._kept = None if waits is None else (moment, at_s, waits)
        return self._kept

    def _unanswered(self) -> Iterator[Waiter[R, T]]:
        # A copy, taken when the iteration begins: requests come and go during the decision and between two answers.
        for waiter in list(self._waiters):
            if not waiter.answer.done():
                yield waiter

    async def _answer(self, answers: Sequence[tuple[Waiter[R, T], T | Exception]]) -> None:
        """Answer requests, a few per turn of the event loop; skip those that have left."""
        for count, (waiter, answer) in enumerate(answers, start=1):
            self._waiters.pop(waiter, None)
            if waiter.answer.done():
                continue
            if isinstance(answer, Exception):
                waiter.answer.set_exception(answer)
            else:
                waiter.answer.set_result((answer, self._asked_s))
            if count % ANSWERED_AT_ONCE == 0:
                await asyncio.sleep(0)


class LongPolls:
    """Questions of one kind, by key; their `pace` is one."""

    def __init__(self, journal: Journal) -> None:
        self.pace = Pace()
        self._journal = journal
        self._questions: dict[Hashable, Question[Any, Any]] = {}
        self._asked: dict[Question[Any, Any], None] = {}
        journal.listeners.append(self.wake)

    def wake(self) -> None:
        """Ask again each question that somebody waits for and whose answer may have changed."""
        for question in self._asked:
            question.wake()

    def question(self, key: Hashable, serve: Serve[R, T], moment: Callable[[], object]) -> Question[R, T]:
        """Return the question of a key; beyond `KEPT_QUESTIONS` forget those that nobody asks."""
        question = self._questions.get(key)
        if question is None:
            if len(self._questions) >= KEPT_QUESTIONS:
                self._questions = {other: asked for other, asked in self._questions.items() if not asked.idle}
            question = self._questions[key] = Question(self._journal, self.pace, serve, moment, self._asked)
        return question
