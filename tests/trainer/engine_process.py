"""The small engine as a process of its own, for tests with real processes only."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.forked import ForkedProcess
from tests.waiting import patience

TIMEOUT_S = 300.0
"""Bound of a wait on an idle machine, where starting a process with torch takes 10 s; see `patience`."""


def bounded(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine within this time."""

    async def run() -> None:
        async with asyncio.timeout(TIMEOUT_S * patience()):
            await main

    asyncio.run(run())


class EngineProcess:
    """A running `replaybuf engine`, and a client of it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=TIMEOUT_S, limits=httpx.Limits(keepalive_expiry=2.0))

    def metric(self, name: str) -> float:
        """Return one value of `GET /metrics`."""
        line = next(line for line in self.http.get("/metrics").text.splitlines() if line.startswith(name))
        return float(line.rpartition(" ")[2])

    def post(self, path: str, **body: object) -> httpx.Response:
        """POST a JSON body."""
        return self.http.post(path, json=body)


@contextlib.contextmanager
def engine_process(model: Path, name: str = "policy") -> Iterator[EngineProcess]:
    """Start an engine on a free port; kill it at the end."""
    command = ["engine", "--model", str(model), "--port", "0", "--name", name]
    process = ForkedProcess("replaybuf", command, os.environ, sys.__stderr__, trainer=True)
    try:
        line = process.stdout.readline()
        assert line.startswith("listening on "), line
        engine = EngineProcess(line.split()[-1])
        with engine.http:
            yield engine
    finally:
        process.kill()
        process.wait(TIMEOUT_S)
        process.stdout.close()
