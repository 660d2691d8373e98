"""Measure memory of generator, service and Redis over an hour's worth of rollouts.

    python benchmarks/generator_soak.py                    # 108,000 rollouts of 256 tokens

A fleet that samples 30 rollouts a second makes 108,000 in an hour; here they come as fast as the machine allows, with
the engine, service and generator of `generator.py`. The trainer fetches, acks and keeps the newest checkpoint, so
stored data stays bounded. Memory is read at ten points. A line through all but the first two shows what grows.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import psutil
from generator import SIDES, TIMEOUT_S, generate, null_engine, process, reach, write_model
from measured import Measured, Target
from null_engine import TOKENS
from served import Served

from replaybuf.client.client import Client
from replaybuf.wire.contract import WaitingAnswer

RUN = "soak"
ROLLOUTS_PER_S = 30
SAMPLES = 10
WARM_SAMPLES = 2
NEVER = 1 << 30
MB = 1e6
MOST_GROWTH_MB = 5.0


class Trainer(threading.Thread):
    """Uses every batch and trains nothing. `fault` is the error that ended it, None after `stop`."""

    def __init__(self, url: str) -> None:
        super().__init__(name="trainer", daemon=True)
        self.stop = threading.Event()
        self.steps = 0
        self.fault: Exception | None = None
        self._client = Client(url, RUN)
        self._epoch = self._client.attach(resume_step=0).epoch

    def run(self) -> None:
        """Fetch, ack and checkpoint one batch after another."""
        try:
            with self._client as client:
                while not self.stop.is_set():
                    if not isinstance(client.fetch_batch(self.steps, self._epoch, 0, wait_ms=500), WaitingAnswer):
                        client.ack(self.steps, self._epoch)
                        self.steps += 1
                        client.checkpoint(self.steps, self._epoch, keep=1)
        except Exception as error:  # noqa: BLE001 - reported by the waiting loop
            self.fault = error


def main() -> None:
    """Run; print the memory at each point and its growth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=3600 * ROLLOUTS_PER_S)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="of a rollout")
    parser.add_argument("--inflight", type=int, default=64, help="groups at the same time")
    parser.add_argument("--groups-per-batch", type=int, default=128)
    parser.add_argument("--call", choices=SIDES, default=TOKENS)
    arguments = parser.parse_args()
    packages = ["aiohttp", "httpx", "msgspec", "numpy", "tokenizers", "uvloop"]
    results = Measured("generator_soak", reference="", packages=packages, settings=vars(arguments))
    with tempfile.TemporaryDirectory(prefix="replaybuf-bench-") as name, Served(Path(name) / "data") as served:
        write_model(Path(name))
        at, memory = soak(Path(name), served, arguments)
    results.record("resident memory at ten points", memory, unit="MB")
    grew = {side: [growth(at, values)] for side, values in memory.items()}
    wanted = {"generator": [Target("median", "at most", MOST_GROWTH_MB)]}
    results.record("growth over the run, by the line through the last eight", grew, unit="MB", targets=wanted)
    results.save()


def soak(folder: Path, served: Served, arguments: argparse.Namespace) -> tuple[list[int], dict[str, list[float]]]:
    """Generate and train; return the rollouts stored at each point, and the memory in MB by process."""
    at: list[int] = []
    memory: dict[str, list[float]] = defaultdict(list)
    with Client(served.url, RUN) as client, null_engine(arguments, SIDES[arguments.call]) as url:
        # The engine has one version for ever, so the trainer publishes none: every step is one of version 0.
        batch = {"groups_per_batch": arguments.groups_per_batch, "tokens_per_batch": None, "seq_len": 4096}
        client.put_run({"batch": batch, "group_size": arguments.group_size, "steps_per_publish": NEVER})
        trainer = Trainer(served.url)
        trainer.start()
        words = ["-m", "replaybuf", "--log-level", "error", *generate(folder, served.url, RUN, url, arguments)]
        begun_s = time.monotonic()
        with process(words) as generator:
            watched = psutil.Process(generator.pid)
            for point in range(1, SAMPLES + 1):
                wanted = arguments.rollouts * point // SAMPLES // arguments.group_size
                at.append(reach(client, generator, wanted) * arguments.group_size)
                if trainer.fault is not None:
                    raise trainer.fault
                memory["generator"].append(watched.memory_info().rss / MB)
                memory["service"].append(served.rss_bytes / MB)
                with served.redis() as redis:
                    memory["Redis"].append(redis.info("memory")["used_memory"] / MB)
                figures = "  ".join(f"{side} {values[-1]:.1f} MB" for side, values in memory.items())
                print(f"{at[-1]:>8,} rollouts, {time.monotonic() - begun_s:.0f} s  {figures}", flush=True)
        trainer.stop.set()
        trainer.join(TIMEOUT_S)
    return at, dict(memory)


def growth(at: list[int], memory: list[float]) -> float:
    """Return the rise of a line through the points after the warm-up."""
    slope, _ = np.polyfit(at[WARM_SAMPLES:], memory[WARM_SAMPLES:], 1)
    return float(slope) * at[-1]


if __name__ == "__main__":
    main()
