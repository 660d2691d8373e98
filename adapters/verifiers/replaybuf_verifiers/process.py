"""The generator's end of the process that runs verifiers tasksets (`replaybuf_verifiers.worker`).

::

    not running ──request──► starting ──ready──► answering many requests at the same time
        ▲                       │                    │
        └──── ended by itself, or killed ◄───────────┴── a cancelled request goes on for GRACE_S
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from replaybuf.client.producers.failures import redact, render_traceback
from replaybuf.environment import ChildEnded, ChildProcess
from replaybuf.errors import Invalid, MissingExtra, ReplaybufError
from replaybuf.wire import pipes
from replaybuf_verifiers.worker.messages import Answer, Cancel, Command, Failed, Ready, Request

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=Answer)

EXTRA = "verifiers"
WORKER = Path(__file__).with_name("worker") / "__main__.py"
PYTHON = "REPLAYBUF_VERIFIERS_PYTHON"
"""Environment variable: the interpreter that has verifiers; by default the generator's own."""
START_S = 300.0
"""Time limit for the process to start."""
GRACE_S = 5.0
"""A cancelled request that goes on for longer blocks all others, so its process is killed."""


class TasksetRaised(ReplaybufError):
    """Code of a taskset raised, or the process ended over a request."""


class PlayRewritten(TasksetRaised):
    """A play asked for a turn after tokens that do not extend its earlier tokens."""


class TasksetProcess:
    """A process that answers requests. It starts with the first request, and again with the next after it ended.

    Requests may come from any thread. They are sent in order; each answer comes when it is done. The process ends with
    this one at the latest.
    """

    def __init__(self) -> None:
        atexit.register(self.close)
        self._lock = threading.Lock()
        self._worker: _Worker | None = None

    def ask_now(self, request: Request, answer: type[T], timeout_s: float) -> T:
        """Wait for an answer in this thread.

        Raises `MissingExtra` or `Invalid` without verifiers, `Invalid` for a request that has no answer,
        `TasksetRaised`, also if there is no answer after `timeout_s` seconds.
        """
        while True:
            worker, number, future = self._send(request)
            try:
                return _checked(future.result(timeout_s), answer)
            except ChildEnded as ended:
                if not worker.killed_for_another:
                    raise worker.why_ended() from ended
            except TimeoutError:
                worker.cancel(number)
                what = f"the verifiers process did not answer {type(request).__name__} within {timeout_s:g} s"
                raise TasksetRaised(what, name="verifiers", value=number, bound=timeout_s) from None

    async def ask(self, request: Request, answer: type[T]) -> T:
        """Wait for an answer, without a time limit. Raises as `ask_now`, and `PlayRewritten`."""
        while True:
            worker, number, future = self._send(request)
            try:
                return _checked(await asyncio.wrap_future(future), answer)
            except ChildEnded as ended:
                if not worker.killed_for_another:
                    raise worker.why_ended() from ended
            except asyncio.CancelledError:
                worker.cancel(number)
                raise

    def post(self, command: Command) -> None:
        """Send a command, which has no answer, if the process runs."""
        with self._lock:
            if self._worker is not None and not self._worker.child.ended:
                self._worker.child.post(command)

    def close(self) -> None:
        """End the process and what it started, and wait until it is gone; a later request starts another."""
        with self._lock:
            if self._worker is not None:
                self._worker.child.end()
                self._worker = None

    def _send(self, request: Request) -> tuple[_Worker, int, Future[Answer]]:
        with self._lock:
            if self._worker is None or self._worker.child.ended:
                self._worker = _Worker()
            number, future = self._worker.child.send(request)
            return self._worker, number, future


PROCESS = TasksetProcess()
"""Shared by all tasksets of this process: importing verifiers takes seconds, and 230 MB."""


class _Worker:
    """One run of the process."""

    def __init__(self) -> None:
        self.killed_for_another = False
        self._started_s = time.monotonic()
        try:
            # -P: the folder of the script holds modules of any name; imports must not look there first.
            self.child = ChildProcess[Answer]([_python(), "-P", str(WORKER), pipes.__file__], Answer)
        except OSError as error:
            raise _unfit(error.strerror or str(error)) from error
        self.child.first.add_done_callback(self._log_start)

    def cancel(self, number: int) -> None:
        """Cancel a request; kill the process if that does not end it in time."""
        self.child.post(Cancel(number=number))
        self._check_later(number)

    def why_ended(self) -> ReplaybufError:
        """Return the error of a request that the process ended over."""
        answer = self._first()
        if isinstance(answer, Ready):
            return TasksetRaised("the verifiers process ended over it; see standard error", name="verifiers")
        if answer is not None and PYTHON not in os.environ:
            return MissingExtra("a taskset of verifiers", EXTRA)
        return _unfit(answer.detail if isinstance(answer, Failed) else "see standard error")

    def _first(self) -> Answer | None:
        first = self.child.first
        return first.result() if first.done() and first.exception() is None else None

    def _log_start(self, first: Future[Answer]) -> None:
        if isinstance(answer := self._first(), Ready):
            logger.info("verifiers %s runs in process %d", answer.version, self.child.pid)

    def _check_later(self, number: int) -> None:
        timer = threading.Timer(GRACE_S, self._check, [number, self._first() is not None])
        timer.daemon = True
        timer.start()

    def _check(self, number: int, was_ready: bool) -> None:
        if self.child.answered(number):
            return
        if not was_ready and time.monotonic() < self._started_s + START_S:
            self._check_later(number)  # the process has not reached this request yet
            return
        logger.warning("verifiers: killing its process; a cancelled request went on for %g s", GRACE_S)
        self.killed_for_another = True
        self.child.kill()


def _python() -> str:
    return os.environ.get(PYTHON) or sys.executable


def _unfit(why: str) -> Invalid:
    python = _python()
    detail = (
        f"{python} does not run verifiers: {why}. Install it: {python} -m pip install 'verifiers>=0.4,<0.5' msgspec"
    )
    return Invalid(detail, name=PYTHON, value=python)


def _checked(answer: Answer, wanted: type[T]) -> T:
    if isinstance(answer, wanted):
        return answer
    if not isinstance(answer, Failed):
        raise TasksetRaised(f"the verifiers process answered with {type(answer).__name__}", name="verifiers")
    kind = {"invalid": Invalid, "rewritten": PlayRewritten}.get(answer.reason, TasksetRaised)
    error = kind(redact(answer.detail), name="verifiers")
    if answer.traceback:
        error.add_note(render_traceback(answer.traceback))
    raise error
