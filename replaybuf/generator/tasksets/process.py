"""The generator's end of the process that runs a verifiers taskset (`replaybuf.generator.tasksets.worker`).

::

    not there ──request──► starting ──ready──► answering, many requests at the same time
        ▲                     │                    │
        └──── ended by itself, or killed ◄─────────┴── a cancelled request is not given up within GRACE_S
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from replaybuf.errors import Invalid, MissingExtra, ReplaybufError
from replaybuf.generator.tasksets import worker
from replaybuf.generator.tasksets.worker.messages import LENGTH, Answer, Cancel, Failed, Ready, Requests, framed

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=Answer)

EXTRA = "verifiers"
WORKER = Path(worker.__file__).with_name("__main__.py")
PYTHON = "REPLAYBUF_VERIFIERS_PYTHON"
"""Environment variable that names the interpreter verifiers is installed in; the generator's own by default."""
START_S = 300.0
"""A process that is not ready by then never will be."""
GRACE_S = 5.0
"""A request that was cancelled and goes on for longer holds up all others, so its process is killed."""
_END_S = 3.0


class TasksetRaised(ReplaybufError):
    """Code of a taskset raised, or its process ended over a request."""


class PlayRewritten(TasksetRaised):
    """A play asked for a turn after tokens that do not extend those it had."""


class _HeldUp(TasksetRaised):
    """A request was lost because its process was killed for another one."""


class TasksetProcess:
    """A process that answers requests, started at the first one, and anew at the next after it ended.

    Requests may come from any thread. Their order is kept; their answers come as each is done. It ends with this
    process at the latest.
    """

    def __init__(self) -> None:
        atexit.register(self.close)
        self._lock = threading.Lock()
        self._running: _Running | None = None

    def ask_now(self, request: Requests, answer: type[T], timeout_s: float) -> T:
        """Wait for an answer in this thread.

        Raises `MissingExtra` or `Invalid` where there is no verifiers, `Invalid` for a request that cannot be
        answered, `TasksetRaised`, also where there is no answer after `timeout_s` seconds.
        """
        while True:
            running, number, promise = self._sent(request)
            try:
                return _checked(promise.result(timeout_s), answer)
            except _HeldUp:
                continue
            except TimeoutError:
                running.cancel(number)
                what = f"the process of verifiers did not answer {type(request).__name__} within {timeout_s:g} s"
                raise TasksetRaised(what, name="verifiers", value=number, bound=timeout_s) from None

    async def ask(self, request: Requests, answer: type[T]) -> T:
        """Wait for an answer. Raises as `ask_now` does, and `PlayRewritten`; the bound is the caller's, who cancels."""
        while True:
            running, number, promise = self._sent(request)
            try:
                return _checked(await asyncio.wrap_future(promise), answer)
            except _HeldUp:
                continue
            except asyncio.CancelledError:
                running.cancel(number)
                raise

    def tell(self, request: Requests) -> None:
        """Send what nobody waits for the answer of, where the process runs."""
        with self._lock:
            if self._running is not None and not self._running.ended:
                self._running.send(request)

    def close(self) -> None:
        """End the process, with what it started itself, and wait until it is gone; a later request starts another."""
        with self._lock:
            if self._running is not None:
                self._running.end()
                self._running = None

    def _sent(self, request: Requests) -> tuple[_Running, int, Future[Answer]]:
        with self._lock:
            if self._running is None or self._running.ended:
                self._running = _Running()
            number, promise = self._running.send(request)
            return self._running, number, promise


class _Running:
    """One process, a thread that writes to it and one that reads from it: neither pipe blocks a caller."""

    def __init__(self) -> None:
        self.ended = False
        self._ready = False
        self._held_up = False
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Answer]] = {}
        self._why_ended: Failed | None = None
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._started_s = time.monotonic()
        self._process = _started()
        self._threads = [
            threading.Thread(target=work, args=(pipe,), name="replaybuf-verifiers", daemon=True)
            for work, pipe in ((self._write, self._process.stdin), (self._read, self._process.stdout))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, request: Requests) -> tuple[int, Future[Answer]]:
        number, promise = next(self._numbers), Future[Answer]()
        promise.set_running_or_notify_cancel()  # from here on it cannot be cancelled, only awaited no longer
        with self._lock:
            if self.ended:
                promise.set_exception(self._ended())
            else:
                self._waiting[number] = promise
                self._requests.put(framed(msgspec.structs.replace(request, number=number)))
        return number, promise

    def cancel(self, number: int) -> None:
        """Have a request given up; the process is killed where that is not done in time."""
        self._requests.put(framed(Cancel(number=number)))
        self._look_later(number)

    def _look_later(self, number: int) -> None:
        look = threading.Timer(GRACE_S, self._look, [number, self._ready])
        look.daemon = True
        look.start()

    def _look(self, number: int, was_ready: bool) -> None:
        with self._lock:
            if number not in self._waiting:
                return
        if not was_ready and time.monotonic() < self._started_s + START_S:
            self._look_later(number)  # it has not come to this request yet
            return
        logger.warning("verifiers: a request goes on %g s after it was cancelled; its process is killed", GRACE_S)
        self._held_up = True
        self.kill()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it ended by itself meanwhile
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Let it end by itself, which clears away what tasksets started; kill it where that takes long."""
        self._requests.put(None)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()
        for thread in self._threads:
            thread.join(_END_S)

    def _write(self, stdin: BinaryIO) -> None:
        with contextlib.suppress(OSError), stdin:  # the reading thread sees the end of the process, and tells it
            while (request := self._requests.get()) is not None:
                stdin.write(request)
                stdin.flush()

    def _read(self, stdout: BinaryIO) -> None:
        with stdout:
            while head := stdout.read(LENGTH.size):
                (length,) = LENGTH.unpack(head)
                body = stdout.read(length)
                if len(body) == length:  # else it was killed in the middle of an answer
                    self._take(msgspec.msgpack.decode(body, type=Answer))
        self._requests.put(None)
        self._process.wait()
        with self._lock:
            self.ended = True
            waiting, self._waiting = self._waiting, {}
        for promise in waiting.values():
            promise.set_exception(self._ended())

    def _take(self, answer: Answer) -> None:
        if isinstance(answer, Ready):
            self._ready = True
            logger.info("verifiers %s runs in process %d", answer.version, self._process.pid)
        elif answer.number == 0:
            self._why_ended = answer if isinstance(answer, Failed) else None
        else:
            with self._lock:
                promise = self._waiting.pop(answer.number)
            promise.set_result(answer)

    def _ended(self) -> ReplaybufError:
        if self._held_up:
            return _HeldUp("the process of verifiers was killed, since another request held it up", name="verifiers")
        if self._ready:
            return TasksetRaised("the process of verifiers ended over it; see standard error", name="verifiers")
        if self._why_ended is not None and PYTHON not in os.environ:
            return MissingExtra("a taskset of verifiers", EXTRA)
        why = "see standard error" if self._why_ended is None else self._why_ended.detail
        return _unfit(why)


def _started() -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            # -P: the folder of the script, with modules of any name, is not where imports look first.
            [_python(), "-P", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C is the generator's, which lets what is in flight finish
        )
    except OSError as error:
        raise _unfit(error.strerror or str(error)) from error


def _python() -> str:
    return os.environ.get(PYTHON) or sys.executable


def _unfit(why: str) -> Invalid:
    python = _python()
    return Invalid(
        f"{python} does not run verifiers: {why}. It needs: {python} -m pip install 'verifiers>=0.4,<0.5' msgspec",
        name=PYTHON,
        value=python,
    )


def _checked(answer: Answer, wanted: type[T]) -> T:
    if isinstance(answer, wanted):
        return answer
    if isinstance(answer, Failed) and answer.reason == "invalid":
        raise Invalid(answer.detail, name="verifiers")
    if isinstance(answer, Failed) and answer.reason == "rewritten":
        raise PlayRewritten(answer.detail, name="verifiers")
    detail = answer.detail if isinstance(answer, Failed) else f"answered with {type(answer).__name__}"
    raise TasksetRaised(detail, name="verifiers")
