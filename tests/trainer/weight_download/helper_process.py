"""`replaybuf fetch-weights` as a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.forked import ForkedProcess

TIMEOUT_S = 60.0


class HelperProcess:
    """A running helper, a client of it, and what it wrote to its log."""

    def __init__(self, process: ForkedProcess, log: Path) -> None:
        line = process.stdout.readline()
        assert line, log.read_text()
        self.url = line.split()[-1]
        self.log = log
        self.http = httpx.Client(base_url=self.url, timeout=TIMEOUT_S)
        self._process = process

    def stage(self, uri: str) -> httpx.Response:
        """Ask for some weights."""
        return self.http.post("/stage", json={"weights_uri": uri})

    def kill(self) -> None:
        """Kill the process as kill -9 does."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(TIMEOUT_S)

    def end(self) -> int:
        """End the process by SIGTERM; return its exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(TIMEOUT_S)


@contextlib.contextmanager
def helper_process(folder: Path, engine: str, *options: str, token: str = "", port: int = 0) -> Iterator[HelperProcess]:
    """Start a helper with the copies in `folder`; kill it at the end."""
    command = ["fetch-weights", "--engine", engine, "--folder", str(folder), "--port", str(port), *options]
    log = folder.parent / f"helper-{os.urandom(4).hex()}.log"
    environment = os.environ | ({"REPLAYBUF_FETCH_WEIGHTS_PUBLISH_TOKEN": token} if token else {})
    with log.open("w") as written:
        process = ForkedProcess("replaybuf", command, environment, written)
    helper = None
    try:
        helper = HelperProcess(process, log)
        yield helper
    finally:
        if helper is not None:
            helper.http.close()
        process.kill()
        process.communicate(TIMEOUT_S)
