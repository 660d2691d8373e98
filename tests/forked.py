"""Processes forked from one that has imported the service: each of hundreds starts without 0.6 s of imports.

A second fork server also has torch and the trainer, which take 6 s to import. It starts with the first process that
needs them: a process forked from it costs twice as much as from the first one, because the pages of torch are copied.

A forked process is a process like any other: it has its own id, session, environment, working folder, exit code and
pipes. Python reads `PYTHON...` variables only when an interpreter starts: `can_fork` is false where they differ.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import functools
import math
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any, Self
from unittest import mock

from tests.waiting import until

_COMMANDS = ("tests.forked", "replaybuf.cli.main", "replaybuf.cli.generate", "replaybuf.cli.stage", "uvloop")
_SERVICE = ("replaybuf.cli.serve", "replaybuf.service.server", "anyio._backends._asyncio")
_TRAINER = ("replaybuf_trainer.trainer", "replaybuf_trainer.models.loading", "torch.distributed.fsdp")


class _ForkServer(forkserver.ForkServer):
    """A server of its own: `multiprocessing` has a single one, whose last preload replaces the others."""

    def __init__(self, *preload: str) -> None:
        super().__init__()
        self.set_forkserver_preload([*preload, "tests.frozen"])


_SERVERS = {False: _ForkServer(*_COMMANDS, *_SERVICE), True: _ForkServer(*_COMMANDS, *_TRAINER)}
_starting = threading.Lock()


class ForkedFunction(ForkServerProcess):
    """A `multiprocessing.Process`; `trainer`: forked from a process that has imported torch and the trainer."""

    def __init__(self, *arguments: Any, trainer: bool = False, **fields: Any) -> None:
        super().__init__(*arguments, **fields)
        self._trainer = trainer

    def start(self) -> None:
        """Start the process."""
        connect = _SERVERS[self._trainer].connect_to_new_process
        with _starting, mock.patch.object(forkserver, "connect_to_new_process", connect):
            super().start()


def _interpreter_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith("PYTHON")}


_STARTED_WITH = _interpreter_variables(os.environ)


def can_fork(environment: Mapping[str, str]) -> bool:
    """Return whether an interpreter started with this environment would be the one that processes are forked from."""
    return _interpreter_variables(environment) == _STARTED_WITH


class ForkedProcess:
    """`python -m module arguments` without the start of an interpreter; a part of the API of `subprocess.Popen`.

    `stderr`: where it is written; None is a pipe. `folder`: where the process works. `trainer`: with torch imported.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        stderr: IO[str] | None,
        *,
        folder: Path | None = None,
        trainer: bool = False,
    ) -> None:
        self.args = [module, *arguments]
        with contextlib.ExitStack() as ends:
            self.stdout, output = _pipe(ends)
            self.stderr: IO[str] | None = None
            if stderr is None:
                self.stderr, stderr = _pipe(ends)
            self._process = _start(self.args, environment, output, stderr, folder, trainer)

    @property
    def pid(self) -> int:
        """Return the id of the process."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Return the exit code, minus the number of a signal that ended it; None while the process runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self._process.exitcode

    def wait(self, timeout_s: float) -> int:
        """Wait until the process ends; return its exit code, minus the number of a signal that ended it."""
        self._process.join(timeout_s)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout_s)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, if the process runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process, if it runs."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout_s: float) -> tuple[str, str]:
        """Read both pipes to their end, and wait for that of the process; return what came."""
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            reads = [pool.submit(_read, stream) for stream in (self.stdout, self.stderr)]
            self.wait(timeout_s)
            output, errors = (read.result(timeout_s) for read in reads)
        return output, errors

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()


class AwaitedProcess:
    """A forked process in an event loop; a part of the API of `asyncio.subprocess.Process`."""

    def __init__(self, process: ForkedProcess) -> None:
        self._process = process
        self.stdout, self.stderr = asyncio.StreamReader(), asyncio.StreamReader()
        self.kill, self.send_signal = process.kill, process.send_signal

    async def connect(self) -> Self:
        """Read from both pipes."""
        loop = asyncio.get_running_loop()
        for reader, pipe in ((self.stdout, self._process.stdout), (self.stderr, self._process.stderr)):
            await loop.connect_read_pipe(functools.partial(asyncio.StreamReaderProtocol, reader), pipe)
        return self

    @property
    def returncode(self) -> int | None:
        """Return the exit code; None while the process runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait until the process ends; return its exit code."""
        await until(lambda: self._process.poll() is not None, math.inf)
        return self._process.wait(0)

    async def communicate(self) -> tuple[bytes, bytes]:
        """Read both pipes to their end, and wait for that of the process; return what came."""
        output, errors, _ = await asyncio.gather(self.stdout.read(), self.stderr.read(), self.wait())
        return output, errors


async def fork_replaybuf(*arguments: str, trainer: bool = False) -> AwaitedProcess:
    """Start `replaybuf` with these arguments; the caller awaits it."""
    process = ForkedProcess("replaybuf", arguments, os.environ, None, trainer=trainer)
    return await AwaitedProcess(process).connect()


def fork_program(program: str, folder: Path, **variables: str) -> ForkedProcess:
    """Start a program that needs torch, with `folder` as working folder; its lines come as they are printed."""
    name = f"program_{len(list(folder.glob('program_*.py')))}"
    (folder / f"{name}.py").write_text(f"import sys\nsys.stdout.reconfigure(line_buffering=True)\n{program}")
    return ForkedProcess(name, [], os.environ | variables, None, folder=folder, trainer=True)


def run_forked(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str] = os.environ,
    timeout_s: float = 60.0,
    *,
    folder: Path | None = None,
    trainer: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m module arguments` to its end, as `subprocess.run` does, without the start of an interpreter."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        command = [module, *arguments]
        process = _start(command, environment, stdout, stderr, folder, trainer)
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(command, timeout_s)
        written = []
        for file in (stdout, stderr):
            file.seek(0)
            written.append(file.read())
        return subprocess.CompletedProcess(command, process.exitcode, *written)


def _pipe(ends: contextlib.ExitStack) -> tuple[IO[str], IO[str]]:
    """Return what this process reads, and what the other one writes; `ends` closes that in this process."""
    reading, writing = os.pipe()
    return os.fdopen(reading), ends.enter_context(os.fdopen(writing, "w"))


def _read(stream: IO[str] | None) -> str:
    if stream is None or stream.closed:
        return ""
    with stream:
        return stream.read()


def _start(
    command: Sequence[str],
    environment: Mapping[str, str],
    stdout: IO[Any],
    stderr: IO[Any],
    folder: Path | None,
    trainer: bool,
) -> ForkedFunction:
    module, *arguments = command
    process = ForkedFunction(
        target=_run,
        args=(module, arguments, dict(environment), str(folder or Path.cwd()), _Descriptors(stdout, stderr)),
        daemon=True,
        trainer=trainer,
    )
    process.start()
    return process


class _Descriptors:
    """Standard output and error of the new process, duplicated when `multiprocessing` pickles them during its start."""

    def __init__(self, *files: IO[Any]) -> None:
        self._files = files

    def __reduce__(self) -> tuple[Any, ...]:
        return _detach, tuple(DupFd(file.fileno()) for file in self._files)


def _detach(*descriptors: Any) -> list[int]:
    return [descriptor.detach() for descriptor in descriptors]


def _run(module: str, arguments: list[str], environment: dict[str, str], folder: str, outputs: list[int]) -> None:
    """Become the process: own session, so that a signal to its group reaches its Valkey and nothing else."""
    os.setsid()
    for number, output in enumerate(outputs, start=1):
        os.dup2(output, number)
        os.close(output)
    os.chdir(folder)
    sys.path.insert(0, folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # a forked process of multiprocessing ends without them
