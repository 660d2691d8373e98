"""Threads for the user's code: a call that hangs blocks neither the event loop nor the end of the process.

An exception of that code ends no thread or task either. A reward may call `exit()`, and a coroutine may raise the
`CancelledError` of something that it cancelled itself.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Worker:
    """A daemon thread that runs one job at a time; after each job it adds itself to `idle`.

    Not `concurrent.futures`: it joins its threads at the end of the process, and a job that hangs would block that.
    Not a new thread per job: the event loop would block until the thread has started.
    """

    def __init__(self, idle: list[Worker]) -> None:
        self._idle = idle
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="replaybuf-worker", daemon=True).start()

    def do(self, job: Callable[[], T]) -> Future[T]:
        """Start a job and return the future of its result; wait for it before the next job."""
        promise: Future[T] = Future()
        promise.set_running_or_notify_cancel()  # nothing can cancel a thread

        def run() -> None:
            try:
                promise.set_result(job())
            except BaseException as error:  # noqa: BLE001 - the boundary of the thread; the future has the error
                promise.set_exception(_harmless(error))

        self._jobs.put(run)
        return promise

    def _work(self) -> None:
        while True:
            self._jobs.get()()
            self._idle.append(self)


class LoopThread:
    """A daemon thread with its own event loop for the user's coroutines."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name="replaybuf-loop", daemon=True).start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(contained(work), self._loop)

    def _run(self) -> None:
        while True:
            try:
                self._loop.run_forever()
            except BaseException as error:  # noqa: BLE001 - asyncio passes SystemExit of any task through the loop
                logger.warning("a task of the environment ended with %r; the others continue", error)


async def contained(work: Awaitable[T]) -> T:
    """Await the user's code; raise only an `Exception`, or the cancellation of the current task."""
    try:
        return await work
    except GeneratorExit:  # the loop is closed
        raise
    except BaseException as error:
        harmless = _harmless(error)
        if harmless is error or (isinstance(error, asyncio.CancelledError) and was_cancelled()):
            raise
        raise harmless from error


def was_cancelled() -> bool:
    """Return whether the current task was cancelled; a `CancelledError` may also come from code inside it."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _harmless(error: BaseException) -> Exception:
    """Return an error that may pass through coroutines: one with a meaning for them or the loop becomes a text."""
    special = isinstance(error, StopIteration | concurrent.futures.CancelledError)
    return error if isinstance(error, Exception) and not special else RuntimeError(repr(error))
