"""Insert and sample the groups of `path.py` with Reverb, whose server is another process.

    python -m venv /tmp/rv && /tmp/rv/bin/pip install -r benchmarks/peers/reverb.txt
    PYTHONPATH=. /tmp/rv/bin/python benchmarks/peers/reverb_peer.py --rounds 5

A batch has 64 groups of 8 rollouts, about a million tokens. Each group is one item (its columns as tensors), inserted
by one writer and sampled once by the same process, first in, first out. Prints M tokens per second of both. Nothing is
durable there.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import reverb

sys.path.insert(0, str(Path(__file__).parents[1]))
from groups import random_group
from measured import Measured

GROUPS, ROLLOUTS, MEAN_TOKENS = 64, 8, 2048
COLUMNS = ("prompt_ids", "prompt_lengths", "completion_ids", "completion_lengths", "inference_logprobs")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    groups = [random_group(rng, n, rollouts=ROLLOUTS, mean_tokens=MEAN_TOKENS) for n in range(GROUPS)]
    tokens = sum(group.tokens for group in groups)
    columns = [[getattr(group, name) for name in COLUMNS] + [group.completion_mask] for group in groups]
    results = Measured(
        "peer_reverb", reference="insert", packages=["dm-reverb", "tensorflow"], settings={"tokens": tokens}
    )
    here, there = mp.get_context("spawn").Pipe()
    mp.get_context("spawn").Process(target=serve, args=(there,), daemon=True).start()
    client = reverb.Client(f"localhost:{here.recv()}")
    put, got, both = [], [], []
    for number in range(given.rounds + 1):
        begun = time.perf_counter()
        with client.writer(max_sequence_length=1) as writer:
            for own in columns:
                writer.append(own)
                writer.create_item("groups", num_timesteps=1, priority=1.0)
        stored = time.perf_counter()
        found = 0
        for sample in client.sample("groups", num_samples=GROUPS):
            prompt_ids, _, completion_ids, *_ = sample[0].data
            found += prompt_ids.size + completion_ids.size
        ended = time.perf_counter()
        if found != tokens:
            raise RuntimeError(f"{found} tokens of {tokens}")
        if number:  # the first round warms up
            put.append(tokens / (stored - begun) / 1e6)
            got.append(tokens / (ended - stored) / 1e6)
            both.append(tokens / (ended - begun) / 1e6)
    results.record("a batch", {"insert": put, "sample": got, "insert, then sample": both}, unit="M tokens/s")
    results.save()


def serve(port: Connection) -> None:
    """Serve until killed; send the port."""
    server = reverb.Server(tables=[reverb.Table.queue("groups", max_size=GROUPS)])
    port.send(server.port)
    server.wait()


if __name__ == "__main__":
    main()
