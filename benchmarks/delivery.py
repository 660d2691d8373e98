"""Delivery of batch bodies: control calls while bodies stream, bodies against a bare server, from ready to arrays.

    python benchmarks/delivery.py --tokens 1000000 --ranks 8 --json delivery.json

- Control: p50 and p99 of `GET run` and of ticket requests, one after the other on one connection: idle, while bodies
  stream (at least 64 MB in all), and a bare server in the same two states.
- Streaming: MB/s of those fetches against a bare uvicorn + starlette application in a process of its own that answers
  the same bytes to the same clients, in the same run.
- Ready: seconds from the moment the trainer may ask for the next batch to the arrays of all its ranks, with time to
  prepare it (hit) and without (miss), by what `replaybuf_batches_prepared_total` says.

Clients and servers share the machine; the clients that stream are processes of their own."""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from groups import random_group
from served import Served

from replaybuf.batch import read_batch
from replaybuf.client import Client

SEQ_LEN = 8192
ROLLOUTS = 8
MEAN_TOKENS = 1024
CONTROL_CALLS = 300
STREAM_BYTES = 64_000_000
RUN = "bench"
STEPS = 6
ROUNDS, ROUND_S = 3, 1.0
TRAINING_S = 3.0


def main() -> None:
    """Measure, print, and write the figures as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--streams", type=int, default=2, help="processes that fetch bodies at the same time")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Served(Path(folder) / "data") as served:
        with Client(served.url, RUN, timeout_s=120.0) as client:
            figures = measure(served.url, client, given.tokens, given.ranks, given.streams)
        figures["rss_mb"] = served.rss_bytes / 1e6
    figures |= {"tokens": given.tokens, "ranks": given.ranks, "streams": given.streams, "machine": machine()}
    tell(figures)
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")


def measure(url: str, client: Client, tokens: int, ranks: int, streams: int) -> dict[str, Any]:
    """Fill a run, and measure all three things on it."""
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
    epoch = client.attach(dp_world_size=ranks).epoch
    idle = control_calls(url)
    ready = measure_ready(client, epoch, ranks)
    paths = [f"/v1/runs/{RUN}/batches/{STEPS - 1}?epoch={epoch}&dp_rank={rank}" for rank in range(ranks)]
    bodies = [httpx.get(url + path, headers={"accept-encoding": "identity"}).content for path in paths]
    _, during = stream(url, paths, streams, lambda: control_calls(url))
    rates: dict[str, list[float]] = {"service": [], "bare": []}
    with BareServer(bodies) as bare_url:
        bare_paths = [f"/{rank}" for rank in range(ranks)]
        bare_idle = control_calls(bare_url, "/")
        _, bare_during = stream(bare_url, bare_paths, streams, lambda: control_calls(bare_url, "/"))
        for _ in range(ROUNDS):
            rates["service"].append(stream(url, paths, streams, lambda: time.sleep(ROUND_S))[0])
            rates["bare"].append(stream(bare_url, bare_paths, streams, lambda: time.sleep(ROUND_S))[0])
    service, bare = (statistics.median(rates[name]) for name in ("service", "bare"))
    return {
        "control_ms": {"idle": idle, "streaming": during, "bare idle": bare_idle, "bare streaming": bare_during},
        "stream_mb_s": {"service": service, "bare": bare, "ratio": service / bare, "rounds": rates},
        "ready_s": ready,
        "batch_mb": sum(map(len, bodies)) / 1e6,
    }


# ---------------------------------------------------------------------- control calls


def control_calls(url: str, path: str | None = None) -> dict[str, float]:
    """Time state and ticket requests, one after the other; in ms."""
    took = []
    with httpx.Client(base_url=url, timeout=30.0) as http:
        http.get(path or f"/v1/runs/{RUN}")
        for number in range(CONTROL_CALLS):
            begun = time.perf_counter()
            if path or number % 2:
                http.get(path or f"/v1/runs/{RUN}").raise_for_status()
            else:
                http.post(f"/v1/runs/{RUN}/tickets", json={"producer": "bench", "count": 1}).raise_for_status()
            took.append((time.perf_counter() - begun) * 1e3)
    cuts = statistics.quantiles(took, n=100)
    return {"p50": cuts[49], "p99": cuts[98], "max": max(took)}


# ---------------------------------------------------------------------- streaming


def stream(url: str, paths: list[str], streams: int, meanwhile: Callable[[], Any]) -> tuple[float, Any]:
    """Fetch bodies in processes of their own while `meanwhile` runs; return MB/s and what `meanwhile` returned."""
    spawn = mp.get_context("spawn")
    stop, results = spawn.Event(), spawn.Queue()
    readers = [spawn.Process(target=read_on, args=(url, paths, n, stop, results)) for n in range(streams)]
    for reader in readers:
        reader.start()
    for _ in readers:
        results.get(timeout=60)  # all have fetched one body
    found = meanwhile()
    stop.set()
    rates = [results.get(timeout=60) for _ in readers]
    for reader in readers:
        reader.join(60)
    return sum(rates), found


def read_on(url: str, paths: list[str], number: int, stop: Any, results: Any) -> None:
    """Fetch one body after the other until told to stop and the share of 64 MB is read; put MB/s."""
    with httpx.Client(base_url=url, timeout=60.0, headers={"accept-encoding": "identity"}) as http:
        http.get(paths[number % len(paths)]).raise_for_status()
        results.put("ready")
        done, begun = 0, time.perf_counter()
        while not stop.is_set() or done < STREAM_BYTES / 2:
            number += 1
            done += len(http.get(paths[number % len(paths)]).content)
        results.put(done / 1e6 / (time.perf_counter() - begun))


class BareServer:
    """A uvicorn + starlette application that answers `/N` with body N, `/` with a word."""

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


def measure_ready(client: Client, epoch: int, ranks: int) -> dict[str, dict[str, float]]:
    """Train `STEPS` steps; every other time the service has the time of a training step to prepare the next batch."""
    took: dict[str, list[tuple[float, float]]] = {}
    before = prepared(client)
    for step in range(STEPS):
        begun = time.perf_counter()
        first = fetch(client, step, epoch, 0)
        answered = time.perf_counter() - begun
        arrays = [first, *(fetch(client, step, epoch, rank) for rank in range(1, ranks))]
        whole = time.perf_counter() - begun
        if sum(len(row.input_ids) for batch in arrays for row in batch.micro_batches) <= 0:
            raise RuntimeError("no tokens")
        after = prepared(client)
        (outcome,) = [name for name in after if after[name] > before.get(name, 0)]
        took.setdefault(outcome, []).append((answered, whole))
        before = after
        if step % 2:
            time.sleep(TRAINING_S)
        client.ack(step, epoch)
        client.publish_policy(step + 1, epoch)
    return {
        outcome: {"first_rank": min(a for a, _ in times), "all_ranks": min(b for _, b in times), "steps": len(times)}
        for outcome, times in took.items()
    }


def fetch(client: Client, step: int, epoch: int, rank: int) -> Any:
    """Fetch one rank's part and read it into arrays."""
    body = client.fetch_batch(step, epoch, dp_rank=rank, wait_ms=30_000)
    if not isinstance(body, bytes):
        raise RuntimeError(f"no batch: {body}")
    return read_batch(body)


def prepared(client: Client) -> dict[str, float]:
    """Read how batches were made, from the metrics."""
    text = httpx.get(f"{client.address}/metrics").text
    lines = [line for line in text.splitlines() if line.startswith("replaybuf_batches_prepared_total{")]
    return {line.split('outcome="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


# ---------------------------------------------------------------------- telling


def machine() -> str:
    """Describe machine and versions."""
    parts = (f"{name} {version(name)}" for name in ("numpy", "uvicorn", "starlette", "httpx"))
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} CPUs (load {load:.1f}), Python {platform.python_version()}, {', '.join(parts)}"


def tell(figures: dict[str, Any]) -> None:
    """Print the figures."""
    print(figures["machine"])
    print(f"batch of {figures['tokens']:,} tokens, {figures['batch_mb']:.1f} MB over {figures['ranks']} ranks")
    for name, times in figures["control_ms"].items():
        print(f"control, {name:15} p50 {times['p50']:6.2f} ms   p99 {times['p99']:6.2f} ms   max {times['max']:.2f}")
    rates = figures["stream_mb_s"]
    print(f"bodies  {rates['service']:.0f} MB/s, bare {rates['bare']:.0f} MB/s, ratio {rates['ratio']:.2f}")
    for outcome, times in figures["ready_s"].items():
        print(f"ready, {outcome:8} first rank {times['first_rank']:.3f} s   all arrays {times['all_ranks']:.3f} s")
    print(f"service {figures['rss_mb']:.0f} MB resident")


if __name__ == "__main__":
    sys.exit(main())
