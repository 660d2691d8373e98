"""Threads for code that is not ours: what hangs there holds up neither the event loop nor the end of the process."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

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
            except Exception as error:  # noqa: BLE001 - the boundary of the thread: whoever awaits the promise judges it
                # An exception that means something to coroutines must not travel through one as itself.
                promise.set_exception(RuntimeError(repr(error)) if isinstance(error, StopIteration) else error)

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
        threading.Thread(target=self._loop.run_forever, name="replaybuf-loop", daemon=True).start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)
