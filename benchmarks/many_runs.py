"""Measure what many idle runs cost: processor time of a leader and a follower, `/metrics`, and a takeover.

    python benchmarks/many_runs.py --runs 1000 --seconds 10 --rounds 5

A leader with a private Valkey creates the runs; a follower shares the Valkey. Nobody calls meanwhile. A share is
user and system time of the process by wall time. The takeover is the time from SIGKILL of the leader until the follower
leads all.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
from served import Served

SETTLE_S = 15.0
"""After this time without a change a run counts as quiet."""
TAKEOVER_TIMEOUT_S = 120.0
CONFIG = {"batch": {"groups_per_batch": 2, "tokens_per_batch": None}}


def cpu_s(pid: int) -> float:
    """Return user and system seconds of a process."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def shares(pids: dict[str, int], seconds: float) -> dict[str, float]:
    """Return which share of a core each process takes."""
    begun_s, before = time.monotonic(), {name: cpu_s(pid) for name, pid in pids.items()}
    time.sleep(seconds)
    took_s = time.monotonic() - begun_s
    return {name: 100 * (cpu_s(pid) - before[name]) / took_s for name, pid in pids.items()}


def describe(name: str, values: list[float], unit: str) -> str:
    """Return a line with median and spread."""
    return f"{name:28}{statistics.median(values):8.2f} {unit}  ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "leader").mkdir()
        (folder / "follower").mkdir()
        with Served(folder / "leader") as leader, httpx.Client(base_url=leader.url, timeout=60.0) as http:
            for number in range(arguments.runs):
                http.put(f"/v1/runs/idle-{number}", json=CONFIG).raise_for_status()
            with Served(folder / "follower", "--redis-url", leader.redis_url) as follower:
                print(f"{arguments.runs} idle runs; the follower started in {follower.started_s:.1f} s")
                measure(arguments, http, leader, follower)


def measure(arguments: Any, http: httpx.Client, leader: Served, follower: Served) -> None:
    """Measure shares, metrics, then the takeover."""
    time.sleep(SETTLE_S)
    pids = {"leader": leader.pid, "follower": follower.pid, "valkey": leader.redis_pid}
    rounds = [shares(pids, arguments.seconds) for _ in range(arguments.rounds)]
    for name in pids:
        print(describe(f"{name}, share of a core", [figures[name] for figures in rounds], "%"))
    scrapes: list[float] = []
    for _ in range(arguments.rounds):
        begun_s = time.monotonic()
        size = len(http.get("/metrics").raise_for_status().content)
        scrapes.append(1e3 * (time.monotonic() - begun_s))
    print(describe(f"/metrics, {size / 1e6:.1f} MB", scrapes, "ms"))
    log = leader.folder.parent / "serve.log"
    led_before = log.read_text().count("lead taken")
    leader.kill()
    begun_s = time.monotonic()
    while (taken := log.read_text().count("lead taken") - led_before) < arguments.runs:
        if time.monotonic() - begun_s > TAKEOVER_TIMEOUT_S:
            raise RuntimeError(f"{taken} of {arguments.runs} runs are led")
        time.sleep(0.1)
    print(f"all runs are led again after {time.monotonic() - begun_s:.1f} s")


if __name__ == "__main__":
    main()
