"""Event loop with a virtual clock: a wait takes no real time, and the same calls run in the same order.

Every handle belongs to the node whose task made it. Handles of a dead node never run: nothing of a killed process goes
on, not even a `finally`. Handles of a stopped node wait until it continues, as after SIGSTOP.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import heapq
import random
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

LONGEST_THREAD_S = 0.004
MOST_CANCELLED = 100
MOST_HANDLES = 3_000_000
"""Handles of one schedule; more are a loop without an end."""


class _Handle(asyncio.TimerHandle):
    """A call of a function, without what asyncio does for its debug mode."""

    __slots__ = ()
    _context: contextvars.Context
    _callback: Callable[..., object]
    _args: tuple[Any, ...]
    _cancelled: bool

    def __init__(  # not asyncio's, which asks the loop for its debug mode
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: SimulatedLoop,
        context: contextvars.Context | None,
    ) -> None:
        self._context = contextvars.copy_context() if context is None else context
        self._loop, self._callback, self._args, self._when = loop, callback, args, when
        self._cancelled = self._scheduled = False
        self._repr = self._source_traceback = None

    def cancel(self) -> None:
        """Never call the function."""
        if not self._cancelled:
            self._cancelled = True
            self._callback, self._args = _nothing, ()
            if self._scheduled:
                self._loop._timer_handle_cancelled(self)


def _nothing() -> None:
    """Stand in for a function that was cancelled."""


class Node:
    """One simulated process. `wall_ahead_s`: by how much its wall clock is ahead of the true time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False
        self.stopped = False
        self.wall_ahead_s = 0.0
        self.waiting: list[_Handle] = []

    def __repr__(self) -> str:
        return self.name

    @functools.cached_property
    def context(self) -> contextvars.Context:
        """Context of functions that the world calls on this node; they never call each other."""
        context = contextvars.Context()
        context.run(NODE.set, self)
        return context


WORLD = Node("world")
"""Of what belongs to no process: faults, the network, the end of a schedule."""
NODE: contextvars.ContextVar[Node] = contextvars.ContextVar("node", default=WORLD)


class Stuck(Exception):
    """Nothing can happen any more, or work never ends."""


class SimulatedLoop(asyncio.BaseEventLoop):
    """Runs one schedule; `rng` draws how long threads take. `errors`: what nobody caught."""

    _ready: deque[_Handle]
    _stopping: bool

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._now_s = 0.0
        self._timers: list[tuple[float, int, _Handle]] = []
        self._made = self._cancelled = 0
        self._rng = rng
        self._handles = 0
        self._tasks: list[tuple[Node, asyncio.Task[Any]]] = []
        self._fatal: Exception | None = None
        self.errors: list[str] = []
        factory: Any = self._make_task
        self.set_task_factory(factory)
        self.set_exception_handler(self._record_error)

    def time(self) -> float:
        """Return the true time in seconds since the schedule began."""
        return self._now_s

    def _run_once(self) -> None:
        """Run all that is due until the loop is stopped; whenever nothing is, move the clock to the next timer."""
        # One call for a whole schedule, and handles without debug mode: asyncio's cost as much as what they call.
        timers, ready = self._timers, self._ready
        while True:
            while timers and timers[0][2]._cancelled:
                heapq.heappop(timers)
            if not ready and not self._stopping:
                if not timers:
                    raise Stuck("every task waits, and no timer is set")
                self._now_s = max(self._now_s, timers[0][0])
            while timers and timers[0][0] <= self._now_s:
                handle = heapq.heappop(timers)[2]
                if not handle._cancelled:
                    ready.append(handle)
            if self._fatal:
                raise self._fatal
            self._handles += len(ready)
            if self._handles > MOST_HANDLES:
                raise Stuck(f"{MOST_HANDLES} steps were taken, and the schedule goes on at {self._now_s:.3f} s")
            for _ in range(len(ready)):
                handle = ready.popleft()
                if handle._cancelled:
                    continue
                node = handle._context.get(NODE, WORLD)
                if node.dead:
                    continue
                if node.stopped:
                    node.waiting.append(handle)
                    continue
                try:
                    handle._context.run(handle._callback, *handle._args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:  # noqa: BLE001 - as asyncio does
                    message = f"Exception in callback {handle._callback!r}"
                    self.call_exception_handler({"message": message, "exception": error, "handle": handle})
            if self._stopping:
                return

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Call a function in the next round."""
        handle = _Handle(self._now_s, callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Call a function after a time."""
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Call a function at a time; timers of one moment run in the order in which they were made."""
        timer = _Handle(when, callback, args, self, context)
        timer._scheduled = True
        self._made += 1
        heapq.heappush(self._timers, (when, self._made, timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._cancelled += 1
        if self._cancelled > MOST_CANCELLED and 2 * self._cancelled > len(self._timers):
            self._timers[:] = [entry for entry in self._timers if not entry[2]._cancelled]
            heapq.heapify(self._timers)
            self._cancelled = 0

    def go_on(self, node: Node) -> None:
        """Let a stopped node continue: everything that came due meanwhile runs at once."""
        node.stopped = False
        self._ready.extend(node.waiting)
        node.waiting.clear()

    def _make_task(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], **options: Any) -> Any:
        task = asyncio.Task(work, loop=loop, **options)
        self._tasks.append((NODE.get(), task))  # else the garbage collector would run `finally` blocks of dead nodes
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Call a function a little later, at one moment: a thread that does nothing in between."""
        done: asyncio.Future[T] = self.create_future()
        self.call_later(self._rng.uniform(0.0, LONGEST_THREAD_S), _run_thread, done, func, args)
        return done

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Call a function soon: there is one thread, and finalizers of generators use this."""
        return self.call_soon(callback, *args, context=context)

    async def sock_sendall(self, sock: Any, data: Any) -> None:
        """Send bytes on a simulated socket. A real one fails."""
        await sock.send_all(data)

    async def sock_recv_into(self, sock: Any, buf: Any) -> int:
        """Receive bytes from a simulated socket. A real one fails."""
        count: int = await sock.receive_into(buf)
        return count

    async def create_connection(self, *arguments: Any, **options: Any) -> Any:
        """Refuse the real network."""
        raise RuntimeError(f"create_connection{arguments} would use the real network inside the simulation")

    async def getaddrinfo(self, *arguments: Any, **options: Any) -> Any:
        """Refuse the real network."""
        raise RuntimeError(f"getaddrinfo{arguments} would use the real network inside the simulation")

    def tasks_of(self, node: Node) -> list[asyncio.Task[Any]]:
        """Return the tasks of a node that are not done."""
        return [task for owner, task in self._tasks if owner is node and not task.done()]

    def end_with(self, error: Exception) -> None:
        """End the schedule with an error of the world, whoever may catch it before."""
        self._fatal = self._fatal or error

    def _record_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if isinstance(context.get("exception"), NotImplementedError):
            self.end_with(context["exception"])  # the model of Redis lacks a command
        else:
            self.errors.append(f"{context.get('message')}: {context.get('exception')!r}")

    def discard(self) -> None:
        """Close the loop, and drop all work that never ended. The caller silences what its `finally` blocks raise."""
        for _, task in self._tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        self._tasks.clear()
        self._ready.clear()
        self._timers.clear()
        self.close()


def _run_thread(done: asyncio.Future[Any], func: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if done.cancelled():
        return
    try:
        done.set_result(func(*args))
    except Exception as error:  # noqa: BLE001 - a thread hands every error to its future
        done.set_exception(error)
