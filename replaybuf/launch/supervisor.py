"""Start, watch, restart and stop processes.

Life cycle of a child::

    start() ──> running ──> exited ──(code 0, and it may finish)──> done
                   ▲          │
                   └──(pause)─┴──(no restart left)──> everything stops

- Every child leads its own session: Ctrl-C in the terminal reaches only this process, and all that a child starts is
  stopped with it. Its output goes to a log file, so it never waits for a reader.
- An unexpected exit without a restart, or a signal to this process, ends the session early; it is a value, `Stop`.
- The guard (`guard.py`) handles `kill -9` of this process; `kill -9` of the guard is an unexpected exit. If both are
  killed at once, the commands of this package end by themselves.

Children stop in phases, lowest first: SIGTERM to a phase when the earlier ones are gone, or at the end of the grace
time; SIGKILL to all `LAST_PHASE_S` later. A second signal to this process sends SIGKILL at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import msgspec
from msgspec import Meta

from replaybuf.errors import Invalid, ServiceUnavailable, counted
from replaybuf.launch import guard

logger = logging.getLogger(__name__)

T = TypeVar("T")
Seconds = Annotated[float, Meta(gt=0, le=86400.0)]

GRACE_S = 2.0
"""Default time for all phases but the last to stop."""
LAST_PHASE_S = 1.25
KILL_S = 1.75
"""How long killed processes may take to end."""
STOP_WITHIN_S = GRACE_S + LAST_PHASE_S + KILL_S
POLL_S = 0.05
LAST_LINES = 15
OUTPUT_BYTES = 1 << 20
EXIT_AFTER_FAULT_S = 1.0
"""How long a failed call waits for the exit of a child that may have caused it."""

LISTENING = re.compile(r"listening on (http://[^\s\"]+)")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclasses.dataclass(frozen=True, slots=True)
class Stop:
    """Why a session ended early: reason, exit code, and the last log lines of the child that caused it."""

    reason: str
    exit_code: int
    log: Path | None = None
    log_lines: tuple[str, ...] = ()


class Restarts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bounds for starting a failed process again."""

    most: Annotated[
        int,
        Meta(
            ge=0,
            le=1000,
            description="Maximum number of restarts of one process in a row. After that everything stops.",
        ),
    ] = 5
    first_pause_s: Annotated[
        Seconds, Meta(description="Pause before the first restart, in seconds; it doubles with every further one.")
    ] = 1.0
    longest_pause_s: Annotated[Seconds, Meta(description="Longest pause before a restart, in seconds.")] = 30.0
    reset_s: Annotated[
        Seconds,
        Meta(
            description="A process that has run for this many seconds gets all its restarts back; an engine must run "
            "for the time of its start in addition."
        ),
    ] = 60.0

    def pause_s(self, failures: int) -> float:
        """Return the pause before the next start, after so many failures in a row."""
        return min(self.first_pause_s * 2.0 ** (failures - 1), self.longest_pause_s)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What to start. Its exit ends the session, unless it `may_finish` and returns 0, or has a restart left.

    `final_codes`: exit codes that no restart can cure, each with its meaning. `stop_phase`: programs of a lower phase
    stop first. `ends_children`: SIGTERM goes to the process alone, which ends its own children in order.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    folder: Path | None = None
    may_finish: bool = False
    stop_phase: int = 0
    ends_children: bool = False
    restarts: Restarts | None = None
    final_codes: Mapping[int, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Child:
    """One process of a program. `log_offset`: position in `log` where its own output starts, bytes.

    `failures`: exits in a row before this start. `done` is shared by all processes of a program.
    """

    program: Program
    process: subprocess.Popen[bytes]
    log: Path
    log_offset: int
    started_s: float
    failures: int
    exited: asyncio.Future[int]
    done: asyncio.Future[None]

    @property
    def name(self) -> str:
        """Name of its program."""
        return self.program.name

    @property
    def pid(self) -> int:
        """Process id, also of its process group and session."""
        return self.process.pid

    def output(self) -> str:
        """Read what this process has printed last, at most `OUTPUT_BYTES`."""
        with self.log.open("rb") as file:
            file.seek(max(self.log_offset, file.seek(0, os.SEEK_END) - OUTPUT_BYTES))
            return file.read(OUTPUT_BYTES).decode("utf-8", "replace")

    def last_line(self) -> str:
        """Return the last complete line of its output; empty if there is none."""
        return self.output().rpartition("\n")[0].rpartition("\n")[2]


class Supervisor:
    """Owner of the children, for `async with`; leaving it stops them all. All methods belong to one event loop."""

    def __init__(
        self,
        logs: Path,
        *,
        keep_open: Sequence[int] = (),
        grace_s: float = GRACE_S,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Write logs to `logs/NAME.log`; the guard keeps the file descriptors `keep_open` open while it lives.

        `report` gets one line for each restart.
        """
        self.children: list[Child] = []
        self._logs = logs
        self._keep_open = tuple(keep_open)
        self._grace_s = grace_s
        self._report = report
        self._guard: Child | None = None
        self._loop = asyncio.get_running_loop()
        self._stop: asyncio.Future[Stop] = self._loop.create_future()
        self._forced = asyncio.Event()
        self._stopping = False
        self._start_s: dict[str, float] = {}

    async def __aenter__(self) -> Self:
        self._logs.mkdir(parents=True, exist_ok=True)
        for number in SIGNALS:
            self._loop.add_signal_handler(number, self._on_signal, number)
        program = Program(name="guard", command=[sys.executable, "-I", "-S", guard.__file__])
        self._guard = self._spawn(program, stdin=subprocess.PIPE, pass_fds=self._keep_open)
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._stop_all()
        finally:
            for number in SIGNALS:
                self._loop.remove_signal_handler(number)

    def start(self, program: Program, *, slow: bool = False) -> Child:
        """Start a child. Raises `Invalid` if its command cannot be run.

        `slow`: an exit before `has_started` is a failed start, however long it took.
        """
        child = self._spawn(program)
        self._register(child)
        if slow:
            self._start_s[program.name] = math.inf
        return child

    def has_started(self, program: Program) -> None:
        """Note that a slow program is up now."""
        (child,) = (child for child in self.children if child.program is program)
        self._start_s[program.name] = self._loop.time() - child.started_s

    async def listening(self, child: Child, timeout_s: float) -> str:
        """Wait until the child prints its address; return the URL. Raises `ServiceUnavailable` after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not (match := LISTENING.search(child.output())):  # noqa: ASYNC110 - another process writes the file
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            detail = f"{child.name} did not listen within {timeout_s:g} s; its log: {child.log}"
            raise ServiceUnavailable(detail, name=child.name, value=None, bound=timeout_s) from None
        return match[1]

    async def finished(self, child: Child) -> None:
        """Wait until a process of this program has exited with code 0."""
        # Shielded: a cancelled waiter must not cancel the future that others wait for.
        await asyncio.shield(child.done)

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
        program: Program,
        *,
        failures: int = 0,
        done: asyncio.Future[None] | None = None,
        stdin: int = subprocess.DEVNULL,
        pass_fds: Sequence[int] = (),
    ) -> Child:
        path = self._logs / f"{program.name}.log"
        with path.open("ab") as log:
            offset = log.tell()
            try:
                process = subprocess.Popen(
                    program.command,
                    stdin=stdin,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **program.environment, guard.PARENT: str(os.getpid())},
                    cwd=program.folder,
                    start_new_session=True,
                    pass_fds=pass_fds,
                )
            except OSError as error:
                detail = f"{program.name} cannot be started: {error}"
                raise Invalid(detail, name=program.name, value=program.command[0]) from error
        exited, started_s = self._loop.create_future(), self._loop.time()
        done = done or self._loop.create_future()
        child = Child(program, process, path, offset, started_s, failures, exited, done)
        threading.Thread(target=self._wait, args=(child,), name=f"wait-{program.name}", daemon=True).start()
        return child

    def _register(self, child: Child) -> None:
        self._write_to_guard(f"+{child.pid}")
        self.children.append(child)
        logger.info("started name=%s pid=%d", child.name, child.pid)

    def _wait(self, child: Child) -> None:
        """Wait for the exit, in a thread of its own."""
        code = child.process.wait()
        try:
            self._loop.call_soon_threadsafe(self._on_exit, child, code)
        except RuntimeError:  # race: the session closed its loop before this exit
            return

    def _on_exit(self, child: Child, code: int) -> None:
        logger.info("exited name=%s pid=%d code=%d", child.name, child.pid, code)
        child.exited.set_result(code)
        if child is not self._guard:
            guard.signal_group(child.pid, signal.SIGKILL)  # processes that the child started and left behind
            self._write_to_guard(f"-{child.pid}")
        if self._stopping or self._stop.done():
            return
        if child.program.may_finish and code == 0:
            child.done.set_result(None)
            return
        how = f"exited with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        if not self._restart_later(child, code, how):
            self._stop.set_result(self._stop_of(child, code, how))

    def _stop_of(self, child: Child, code: int, how: str) -> Stop:
        restarts = f" after {counted(child.failures, 'restart')}" if child.failures else ""
        meaning = child.program.final_codes.get(code)
        lines = tuple(child.output().splitlines()[-LAST_LINES:])
        reason = f"{child.name} (pid {child.pid}) {how}{restarts}{f': {meaning}' if meaning else ''}"
        return Stop(reason, 1, child.log, lines)

    def _restart_later(self, child: Child, code: int, how: str) -> bool:
        """Start the program again after a pause; return False if it has no restart left."""
        restarts = child.program.restarts
        if restarts is None or code in child.program.final_codes:
            return False
        start_s = self._start_s.get(child.name, 0.0)
        recovered = self._loop.time() - child.started_s >= start_s + restarts.reset_s
        failures = 1 if recovered else child.failures + 1
        if failures > restarts.most:
            return False
        pause_s = restarts.pause_s(failures)
        self._loop.call_later(pause_s, self._restart, child, failures)
        logger.warning("restarting name=%s pause_s=%g failures=%d", child.name, pause_s, failures)
        self._report(
            f"{child.name} (pid {child.pid}) {how}; restart {failures} of {restarts.most} in {pause_s:g} s; "
            f"its log: {child.log}"
        )
        return True

    def _restart(self, child: Child, failures: int) -> None:
        if self._stopping or self._stop.done():
            return
        try:
            again = self._spawn(child.program, failures=failures, done=child.done)
        except Invalid as error:
            self._stop.set_result(Stop(error.detail, 1, child.log))
            return
        self.children.remove(child)
        self._register(again)

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
        except BrokenPipeError:  # race: the guard has just died; its exit stops the session
            return

    # ------------------------------------------------------------------ stop

    async def _stop_all(self) -> None:
        self._stopping = True
        logger.info("stopping")
        grace_at = self._loop.time() + self._grace_s
        force_at = grace_at + LAST_PHASE_S
        phases = sorted({child.program.stop_phase for child in self.children})
        for phase in phases:
            members = [child for child in self.children if child.program.stop_phase == phase]
            await self._terminate(members, force_at if phase == phases[-1] else grace_at)
        for child in self.children:
            if not child.exited.done():  # the number of a group that is gone may belong to another process
                guard.signal_group(child.pid, signal.SIGKILL)
        end_at = self._loop.time() + KILL_S
        await self._wait_for_exits(self.children, end_at)
        if self._guard is not None and self._guard.process.stdin is not None:
            self._guard.process.stdin.close()  # no group is left, so the guard ends
            await self._wait_for_exits([self._guard], end_at)

    async def _terminate(self, children: Sequence[Child], until: float) -> None:
        """Send SIGTERM and wait for the exits, at most until `until` or a second signal."""
        for child in children:
            if child.exited.done():
                continue
            if child.program.ends_children:
                child.process.terminate()
            else:
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
