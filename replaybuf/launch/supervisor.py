"""Start, watch, restart and stop processes.

Life cycle of a child::

    start() ──> running ──(prints "listening on URL")──> ready ──> exited
                   │                                       │
                   └────────── unexpected exit ────────────┴──> everything stops

- Every child leads its own session: Ctrl-C in the terminal reaches only the demo, and all that a child starts is
  stopped with it. Its output goes to a log file, so it never waits for the demo to read.
- The first unexpected exit, or a signal to the demo, ends the demo early; it is a value, `Stop`.
- The guard (`guard.py`) handles `kill -9` of the demo; `kill -9` of the guard is the unexpected exit of a child.

A stop takes at most `STOP_WITHIN_S`: SIGTERM to the clients of the service, SIGTERM to the others when the clients are
gone or after `CLIENTS_S`, SIGKILL to all after `FORCE_S`. A second signal to the demo sends SIGKILL at once.
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
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from replaybuf.errors import ServiceUnavailable
from replaybuf.launch import guard

logger = logging.getLogger(__name__)

T = TypeVar("T")

STOP_WITHIN_S = 5.0
CLIENTS_S = 2.0
FORCE_S = 3.25
POLL_S = 0.05
LAST_LINES = 15
EXIT_AFTER_FAULT_S = 1.0
"""How long a failed call waits for the exit of a child that may have caused it."""

LISTENING = re.compile(r"listening on (http://\S+)")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclasses.dataclass(frozen=True, slots=True)
class Stop:
    """Why the demo ended early: reason, exit code, and the last log lines of the child that caused it."""

    reason: str
    exit_code: int
    log: Path | None = None
    log_lines: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Child:
    """One process. `log_offset`: position in `log` where its own output starts, bytes."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    log_offset: int
    may_finish: bool
    stops_last: bool
    exited: asyncio.Future[int]

    @property
    def pid(self) -> int:
        """Process id, also of its process group and session."""
        return self.process.pid

    def output(self) -> str:
        """Read what this process has printed so far."""
        with self.log.open("rb") as file:
            file.seek(self.log_offset)
            return file.read().decode("utf-8", "replace")

    def last_line(self) -> str:
        """Return the last complete line of its output; empty if there is none."""
        return self.output().rpartition("\n")[0].rpartition("\n")[2]


class Supervisor:
    """Owner of the children, for `async with`; leaving it stops them all. All methods belong to one event loop."""

    def __init__(self, logs: Path, *, keep_open: Sequence[int] = ()) -> None:
        """Write logs to `logs/NAME.log`; the guard keeps the file descriptors `keep_open` open while it lives."""
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

    async def __aexit__(self, *_: object) -> None:
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

        `stops_last`: others use it, so a stop ends it after them.
        """
        child = self._spawn(name, command, environment=environment, may_finish=may_finish, stops_last=stops_last)
        self._write_to_guard(f"+{child.pid}")
        self.children.append(child)
        logger.info("started name=%s pid=%d", name, child.pid)
        return child

    async def listening(self, child: Child, timeout_s: float) -> str:
        """Wait until the child prints its address; return the URL. Raises `ServiceUnavailable` after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not (found := LISTENING.search(child.output())):  # noqa: ASYNC110 - another process writes the file
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            detail = f"{child.name} did not listen within {timeout_s:g} s; its log: {child.log}"
            raise ServiceUnavailable(detail, name=child.name, value=None, bound=timeout_s) from None
        return found[1]

    async def finished(self, child: Child) -> None:
        """Wait for an exit with code 0. Any other exit stops the demo, which cancels this call."""
        # Shielded: a cancelled waiter must not cancel the future, or the child would count as exited.
        if await asyncio.shield(child.exited) != 0:
            await asyncio.Event().wait()

    async def supervise(self, script: Coroutine[Any, Any, T]) -> T | Stop:
        """Run `script` to its end or to the first `Stop`. Raises what `script` raises."""
        task = asyncio.create_task(script)
        try:
            ends: set[asyncio.Future[Any]] = {task, self._stop}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and task.exception() is not None:
                # A call that failed because a child died is reported as the exit of that child.
                await asyncio.wait({self._stop}, timeout=EXIT_AFTER_FAULT_S)
            return self._stop.result() if self._stop.done() else task.result()
        finally:
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                task.exception()  # mark it as retrieved: it was raised above, or came from the cancellation

    # ------------------------------------------------------------------ processes and signals

    def _spawn(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        pass_fds: Sequence[int] = (),
        may_finish: bool = False,
        stops_last: bool = False,
    ) -> Child:
        path = self._logs / f"{name}.log"
        with path.open("ab") as log:
            offset = log.tell()
            process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
                pass_fds=pass_fds,
            )
        child = Child(name, process, path, offset, may_finish, stops_last, self._loop.create_future())
        threading.Thread(target=self._wait, args=(child,), name=f"wait-{name}", daemon=True).start()
        return child

    def _wait(self, child: Child) -> None:
        """Wait for the exit, in a thread of its own."""
        code = child.process.wait()
        try:
            self._loop.call_soon_threadsafe(self._on_exit, child, code)
        except RuntimeError:  # race: the demo closed its loop before this exit
            return

    def _on_exit(self, child: Child, code: int) -> None:
        logger.info("exited name=%s pid=%d code=%d", child.name, child.pid, code)
        child.exited.set_result(code)
        if child is not self._guard:
            guard.signal_group(child.pid, signal.SIGKILL)  # processes that the child started and left behind
            self._write_to_guard(f"-{child.pid}")
        if self._stopping or self._stop.done() or (child.may_finish and code == 0):
            return
        lines = tuple(child.output().splitlines()[-LAST_LINES:])
        how = f"exited with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        self._stop.set_result(Stop(f"{child.name} (pid {child.pid}) {how}", 1, child.log, lines))

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stopping or self._stop.done():
            self._forced.set()
            return
        name = "Ctrl-C" if number == signal.SIGINT else number.name
        self._stop.set_result(Stop(f"stopped by {name}", 128 + number))

    def _write_to_guard(self, line: str) -> None:
        if self._guard is None or self._guard.process.stdin is None or self._guard.exited.done():
            return
        try:
            self._guard.process.stdin.write(f"{line}\n".encode())
            self._guard.process.stdin.flush()
        except BrokenPipeError:  # race: the guard has just died; its exit stops the demo
            return

    # ------------------------------------------------------------------ stop

    async def _stop_all(self) -> None:
        self._stopping = True
        logger.info("stopping")
        force_at = self._loop.time() + FORCE_S
        clients = [child for child in self.children if not child.stops_last]
        await self._terminate(clients, force_at - FORCE_S + CLIENTS_S)
        await self._terminate([child for child in self.children if child.stops_last], force_at)
        await self._wait_for_exits(self.children, self._loop.time() if self._forced.is_set() else force_at)
        for child in self.children:
            if not child.exited.done():  # the number of a group that is gone may belong to another process
                guard.signal_group(child.pid, signal.SIGKILL)
        end_at = force_at + STOP_WITHIN_S - FORCE_S
        await self._wait_for_exits(self.children, end_at)
        if self._guard is not None and self._guard.process.stdin is not None:
            self._guard.process.stdin.close()  # no group is left, so the guard ends
            await self._wait_for_exits([self._guard], end_at)

    async def _terminate(self, children: Sequence[Child], until: float) -> None:
        """Send SIGTERM and wait for the exits, at most until `until` or a second signal."""
        for child in children:
            if not child.exited.done():
                guard.signal_group(child.pid, signal.SIGTERM)
        forced = asyncio.create_task(self._forced.wait())
        gone = asyncio.create_task(self._wait_for_exits(children, until))
        await asyncio.wait({forced, gone}, return_when=asyncio.FIRST_COMPLETED)
        for task in (forced, gone):
            task.cancel()

    async def _wait_for_exits(self, children: Iterable[Child], until: float) -> None:
        left = [child.exited for child in children if not child.exited.done()]
        if left:
            await asyncio.wait(left, timeout=max(0.0, until - self._loop.time()))
