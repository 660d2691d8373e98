"""Child processes that are killed, stopped, restarted, and always ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import redis

from replaybuf.store.redis.embedded import valkey_binary
from tests.waiting import eventually

END_TIMEOUT_S = 10.0
LOADING_TIMEOUT_S = 60.0  # an append-only file of many faults on a busy machine
_VALKEY_CONFIG = """\
port {port}
bind 127.0.0.1
unixsocket {folder}/valkey.sock
dir {folder}
appendonly yes
appendfsync always
maxmemory-policy noeviction
repl-diskless-sync-delay 0
save ""
"""


class Child:
    """One process of a kind (`role`), started again with the same command after a kill. Its output goes to a log."""

    def __init__(self, name: str, role: str, command: Sequence[str], folder: Path) -> None:
        self.name, self.role = name, role
        self.log = folder / f"{name}.log"
        self.stopped = False
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )
        self.stopped = False

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code, None while it runs; negative where a signal ended it."""
        return self._process.poll() if self._process else None

    def kill(self) -> None:
        """Kill it with SIGKILL, and wait until the kernel has taken it away."""
        self._signal(signal.SIGKILL)
        self._wait()

    def stop(self) -> None:
        """Send SIGSTOP, the effect of a machine that swaps or a network partition."""
        self._signal(signal.SIGSTOP)
        self.stopped = True

    def resume(self) -> None:
        """Send SIGCONT."""
        self._signal(signal.SIGCONT)
        self.stopped = False

    def ask_to_end(self) -> None:
        """Send SIGTERM."""
        self._signal(signal.SIGTERM)

    def wait_end(self, timeout_s: float = END_TIMEOUT_S) -> int | None:
        """Wait for the end; return the exit code, None where it did not come."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._wait(timeout_s)
        return None

    def _signal(self, number: int) -> None:
        if self._process and self._process.poll() is None:
            os.kill(self._process.pid, number)

    def _wait(self, timeout_s: float = END_TIMEOUT_S) -> int | None:
        return self._process.wait(timeout_s) if self._process else None


def python(module: str, *arguments: str) -> list[str]:
    """Build the command line of a module."""
    return [sys.executable, "-m", module, *arguments]


class Valkey(Child):
    """A strict Valkey with its data, its unix socket and its log in `folder`."""

    def __init__(self, name: str, folder: Path, port: int = 0, settings: str = "") -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.port = folder, port
        self.socket = folder / "valkey.sock"
        config = folder / "valkey.conf"
        config.write_text(_VALKEY_CONFIG.format(folder=folder, port=port) + settings)
        super().__init__(name, "valkey", [str(valkey_binary()), str(config)], folder)

    def connect(self, password: str | None = None) -> redis.Redis:
        """Open a client of this server."""
        return redis.Redis(unix_socket_path=str(self.socket), socket_timeout=END_TIMEOUT_S, password=password)

    def wait_ready(self) -> None:
        """Wait until the data is loaded."""

        def answers() -> bool:
            try:
                return bool(client.ping())
            except redis.RedisError:  # not started, or loading
                return False

        with self.connect() as client:
            eventually(answers, LOADING_TIMEOUT_S)


def read_address(child: Child, timeout_s: float) -> str:
    """Wait for the line `listening on URL` in the log of a child; return the address."""

    def find() -> str:
        lines = child.log.read_text().splitlines() if child.log.exists() else []
        assert child.exit_code is None, f"{child.name} ended: {lines[-5:]}"
        return next((line.removeprefix("listening on ") for line in lines if line.startswith("listening on ")), "")

    return eventually(find, timeout_s)
