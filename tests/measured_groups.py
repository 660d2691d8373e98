"""Groups of a usual size, and figures of two sides in turns, for the step times of adapters."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from replaybuf.client import Client, group_builder
from replaybuf.wire.group import Group
from tests.conftest import ServeProcess

GROUPS, SIZE, PROMPT_TOKENS, TOKENS = 16, 8, 64, 448
CONFIG: dict[str, Any] = {
    "batch": {"groups_per_batch": GROUPS, "tokens_per_batch": None, "seq_len": 4096},
    "group_size": SIZE,
    "strategy": {"name": "one-step-off-policy", "options": {"max_staleness": 1000}},
}


def large_group(number: int) -> Group:
    """Build a group of 8 rollouts with 512 tokens each: a batch of 16 has 65,536."""
    generator = np.random.default_rng(number)
    prompt = generator.integers(0, 50_000, PROMPT_TOKENS).tolist()
    builder = group_builder(prompt, prompt_id=f"p/{number}", policy_version=0, group_id=f"g{number}")
    for rollout in range(SIZE):
        completion = generator.integers(0, 50_000, TOKENS)
        builder.add(completion.tolist(), (-generator.random(TOKENS)).tolist(), float(rollout % 2))
    return builder.build()


def store(client: Client, groups: Sequence[Group]) -> None:
    """Append groups; all are stored."""
    assert {result.status for result in client.append(groups)} == {"stored"}


def compare(pairs: int, sides: Mapping[str, Callable[[int], float]]) -> None:
    """Measure two sides in turns; print the median and the spread of each, in milliseconds, and of their ratio."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for pair in range(pairs):
        for name in sorted(sides, reverse=pair % 2 == 1):
            seconds[name].append(1000 * sides[name](pair))
    for name, values in seconds.items():
        print(f"{name}: median {statistics.median(values):.1f} ms, {min(values):.1f} to {max(values):.1f}")
    ratios = [first / other for first, other in zip(*seconds.values(), strict=True)]
    print(f"ratio: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}, {pairs} pairs")


@contextlib.contextmanager
def measuring(about: str) -> Iterator[tuple[str, Path, int]]:
    """Start a service; yield its address, a scratch folder and the number of pairs, which `--pairs` sets."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    pairs = parser.parse_args().pairs
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        service = ServeProcess(Path(scratch, "data")).start()
        try:
            yield service.url, Path(scratch), pairs
        finally:
            service.end()
