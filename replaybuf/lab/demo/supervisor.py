"""Start, watch and stop the demo's processes.

Life of a child::

    start() ──> running ──(prints "listening on URL")──> ready ──> exited
                   │                                       │
                   └── any exit that was not foreseen ─────┴──> everything stops

- Every child leads its own session, so Ctrl-C in the terminal reaches the demo alone, and everything a child starts
  can be stopped with it. Its output goes straight to a log file: it never waits for the demo to read.
- What ends the demo early is a value, `Stop`: the first of a child's unforeseen exit or a signal to the demo.
- `kill -9` of the demo is answered by the guard (`guard.py`); `kill -9` of the guard counts as a child's exit.

Everything is over within `STOP_WITHIN_S`: SIGTERM to those that use the service, SIGTERM to the rest once they are gone
or `CLIENTS_S` later, SIGKILL to all `FORCE_S` after the start. A second signal to the demo forces at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from replaybuf.errors import ServiceUnavailable
from replaybuf.lab.demo import guard

log = logging.getLogger(__name__)

T = TypeVar("T")

STOP_WITHIN_S = 5.0
CLIENTS_S = 2.0
FORCE_S = 3.25
POLL_S = 0.05
LAST_LINES = 15
BLAME_S = 1.0
"""How long a failed call waits for the exit that may explain it."""

LISTENING = re.compile(r"listening on (http://\S+)")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclasses.dataclass(frozen=True, slots=True)
class Stop:
    """Why the demo ended early: a sentence, the exit code, and the last log lines of the child that caused it."""

    reason: str
    exit_code: int
    log: Path | None = None
    log_lines: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Child:
    """One process: `log_offset` is where its own output begins in `log` (bytes)."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    log_offset: int
    may_finish: bool
    stops_last: bool
    exited: asyncio.Future[int]

    @property
    def pid(self) -> int:
        """Process id, which is also its process group and session."""
        return self.process.pid

    def output(self) -> str:
        """Read what this process has printed so far."""
        with self.log.open("rb") as file:
            file.seek(self.log_offset)
            return file.read().decode("utf-8", "replace")

    def last_line(self) -> str:
        """Read the last whole line of it; empty where there is none yet."""
        whole, _, _ = self.output().rpartition("\n")
        return whole.rpartition("\n")[2]


class Supervisor:
    """Own the children. Use as `async with`; leaving it stops them all. Every method belongs to the one event loop."""

    def __init__(self, logs: Path, *, keep_open: Sequence[int] = ()) -> None:
        """Write logs to `logs/NAME.log`; the guard holds the file descriptors `keep_open` as long as the demo does."""
        self.children: list[Child] = []
        self._logs = logs
        self._keep_open = tuple(keep_open)
        self._guard: Child | None = None
        self._loop = asyncio.get_running_loop()
        self._stop: asyncio.Future[Stop] = self._loop.create_future()
        self._forced = asyncio.Event()
        self._stopping = False

    async def __aenter__(self) -> Self:
        self._logs.mkdir(parents=True, exist_ok=True)
        for number in SIGNALS:
            self._loop.add_signal_handler(number, self._on_signal, number)
        self._guard = self._spawn(
            "guard", [sys.executable, "-I", "-S", guard.__file__], stdin=subprocess.PIPE, pass_fds=self._keep_open
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._stop_all()
        finally:
            for number in SIGNALS:
                self._loop.remove_signal_handler(number)

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        may_finish: bool = False,
        stops_last: bool = False,
    ) -> Child:
        """Start a child. Its exit ends the demo, unless it `may_finish` and returns 0.

        `stops_last`: others use it, so at the end it is stopped when those are gone.
        """
        child = self._spawn(name, command, environment=environment, may_finish=may_finish, stops_last=stops_last)
        self._tell_guard(f"+{child.pid}")
        self.children.append(child)
        log.info("started name=%s pid=%d", name, child.pid)
        return child

    async def listening(self, child: Child, timeout_s: float) -> str:
        """Wait until the child prints where it listens; return the URL. Raises `ServiceUnavailable` on time-out."""
        try:
            async with asyncio.timeout(timeout_s):
                while not (found := LISTENING.search(child.output())):  # noqa: ASYNC110 - another process writes the file
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise ServiceUnavailable(
                f"{child.name} did not listen within {timeout_s:g} s; its log: {child.log}",
                name=child.name,
                value=None,
                bound=timeout_s,
            ) from None
        return found[1]

    async def finished(self, child: Child) -> None:
        """Wait for an exit with code 0. Any other exit stops the demo; then this never returns and is cancelled."""
        # shielded: cancelling the waiter must not cancel what it waits for, or the child would pass for gone
        if await asyncio.shield(child.exited) != 0:
            await asyncio.Event().wait()

    async def supervise(self, story: Coroutine[Any, Any, T]) -> T | Stop:
        """Run `story` to its end, or to the first `Stop`. What it raises by itself passes through."""
        task = asyncio.create_task(story)
        try:
            ends: set[asyncio.Future[Any]] = {task, self._stop}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and task.exception() is not None:
                # a call that failed because a child died is told as that child's death
                await asyncio.wait({self._stop}, timeout=BLAME_S)
            if self._stop.done():
                return self._stop.result()
            return task.result()
        finally:
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                task.exception()  # told already, or an answer to being cancelled

    def _spawn(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        may_finish: bool = False,
        stops_last: bool = False,
        stdin: int = subprocess.DEVNULL,
        pass_fds: Sequence[int] = (),
    ) -> Child:
        path = self._logs / f"{name}.log"
        with path.open("ab") as log:
            offset = log.tell()
            child = Child(
                name=name,
                process=subprocess.Popen(
                    command,
                    stdin=stdin,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **(environment or {})},
                    start_new_session=True,
                    pass_fds=pass_fds,
                ),
                log=path,
                log_offset=offset,
                may_finish=may_finish,
                stops_last=stops_last,
                exited=self._loop.create_future(),
            )
        threading.Thread(target=self._wait, args=(child,), name=f"wait-{name}", daemon=True).start()
        return child

    def _wait(self, child: Child) -> None:
        """Wait for the exit, in a thread of its own."""
        code = child.process.wait()
        try:
            self._loop.call_soon_threadsafe(self._on_exit, child, code)
        except RuntimeError:  # the loop is closed: the demo ended before this child could be reaped
            return

    def _on_exit(self, child: Child, code: int) -> None:
        log.info("exited name=%s pid=%d code=%d", child.name, child.pid, code)
        child.exited.set_result(code)
        if child is not self._guard:
            guard.signal_group(child.pid, signal.SIGKILL)  # what the child itself started and left behind
            self._tell_guard(f"-{child.pid}")
        if self._stopping or self._stop.done() or (child.may_finish and code == 0):
            return
        lines = tuple(child.output().splitlines()[-LAST_LINES:])
        self._stop.set_result(Stop(f"{child.name} (pid {child.pid}) {_explained(code)}", 1, child.log, lines))

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stopping or self._stop.done():
            self._forced.set()
            return
        name = "Ctrl-C" if number == signal.SIGINT else number.name
        self._stop.set_result(Stop(f"stopped by {name}", 128 + number))

    def _tell_guard(self, line: str) -> None:
        if self._guard is None or self._guard.process.stdin is None or self._guard.exited.done():
            return
        try:
            self._guard.process.stdin.write(f"{line}\n".encode())
            self._guard.process.stdin.flush()
        except BrokenPipeError:  # the guard has just died; its exit is about to stop the demo
            return

    async def _stop_all(self) -> None:
        self._stopping = True
        log.info("stopping")
        force_at = self._loop.time() + FORCE_S
        await self._end([child for child in self.children if not child.stops_last], force_at - FORCE_S + CLIENTS_S)
        await self._end([child for child in self.children if child.stops_last], force_at)
        await self._gone(self.children, self._loop.time() if self._forced.is_set() else force_at)
        for child in self.children:
            if not child.exited.done():  # the number of a group that is gone may be somebody else's by now
                guard.signal_group(child.pid, signal.SIGKILL)
        await self._gone(self.children, force_at + STOP_WITHIN_S - FORCE_S)
        if self._guard is not None and self._guard.process.stdin is not None:
            self._guard.process.stdin.close()  # nothing is under guard any more: it just leaves
            await self._gone([self._guard], force_at + STOP_WITHIN_S - FORCE_S)

    async def _end(self, children: Sequence[Child], until: float) -> None:
        for child in children:
            if not child.exited.done():
                guard.signal_group(child.pid, signal.SIGTERM)
        forced = asyncio.create_task(self._forced.wait())
        gone = asyncio.create_task(self._gone(children, until))
        await asyncio.wait({forced, gone}, return_when=asyncio.FIRST_COMPLETED)
        for task in (forced, gone):
            task.cancel()

    async def _gone(self, children: Sequence[Child], until: float) -> None:
        left = [child.exited for child in children if not child.exited.done()]
        if left:
            await asyncio.wait(left, timeout=max(0.0, until - self._loop.time()))


def _explained(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    return f"was killed by {signal.Signals(-code).name}"
