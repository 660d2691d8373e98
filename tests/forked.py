"""Processes forked from one that has imported the service: each of hundreds starts without 0.6 s of imports.

A forked process is a process like any other: it has its own id, session, environment, working folder, exit code and
pipes. Python reads `PYTHON...` variables only when an interpreter starts: `can_fork` is false where they differ.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any

IMPORTED = ("tests.forked", "replaybuf.cli.main", "replaybuf.cli.serve", "replaybuf.service.server", "uvloop")

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(list(IMPORTED))


def _interpreter_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith("PYTHON")}


_STARTED_WITH = _interpreter_variables(os.environ)


def can_fork(environment: Mapping[str, str]) -> bool:
    """Return whether an interpreter started with this environment would be the one that processes are forked from."""
    return _interpreter_variables(environment) == _STARTED_WITH


class ForkedProcess:
    """`python -m module arguments` without the start of an interpreter; a part of the API of `subprocess.Popen`."""

    def __init__(self, module: str, arguments: Sequence[str], environment: Mapping[str, str], stderr: IO[str]) -> None:
        reading, writing = os.pipe()
        self.args = [module, *arguments]
        self.stdout = os.fdopen(reading)
        with os.fdopen(writing, "wb") as stdout:
            self._process = _start(module, arguments, environment, stdout, stderr)

    @property
    def pid(self) -> int:
        """Return the id of the process."""
        assert self._process.pid is not None
        return self._process.pid

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


def run_forked(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run `python -m module arguments` to its end, as `subprocess.run` does, without the start of an interpreter."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = _start(module, arguments, environment, stdout, stderr)
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired([module, *arguments], timeout_s)
        written = []
        for file in (stdout, stderr):
            file.seek(0)
            written.append(file.read())
        return subprocess.CompletedProcess([module, *arguments], process.exitcode, *written)


def _start(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], stdout: IO[Any], stderr: IO[Any]
) -> ForkServerProcess:
    process = _forks.Process(
        target=_run,
        args=(module, list(arguments), dict(environment), str(Path.cwd()), _Descriptors(stdout, stderr)),
        daemon=True,
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
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # a forked process of multiprocessing ends without them
