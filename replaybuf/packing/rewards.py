"""Mean reward of a batch and of its parts, over all ranks: what a trainer logs.

Sums are rounded once per group and added in the order of the batch, so every server gets the same digits.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from replaybuf.wire.batch import RewardPart
from replaybuf.wire.group import LARGEST_REWARD_PARTS, LARGEST_SCORE, Float64s, Group


class BatchRewards(NamedTuple):
    """Mean reward of all rollouts, and the mean of each part over the rollouts that have it, by name."""

    mean: float
    parts: dict[str, RewardPart]


class _Sum:
    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, values: Float64s) -> None:
        """Add the values that an append may have: a direct writer can store others, and JSON has no infinity."""
        values = values[np.abs(values) <= LARGEST_SCORE]
        self.total += math.fsum(values.tolist())
        self.count += len(values)

    @property
    def mean(self) -> float:
        return self.total / max(1, self.count)


def summarise_rewards(groups: Sequence[Group]) -> BatchRewards:
    """Return the means of a batch; of more than `LARGEST_REWARD_PARTS` parts, the first ones by name."""
    whole, parts = _Sum(), defaultdict[str, _Sum](_Sum)
    for group in groups:
        whole.add(group.rewards)
        for name, values in group.reward_parts.items():
            parts[name].add(values)
    names = sorted(parts)[:LARGEST_REWARD_PARTS]
    return BatchRewards(whole.mean, {name: RewardPart(parts[name].mean, parts[name].count) for name in names})
