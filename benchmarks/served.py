"""A private `replaybuf serve` for benchmarks, in a scratch folder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import redis

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0


class Served:
    """One `replaybuf serve` with a private Valkey in `folder`; `kill` leaves the Valkey to the next one.

    `options` are appended to its command line; `program` runs `replaybuf`.
    """

    def __init__(
        self, folder: Path, *options: str, program: Sequence[str] = (sys.executable, "-m", "replaybuf")
    ) -> None:
        self.folder = folder
        self.options = options
        self._program = program
        self.url = ""
        self.started_s = 0.0
        self._process: subprocess.Popen[str] | None = None
        self._groups: list[int] = []

    def __enter__(self) -> Served:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self._process:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        for group in self._groups:  # a Valkey that outlived a killed service is still in that one's group
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def start(self) -> Served:
        """Start, wait until it listens, and record in `started_s` how long that took."""
        command = [*self._program, "serve", "--port", "0", "--data-dir", str(self.folder)]
        command += self.options
        begun = time.monotonic()
        log = (self.folder.parent / "serve.log").open("a")
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
        self._groups.append(self._process.pid)
        if self._process.stdout is None:
            raise RuntimeError("no standard output")
        for line in self._process.stdout:
            match = re.match(r"listening on (http://\S+)", line)
            if match:
                self.url, self.started_s = match[1], time.monotonic() - begun
                return self
        raise RuntimeError(f"serve ended: {(self.folder.parent / 'serve.log').read_text()}")

    def kill(self) -> None:
        """Kill the service only."""
        if self._process:
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_S)

    @property
    def redis_url(self) -> str:
        """Return the address of its Valkey."""
        return f"unix://{self.folder}/valkey.sock"

    @property
    def redis_pid(self) -> int:
        """Return the process id of its Valkey."""
        with self.redis() as client:
            return int(client.info("server")["process_id"])

    def redis(self) -> redis.Redis:
        """Connect to its Valkey."""
        return redis.Redis(unix_socket_path=str(self.folder / "valkey.sock"))

    @property
    def rss_bytes(self) -> int:
        """Return the resident memory of the service, without its Valkey."""
        return int(self._running().memory_info().rss)

    @property
    def cpu_s(self) -> float:
        """Return the user and system seconds of the service, without its Valkey."""
        times = self._running().cpu_times()
        return float(times.user + times.system)

    @property
    def pid(self) -> int:
        """Return the process id of the service."""
        return int(self._running().pid)

    def _running(self) -> psutil.Process:
        if self._process is None:
            raise RuntimeError("not started")
        return psutil.Process(self._process.pid)
