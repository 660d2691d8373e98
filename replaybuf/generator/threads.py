"""Threads for code that is not ours: what hangs there holds up neither the event loop nor the end of the process.

Nor does what it raises end a thread or a task of ours: code that scores code may run `exit()`, and a coroutine may let
out the `CancelledError` of something that it cancelled itself.
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
    """A thread that does one job after another; `idle` workers wait for the next.

    Not `concurrent.futures`: its threads are joined at the end of the process, so one that hangs would hold that up.
    Not a new thread per job: starting one blocks the event loop until the thread runs.
    """

    def __init__(self, idle: list[Worker]) -> None:
        self._idle = idle
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="replaybuf-worker", daemon=True).start()

    def do(self, job: Callable[[], T]) -> Future[T]:
        """Start a job; its result or exception comes through the future. At most one is given at a time."""
        promise: Future[T] = Future()
        promise.set_running_or_notify_cancel()  # from here on it cannot be cancelled, only awaited no longer

        def run() -> None:
            try:
                promise.set_result(job())
            except BaseException as error:  # noqa: BLE001 - the boundary of the thread: who awaits the promise judges it
                promise.set_exception(_harmless(error))

        self._jobs.put(run)
        return promise

    def _work(self) -> None:
        while True:
            self._jobs.get()()
            self._idle.append(self)


class LoopThread:
    """A thread with an event loop for coroutines of the user's: what blocks there blocks no other part."""

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
            except BaseException as error:  # noqa: BLE001 - asyncio lets SystemExit of any task out of the loop
                logger.warning("a task of the environment ended with %r; the others go on", error)


async def contained(work: Awaitable[T]) -> T:
    """Await what is not ours; whatever it raises comes as an `Exception`, but for a cancellation that was asked for."""
    try:
        return await work
    except GeneratorExit:  # the loop is gone
        raise
    except BaseException as error:
        harmless = _harmless(error)
        if harmless is error or (isinstance(error, asyncio.CancelledError) and asked_to_end()):
            raise
        raise harmless from error


def asked_to_end() -> bool:
    """Say whether somebody cancelled the task that runs; a `CancelledError` may also come from something within it."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _harmless(error: BaseException) -> Exception:
    """Return an error as it may travel through coroutines: what means something to them or to a loop, as a text."""
    meant = isinstance(error, StopIteration | concurrent.futures.CancelledError)
    return error if isinstance(error, Exception) and not meant else RuntimeError(repr(error))
