"""Cost of rollouts by their length L: a·L + b·L². `replaybuf.client.cost` counts a and b for a model."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from replaybuf.wire.config import Cost

TYPICAL = Cost(1.0, 1.0 / 12288)
"""For an unknown model: about 1B parameters. At 12288 tokens attention costs as much as the rest."""


def rollout_costs(lengths: npt.NDArray[np.int32], cost: Cost = TYPICAL) -> npt.NDArray[np.float64]:
    """Estimate the cost of each rollout, [n]: linear·L + quadratic·L²."""
    tokens = lengths.astype(np.float64)
    costs: npt.NDArray[np.float64] = cost.linear * tokens + cost.quadratic * tokens**2
    return costs


def whole_costs(lengths: npt.NDArray[np.int32], cost: Cost) -> npt.NDArray[np.int64]:
    """Scale costs to integers up to 2^36, so that sums do not depend on their order. Valid for 2^26 rollouts."""
    costs = rollout_costs(lengths, cost)
    largest = float(costs.max()) if len(costs) else 0.0
    return (costs / (largest or 1.0) * 2.0**36).astype(np.int64)
