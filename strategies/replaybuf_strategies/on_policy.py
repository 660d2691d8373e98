"""On-policy: the batch of step s holds only groups sampled by version(s)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from replaybuf.strategy import Budget, BufferView, Groups, Selection, Strategy, StrategyOptions, Waiting, fill


class OnPolicy(Strategy[StrategyOptions]):
    """Staleness 0, each group once, oldest first, no look-ahead.

    Invariant: version(step) - policy_version = 0 for every group of a batch. Waits with `awaiting_publication` until
    version(step) is published; producers get no ticket meanwhile.
    """

    Options: ClassVar[type[StrategyOptions]] = StrategyOptions

    def select(
        self, groups: Groups, buffer: BufferView, budget: Budget, rng: np.random.Generator
    ) -> Selection | Waiting:
        """Take groups in the order they were stored."""
        return fill(groups, np.arange(len(groups)), budget)
