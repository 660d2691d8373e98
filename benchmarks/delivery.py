"""Measure the delivery of batch bodies: control calls meanwhile, throughput, and the time from ready to arrays.

    python benchmarks/delivery.py --tokens 1000000 --ranks 8

- Control: p50 and p99 of 300 `GET run` and ticket requests per round on one connection, idle and while bodies stream
  (at least 64 MB), against a bare server in the same states. A ticket is on disk before it is answered; the bare
  server writes nothing. Streaming is measured with clients of normal priority and with clients that yield the
  processors, as clients on other machines do. The service's own time comes from `replaybuf_request_seconds`.
- Streaming: MB/s of these fetches against a bare uvicorn + starlette process that answers the same bytes.
- Ready: seconds from the moment the trainer may request the next batch to the arrays of all its ranks, with time to
  prepare it (hit) and without (miss), by `replaybuf_batches_prepared_total`.

Clients and servers share the machine. All clients use the transport of trainers; streaming clients are own processes.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import multiprocessing as mp
import os
import socket
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from fetching import Fetcher
from groups import random_group
from measured import Measured, Target
from prometheus_client.parser import text_string_to_metric_families
from served import Served

from replaybuf.client.client import Client
from replaybuf.wire.batch import read_batch

SEQ_LEN = 8192
ROLLOUTS = 8
MEAN_TOKENS = 1024
CONTROL_CALLS = 300
STREAM_BYTES = 64_000_000
RUN = "bench"
STEPS = 6
ROUND_S = 1.0
TRAINING_S = 3.0
"""Connections idle for longer are not reused, because the bare server closes them after 5 s."""
SERVICE, BARE = "service", "bare server"
ALL, GET, TICKET = "control calls", "GET run alone", "tickets alone"
KINDS = {kind: kind for kind in (ALL, GET, TICKET)}
STREAMING, YIELDING = "while bodies stream", "while bodies stream to clients that yield"
CONTROL_P99_MS = 5.0
"""Target for control calls while bodies stream."""
_NAMES = {GET: {"GET /v1/runs/{run}"}, TICKET: {"POST /v1/runs/{run}/tickets"}}
CALLS_OF = _NAMES | {ALL: _NAMES[GET] | _NAMES[TICKET]}
BOUNDED = {f"{ALL}, {state}: p99" for state in (STREAMING, YIELDING)}
LOWEST_PRIORITY = 19
OUTCOMES = {"miss": "not prepared", "partial": "partly prepared", "hit": "prepared"}
"""Outcome of preparing a batch: label of the metric, and name in the results."""

Sides = dict[str, list[float]]


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--streams", type=int, default=2, help="processes that fetch bodies at the same time")
    parser.add_argument("--rounds", type=int, default=3, help="of control calls and streaming")
    arguments = parser.parse_args()
    packages = ["numpy", "uvicorn", "starlette", "httpx"]
    results = Measured("delivery", reference=BARE, packages=packages, settings=vars(arguments))
    with tempfile.TemporaryDirectory() as folder, Served(Path(folder) / "data") as served:
        with Client(served.url, RUN, timeout_s=120.0) as client:
            epoch = fill(client, arguments.tokens, arguments.ranks)
            record_ready(results, client, epoch, arguments.ranks)
            record_streams(results, served.url, epoch, arguments)
        results.record("resident", {SERVICE: [served.rss_bytes / 1e6]}, unit="MB")
    results.save()


def fill(client: Client, tokens: int, ranks: int) -> int:
    """Store the groups of all steps; return the epoch of an attached trainer."""
    client.put_run(
        {
            "batch": {"tokens_per_batch": tokens, "seq_len": SEQ_LEN},
            "strategy": {"name": "one-step-off-policy", "options": {"max_staleness": 100}},
        }
    )
    rng = np.random.default_rng(0)
    groups = int((STEPS + 1) * tokens / (ROLLOUTS * MEAN_TOKENS) * 1.15)
    for start in range(0, groups, 16):
        client.append(
            [
                random_group(rng, number, rollouts=ROLLOUTS, mean_tokens=MEAN_TOKENS, longest=SEQ_LEN)
                for number in range(start, min(start + 16, groups))
            ]
        )
    return client.attach(dp_world_size=ranks).epoch


# ---------------------------------------------------------------------- control calls


def record_streams(results: Measured, url: str, epoch: int, arguments: argparse.Namespace) -> None:
    """Record control calls, idle and while bodies stream, and MB/s of bodies, service and bare server in turns."""
    paths = [f"/v1/runs/{RUN}/batches/{STEPS - 1}?epoch={epoch}&dp_rank={rank}" for rank in range(arguments.ranks)]
    bodies = [httpx.get(url + path, headers={"accept-encoding": "identity"}).content for path in paths]
    results.record("one batch", {"bodies of all ranks": [sum(map(len, bodies)) / 1e6]}, unit="MB")
    control: dict[str, Sides] = defaultdict(lambda: {SERVICE: [], BARE: []})
    rates: Sides = {SERVICE: [], BARE: []}
    inside: Sides = defaultdict(list)
    with BareServer(bodies) as bare_url:
        sides = {SERVICE: (url, paths, None), BARE: (bare_url, [f"/{rank}" for rank in range(arguments.ranks)], "/")}
        for _ in range(arguments.rounds):
            for side, (base, own, path) in sides.items():
                calls = functools.partial(control_calls, base, path)
                idle = calls()
                before = Answered.read(url)
                _, streaming = stream(base, own, arguments.streams, calls)
                if side == SERVICE:
                    after = Answered.read(url)
                    for kind in KINDS:
                        inside[kind].append(100.0 * after.within(CONTROL_P99_MS, kind, since=before))
                _, yielding = stream(base, own, arguments.streams, functools.partial(ahead_of_all, calls), yields=True)
                rates[side].append(stream(base, own, arguments.streams, lambda: time.sleep(ROUND_S))[0])
                for state, took in {"idle": idle, STREAMING: streaming, YIELDING: yielding}.items():
                    for kind, name in {SERVICE: KINDS, BARE: dict.fromkeys(KINDS, ALL)}[side].items():
                        cuts = statistics.quantiles(took[name], n=100)
                        control[f"{kind}, {state}: p50"][side].append(cuts[49])
                        control[f"{kind}, {state}: p99"][side].append(cuts[98])
    for what, figures in control.items():
        bound = [Target("median", "at most", CONTROL_P99_MS)] if what in BOUNDED else []
        results.record(what, figures, unit="ms", targets={SERVICE: bound})
    what = f"{STREAMING}: within {CONTROL_P99_MS:g} ms in the service itself"
    results.record(what, dict(inside), unit="%", reference=ALL, targets={ALL: [Target("median", "at least", 99.0)]})
    results.record("bodies", rates, unit="MB/s")


@dataclasses.dataclass(frozen=True, slots=True)
class Answered:
    """Control calls that the service answered: by kind, and by upper edge of their duration in ms."""

    counts: dict[tuple[str, float], float]

    @classmethod
    def read(cls, url: str) -> Answered:
        """Read one metric family."""
        counts: dict[tuple[str, float], float] = defaultdict(float)
        for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
            for sample in family.samples:
                if sample.name == "replaybuf_request_seconds_bucket":
                    for kind in (kind for kind in KINDS if sample.labels["call"] in CALLS_OF[kind]):
                        counts[kind, 1e3 * float(sample.labels["le"])] += sample.value
        return cls(counts)

    def within(self, bound_ms: float, kind: str, since: Answered) -> float:
        """Return the share of calls of a kind since then that took at most this long."""
        quick, all_of_them = (self.counts[kind, edge] - since.counts[kind, edge] for edge in (bound_ms, math.inf))
        return quick / all_of_them


def control_calls(url: str, path: str | None = None) -> Sides:
    """Time state and ticket requests, or requests of a path, one after the other; in ms, by kind and in total."""
    took: Sides = defaultdict(list)
    with Fetcher(url) as http:
        http.get(path or f"/v1/runs/{RUN}")
        for number in range(CONTROL_CALLS):
            begun = time.perf_counter()
            if path or number % 2:
                http.get(path or f"/v1/runs/{RUN}")
            else:
                http.post(f"/v1/runs/{RUN}/tickets", {"producer": "bench", "count": 1})
            took[GET if number % 2 else TICKET].append((time.perf_counter() - begun) * 1e3)
    return took | {ALL: took[GET] + took[TICKET]}


def ahead_of_all(calls: Callable[[], Sides]) -> Sides:
    """Run calls at real-time priority, if the system allows it, so that their time is that of the servers."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        print("real-time priority needs root; the client of the calls also waits for processors")
    try:
        return calls()
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


# ---------------------------------------------------------------------- streaming


def stream(
    url: str, paths: list[str], streams: int, meanwhile: Callable[[], Any], *, yields: bool = False
) -> tuple[float, Any]:
    """Fetch bodies in other processes while `meanwhile` runs; return MB/s and the result of `meanwhile`.

    Clients that yield run at the lowest priority.
    """
    spawn = mp.get_context("spawn")
    stop, results = spawn.Event(), spawn.Queue()
    readers = [spawn.Process(target=read_on, args=(url, paths, n, stop, results, yields)) for n in range(streams)]
    for reader in readers:
        reader.start()
    for _ in readers:
        results.get(timeout=60)  # all have fetched one body
    streamed = meanwhile()
    stop.set()
    rates = [results.get(timeout=60) for _ in readers]
    for reader in readers:
        reader.join(60)
    return sum(rates), streamed


def read_on(url: str, paths: list[str], number: int, stop: Any, results: Any, yields: bool) -> None:
    """Fetch bodies until stopped and the share of 64 MB is read; put MB/s."""
    if yields:
        os.nice(LOWEST_PRIORITY)
    with Fetcher(url) as http:
        http.get(paths[number % len(paths)])
        results.put("ready")
        done, begun = 0, time.perf_counter()
        while not stop.is_set() or done < STREAM_BYTES / 2:
            number += 1
            done += len(http.get(paths[number % len(paths)]))
        results.put(done / 1e6 / (time.perf_counter() - begun))


class BareServer:
    """A uvicorn + starlette application that answers `/N` with body N and `/` with a word."""

    def __init__(self, bodies: list[bytes]) -> None:
        self._bodies = bodies
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def __enter__(self) -> str:
        context = mp.get_context("spawn")
        self._process = context.Process(target=serve_bare, args=(self._bodies, self.port), daemon=True)
        self._process.start()
        url = f"http://127.0.0.1:{self.port}"
        for _ in range(200):
            try:
                httpx.get(url)
                return url
            except httpx.TransportError:
                time.sleep(0.05)
        raise RuntimeError("the bare server does not start")

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()


def serve_bare(bodies: list[bytes], port: int) -> None:
    """Serve until killed."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    async def body(request: Request) -> Response:
        return Response(bodies[request.path_params["n"]])

    async def word(_: Request) -> Response:
        return Response("ok")

    app = Starlette(routes=[Route("/{n:int}", body), Route("/", word)])
    uvicorn.run(app, host="127.0.0.1", port=port, http="httptools", loop="uvloop", log_level="warning")


# ---------------------------------------------------------------------- from ready to arrays


def record_ready(results: Measured, client: Client, epoch: int, ranks: int) -> None:
    """Train `STEPS` steps; every other step gives the service the time of a training step to prepare the next batch."""
    answered: Sides = defaultdict(list)
    arrays: Sides = defaultdict(list)
    before = prepared(client)
    for step in range(STEPS):
        begun = time.perf_counter()
        first = fetch(client, step, epoch, 0)
        first_s = time.perf_counter() - begun
        batches = [first, *(fetch(client, step, epoch, rank) for rank in range(1, ranks))]
        all_s = time.perf_counter() - begun
        if sum(len(row.input_ids) for batch in batches for row in batch.micro_batches) <= 0:
            raise RuntimeError("no tokens")
        after = prepared(client)
        (outcome,) = [OUTCOMES[name] for name in after if after[name] > before.get(name, 0)]
        answered[outcome].append(first_s * 1e3)
        arrays[outcome].append(all_s * 1e3)
        before = after
        if step % 2:
            time.sleep(TRAINING_S)
        client.ack(step, epoch)
        client.publish_policy(step + 1, epoch)
    for what, sides in {"first rank answered": answered, "arrays of all ranks": arrays}.items():
        results.record(f"from ready to: {what}", sides, unit="ms", reference=OUTCOMES["miss"])


def fetch(client: Client, step: int, epoch: int, rank: int) -> Any:
    """Fetch the part of one rank and read it into arrays."""
    body = client.fetch_batch(step, epoch, dp_rank=rank, wait_ms=30_000)
    if not isinstance(body, bytes):
        raise RuntimeError(f"no batch: {body}")
    return read_batch(body)


def prepared(client: Client) -> dict[str, float]:
    """Read from the metrics how batches were made."""
    text = httpx.get(f"{client.address}/metrics").text
    lines = [line for line in text.splitlines() if line.startswith("replaybuf_batches_prepared_total{")]
    return {line.split('outcome="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


if __name__ == "__main__":
    main()
