"""Measure appends while ranks wait for a batch and producers for tickets.

    python benchmarks/waiting.py --rounds 5

All ranks of a trainer long-poll for a batch that lacks groups, and producers long-poll for tickets of the same run.
Two producers append one group after the other: to this run, then to another run of the service. Each side has its own
service and starts with empty runs; sides take turns. CPU is user and system time of the service per stored group.
`/healthz` is asked without a pause meanwhile: its longest answer shows how long the event loop was held. Clients and
servers share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import itertools
import json
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from groups import random_group
from measured import Measured, Target
from served import Served

from replaybuf.client.client import Client
from replaybuf.wire.frame import MEDIA_TYPE, encode_frame

APPENDERS = 2
MEAN_TOKENS = 128
GROUPS_PER_BATCH = 10_000
"""More than are stored here: ranks wait. Producers wait once the window of two batches is out."""
WARM_UP_S, SETTLE_S = 0.5, 2.0
TIMEOUT_S = 60.0
TARGET = 0.9
RUNS = {"own": "the run that waits", "other": "another run"}
MOMENTS = ("nobody asks yet", "all requests arrive", "appends go on", "all requests time out")


class Side(NamedTuple):
    """Requests that wait: ranks for a batch, producers for a ticket."""

    ranks: int
    producers: int

    @property
    def name(self) -> str:
        """Name in the tables."""
        waiting = [f"{self.ranks} ranks"] if self.ranks else []
        waiting += [f"{self.producers} producers"] if self.producers else []
        return ", ".join(waiting) or NOBODY


NOBODY = "nobody waits"
PROBE_PERIOD_S = 0.002
SIDES = [Side(0, 0), Side(64, 0), Side(512, 0), Side(2048, 0), Side(0, 500), Side(2048, 500)]


class LongPolls:
    """Connections with one request each that waits."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = str(parts.hostname), int(parts.port or 80)
        self._writers: list[asyncio.StreamWriter] = []
        self._readers: list[asyncio.StreamReader] = []

    async def ask(self, heads: list[bytes]) -> None:
        """Open one connection for each request and send it; the service drops many that are silent."""
        for head in heads:
            reader, writer = await asyncio.open_connection(self._host, self._port)
            writer.write(head)
            self._readers.append(reader)
            self._writers.append(writer)

    async def answers(self) -> int:
        """Wait for the first line of every answer; return how many are 200 or 202."""
        lines = await asyncio.gather(*(reader.readline() for reader in self._readers))
        return sum(line.startswith((b"HTTP/1.1 200", b"HTTP/1.1 202")) for line in lines)

    async def close(self) -> None:
        """Close the connections."""
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in self._writers), return_exceptions=True)


class Probe(threading.Thread):
    """Asks `/healthz` again and again; `longest_s`: the longest answer since `restart`."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=TIMEOUT_S)
        self._stopped = threading.Event()
        self._longest_s = 0.0

    def run(self) -> None:
        """Ask until `stop`."""
        while not self._stopped.wait(PROBE_PERIOD_S):
            begun_s = time.perf_counter()
            self._connection.request("GET", "/healthz")
            self._connection.getresponse().read()
            self._longest_s = max(self._longest_s, time.perf_counter() - begun_s)

    def restart(self) -> float:
        """Return the longest answer so far, and forget it."""
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self.join()
        self._connection.close()


class Appending:
    """Appends distinct groups to one run from `APPENDERS` threads; `count`: all that were stored."""

    def __init__(self, url: str, run: str) -> None:
        parts = urlsplit(url)
        self._address, self._path = (str(parts.hostname), parts.port), f"/v1/runs/{run}/groups"
        self.count = 0
        self._numbers = itertools.count()
        self._group = random_group(np.random.default_rng(0), 0, rollouts=4, mean_tokens=MEAN_TOKENS)

    def rate(self, seconds: float) -> float:
        """Append for some seconds; return groups per second after the warm-up."""
        stored: list[int] = []
        begun_s = time.perf_counter() + WARM_UP_S
        threads = [threading.Thread(target=self._append, args=(begun_s, seconds, stored)) for _ in range(APPENDERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(stored) / seconds

    def _append(self, begun_s: float, seconds: float, stored: list[int]) -> None:
        connection = http.client.HTTPConnection(*self._address, timeout=TIMEOUT_S)
        count = 0
        while (now_s := time.perf_counter()) < begun_s + seconds:
            frame = encode_frame(self._group.__replace__(group_id=f"g{next(self._numbers)}"))
            connection.request("POST", self._path, frame, {"content-type": MEDIA_TYPE})
            answer = connection.getresponse()
            body = answer.read()
            if answer.status != 200:
                raise RuntimeError(f"append: {answer.status} {body[:300]!r}")
            self.count += 1
            count += now_s >= begun_s
        stored.append(count)
        connection.close()


def get(path: str) -> bytes:
    """Return the head of a GET."""
    return f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode()


def post(path: str, body: dict[str, Any]) -> bytes:
    """Return a POST of JSON."""
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(text)}\r\n\r\n".encode() + text


async def measure(side: Side, seconds: float) -> dict[str, float]:
    """Measure one side on its own service."""
    with tempfile.TemporaryDirectory() as folder, Served(Path(folder) / "data") as served:
        epoch = prepare(served.url, side)
        wait_ms = int(1000 * (SETTLE_S + len(RUNS) * (seconds + WARM_UP_S) + SETTLE_S))
        batch = f"/v1/runs/own/batches/0?epoch={epoch}&wait_ms={wait_ms}&dp_rank="
        heads = [get(f"{batch}{rank}") for rank in range(side.ranks)]
        wanted = {"count": 1, "wait_ms": wait_ms}
        heads += [post("/v1/runs/own/tickets", {"producer": f"p{n}"} | wanted) for n in range(side.producers)]
        polls, probe = LongPolls(served.url), Probe(served.url)
        probe.start()
        await asyncio.sleep(SETTLE_S)
        held_s = [probe.restart()]
        await polls.ask(heads)
        await asyncio.sleep(SETTLE_S)
        held_s.append(probe.restart())
        measured: dict[str, float] = {}
        for run in RUNS:
            appending, before_s = Appending(served.url, run), served.cpu_s
            measured[run] = await asyncio.to_thread(appending.rate, seconds)
            measured[f"{run} CPU"] = (served.cpu_s - before_s) * 1e3 / appending.count
        held_s.append(probe.restart())
        if await polls.answers() != len(heads):
            raise RuntimeError("not every request was answered with 200 or 202")
        held_s.append(probe.restart())
        probe.stop()
        await polls.close()
        return measured | {moment: 1e3 * longest_s for moment, longest_s in zip(MOMENTS, held_s, strict=True)}


def prepare(url: str, side: Side) -> int:
    """Create the runs and attach; take all tickets of the first run if producers shall wait. Return the epoch."""
    for run in RUNS:
        with Client(url, run) as client:
            client.put_run({"batch": {"groups_per_batch": GROUPS_PER_BATCH, "tokens_per_batch": None}})
    with Client(url, "own") as client:
        while side.producers and client.take_tickets("first", 1000).tickets:
            pass
        return client.attach(dp_world_size=max(1, side.ranks)).epoch


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of appends to each run, per round and side")
    arguments = parser.parse_args()
    settings = {"rounds": arguments.rounds, "seconds": arguments.seconds, "appenders": APPENDERS}
    results = Measured("waiting", reference=NOBODY, packages=["uvicorn", "starlette", "numpy"], settings=settings)
    waits: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(arguments.rounds):
        for side in SIDES:
            for what, value in asyncio.run(measure(side, arguments.seconds)).items():
                waits[what][side.name].append(value)
    targets = {side.name: [Target("ratio", "at least", TARGET)] for side in SIDES if side.name != NOBODY}
    for run, name in RUNS.items():
        results.record(f"appends to {name}", waits[run], unit="groups/s", targets=targets)
        results.record(f"CPU of the service per group, {name}", waits[f"{run} CPU"], unit="ms")
    for moment in MOMENTS:
        results.record(f"longest answer of /healthz, {moment}", waits[moment], unit="ms")
    results.save()


if __name__ == "__main__":
    main()
