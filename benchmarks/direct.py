"""Compare the service's CPU per step with bodies over HTTP and in direct mode.

    python benchmarks/direct.py --tokens 1000000 --ranks 8 --steps 4

Two runs on one service take steps in turns: one trainer fetches the bodies of all ranks over HTTP, the other fetches
plans and builds the same bodies from Redis. CPU is user and system time of the process per step, with selection,
loading, packing and preparation of the next batch. Clients and servers share the machine.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from delivery import MEAN_TOKENS, ROLLOUTS, SEQ_LEN
from groups import random_group
from measured import Measured
from served import Served

from replaybuf.client.client import Client
from replaybuf.client.direct import DirectBodies
from replaybuf.wire.contract import WaitingAnswer

WAIT_MS = 30_000


class Trainer:
    """A trainer of all ranks on its own run, over HTTP or in direct mode."""

    def __init__(self, served: Served, side: str, arguments: argparse.Namespace) -> None:
        self.ranks = arguments.ranks
        self.client = Client(served.url, side, timeout_s=120.0)
        redis_url = f"unix://{served.folder / 'valkey.sock'}"
        self.direct = DirectBodies(self.client, redis_url) if side == "plans" else None
        strategy = {"name": "one-step-off-policy", "options": {"max_staleness": 100}}
        batch = {"tokens_per_batch": arguments.tokens, "seq_len": SEQ_LEN}
        self.client.put_run({"batch": batch, "strategy": strategy})
        rng = np.random.default_rng(0)
        groups = int((arguments.steps + 2) * arguments.tokens / (ROLLOUTS * MEAN_TOKENS) * 1.15)
        for start in range(0, groups, 16):
            self.client.append([random_group(rng, number) for number in range(start, min(start + 16, groups))])
        self.epoch = self.client.attach(dp_world_size=self.ranks).epoch

    def train(self, step: int) -> int:
        """Fetch the bodies of all ranks and ack; return their bytes."""
        fetch = self.direct.fetch if self.direct else self.client.fetch_batch
        total = 0
        for rank in range(self.ranks):
            body = fetch(step, self.epoch, rank, wait_ms=WAIT_MS)
            if isinstance(body, WaitingAnswer):
                raise RuntimeError(f"no batch: {body}")
            total += len(body)
        self.client.ack(step, self.epoch)
        self.client.publish_policy(step + 1, self.epoch)
        return total

    def close(self) -> None:
        """Close the connections; report if direct mode fell back to HTTP."""
        if self.direct:
            if self.direct.fallbacks:
                raise RuntimeError(f"{self.direct.fallbacks} bodies came over HTTP")
            self.direct.close()
        self.client.close()


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--settle-s", type=float, default=2.0, help="time after a step to prepare the next batch")
    arguments = parser.parse_args()
    packages = ["numpy", "uvicorn", "httpx", "redis"]
    settings = {"tokens": arguments.tokens, "ranks": arguments.ranks, "steps": arguments.steps}
    results = Measured("direct", reference="bodies", packages=packages, settings=settings)
    cpu: dict[str, list[float]] = defaultdict(list)
    wall: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, Served(Path(folder) / "data") as served:
        trainers = {side: Trainer(served, side, arguments) for side in ("bodies", "plans")}
        for step in range(arguments.steps + 1):
            for side, trainer in trainers.items():
                before, begun = served.cpu_s, time.perf_counter()
                trainer.train(step)
                took = time.perf_counter() - begun
                time.sleep(arguments.settle_s)
                if step:  # the first one of each warms up
                    cpu[side].append((served.cpu_s - before) * 1e3)
                    wall[side].append(took * 1e3)
        for trainer in trainers.values():
            trainer.close()
    results.record("CPU of the service per step", cpu, unit="ms")
    results.record("all bodies in the trainer, one rank after the other", wall, unit="ms")
    results.save()


if __name__ == "__main__":
    main()
