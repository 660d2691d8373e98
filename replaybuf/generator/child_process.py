"""Child processes that answer numbered requests over their standard streams."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, BinaryIO, Generic, TypeVar

import msgspec

from replaybuf.errors import ReplaybufError
from replaybuf.wire.decoding import prepared
from replaybuf.wire.pipes import framed, received

_END_S = 3.0
"""A process gets so long to end by itself."""


AnswerT = TypeVar("AnswerT", bound=msgspec.Struct)


class ChildEnded(ReplaybufError):
    """The process ended before it answered."""


class ChildProcess(Generic[AnswerT]):
    """A process that runs `command` and answers with messages of type `answers`.

    One thread writes to it and one thread reads from it, so neither pipe blocks a caller. The process sends an answer
    with number 0 first, when it is ready or cannot start: `first`. Raises `OSError` if the command does not run.
    """

    def __init__(self, command: Sequence[str], answers: Any) -> None:
        self.first: Future[AnswerT] = Future()
        self.ended = False
        self._answers: msgspec.msgpack.Decoder[AnswerT] = msgspec.msgpack.Decoder(prepared(answers))
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[AnswerT]] = {}
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # A session of its own: a Ctrl-C is for the generator, which finishes what is in flight.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self.pid = self._process.pid
        self._threads = [
            threading.Thread(target=work, args=(pipe,), name=f"replaybuf-child-{self.pid}", daemon=True)
            for work, pipe in ((self._write, self._process.stdin), (self._read, self._process.stdout))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, request: msgspec.Struct) -> tuple[int, Future[AnswerT]]:
        """Send a request; return its number and its answer to come, which may raise `ChildEnded`."""
        number, future = next(self._numbers), Future[AnswerT]()
        future.set_running_or_notify_cancel()  # so that cancelling a waiting coroutine leaves the future alone
        with self._lock:
            if self.ended:
                future.set_exception(_ended())
            else:
                self._waiting[number] = future
                self._outgoing.put(framed(number, request))
        return number, future

    def post(self, message: msgspec.Struct) -> None:
        """Send a message that has no answer."""
        self._outgoing.put(framed(0, message))

    def answered(self, number: int) -> bool:
        """Return whether a request has an answer or never gets one."""
        with self._lock:
            return number not in self._waiting

    def kill(self) -> None:
        """Kill the process and what it started."""
        if not self.ended:
            with contextlib.suppress(ProcessLookupError):  # it ends just now
                os.killpg(self.pid, signal.SIGKILL)

    def end(self) -> None:
        """Let the process end by itself, kill it if that takes long, and wait until it is gone."""
        self._outgoing.put(None)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()
        for thread in self._threads:
            thread.join(_END_S)

    def _write(self, stdin: BinaryIO) -> None:
        with contextlib.suppress(OSError), stdin:  # `_read` reports the end of the process
            while (message := self._outgoing.get()) is not None:
                stdin.write(message)
                stdin.flush()

    def _read(self, stdout: BinaryIO) -> None:
        with stdout:
            for number, answer in received(stdout, self._answers):
                if number == 0:
                    self.first.set_result(answer)
                    continue
                with self._lock:
                    future = self._waiting.pop(number)
                future.set_result(answer)
        self._outgoing.put(None)
        self._process.wait()
        with self._lock:
            self.ended = True
            waiting, self._waiting = self._waiting, {}
        for future in (self.first, *waiting.values()):
            if not future.done():
                future.set_exception(_ended())


def _ended() -> ChildEnded:
    return ChildEnded("the process ended before it answered", name="process")
