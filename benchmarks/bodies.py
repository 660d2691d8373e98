"""The body of a batch of 512 rollouts against lists in msgspec, the form in which prime-rl sent batches: both ways.

    python benchmarks/bodies.py --rounds 9

64 groups of 8 rollouts of 2,048 tokens, the ones of `frames.py`. Lists: one struct of Python lists per rollout, encoded
from numpy, decoded to numpy arrays per rollout. Body: packed into rows of 16,384 tokens for one rank, written from the
columns of the groups, read into arrays per row; it holds positions and an advantage per token beside what the lists
hold. Processor time of the thread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
from frames import decode_lists, encode_lists, grpo_like_group
from groups import one_rank_body
from measured import Measured

from replaybuf.wire.batch import read_batch

GROUPS, SEQ_LEN = 64, 16_384
LISTS, BODY = "lists", "body"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    groups = [grpo_like_group(rng)] * GROUPS
    body, lists = one_rank_body(groups, 7, SEQ_LEN), [encode_lists(group) for group in groups]
    packages = ["numpy", "msgspec"]
    told = Measured("bodies", reference=LISTS, packages=packages, settings=vars(given) | {"groups": GROUPS})
    ways: dict[str, dict[str, Callable[[], object]]] = {
        "encode": {
            LISTS: lambda: [encode_lists(group) for group in groups],
            BODY: lambda: one_rank_body(groups, 7, SEQ_LEN),
        },
        "decode": {LISTS: lambda: [decode_lists(raw) for raw in lists], BODY: lambda: read_batch(body)},
    }
    for what, sides in ways.items():
        took: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(given.rounds + 1):
            for side, call in sides.items():
                begun = time.thread_time()
                call()
                if number:  # the first round warms up
                    took[side].append((time.thread_time() - begun) * 1e3)
        told.take(what, took, unit="ms", ratio="reference / it")
    sizes = {LISTS: [sum(map(len, lists)) / 1e6], BODY: [len(body) / 1e6]}
    told.take("size", sizes, unit="MB")
    told.save()


if __name__ == "__main__":
    main()
