"""Encode and decode the body of a batch of 512 rollouts, against msgspec with Python lists.

    python benchmarks/bodies.py --rounds 9

The batch has 64 groups of 8 rollouts of 2,048 tokens, those of `frames.py`. Lists, the format of prime-rl: one struct
of Python lists per rollout, encoded from numpy and decoded to numpy. Body: packed into rows of 16,384 tokens for one
rank, with positions and an advantage per token in addition. Extras: the same with the version of each token and the
lengths of rollouts. Mask: the first half of each completion is too old for the loss. Times are processor time of the
thread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import msgspec
import numpy as np
from frames import decode_lists, encode_lists, grpo_like_group
from measured import Measured
from one_rank import one_rank_body

from replaybuf.wire.batch import BodyExtra, read_batch
from replaybuf.wire.group import Group

GROUPS, SEQ_LEN = 64, 16_384
LISTS, BODY, EXTRA, MASKED = "lists", "body", "body with extras", "body with extras and mask"
EXTRAS: tuple[BodyExtra, ...] = ("token_versions", "lengths")


def with_two_versions(group: Group) -> Group:
    """Give the first half of each completion version 0, and the rest version 1."""
    halves = [
        span
        for number, length in enumerate(group.completion_lengths.tolist())
        for span in ((number, 0, 0, length // 2), (number, 1, length // 2, length))
    ]
    return msgspec.structs.replace(group, policy_version=0, version_spans=np.array(halves, np.int32))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    groups = [grpo_like_group(rng)] * GROUPS
    body, lists = one_rank_body(groups, 7, SEQ_LEN), [encode_lists(group) for group in groups]
    halves = [with_two_versions(group) for group in groups]
    packages = ["numpy", "msgspec"]
    results = Measured("bodies", reference=LISTS, packages=packages, settings=vars(arguments) | {"groups": GROUPS})
    ways: dict[str, dict[str, Callable[[], object]]] = {
        "encode": {
            LISTS: lambda: [encode_lists(group) for group in groups],
            BODY: lambda: one_rank_body(groups, 7, SEQ_LEN),
            EXTRA: lambda: one_rank_body(groups, 7, SEQ_LEN, EXTRAS),
            MASKED: lambda: one_rank_body(halves, 7, SEQ_LEN, EXTRAS, 1),
        },
        "decode": {LISTS: lambda: [decode_lists(raw) for raw in lists], BODY: lambda: read_batch(body)},
    }
    for what, sides in ways.items():
        took: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(arguments.rounds + 1):
            for side, call in sides.items():
                begun = time.thread_time()
                call()
                if number:  # the first round warms up
                    took[side].append((time.thread_time() - begun) * 1e3)
        results.record(what, took, unit="ms", ratio="reference / it")
    sizes = {LISTS: [sum(map(len, lists)) / 1e6], BODY: [len(body) / 1e6]}
    results.record("size", sizes, unit="MB")
    results.save()


if __name__ == "__main__":
    main()
