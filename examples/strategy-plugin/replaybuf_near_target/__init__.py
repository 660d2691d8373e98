"""The strategy `near-target`, for runs in which many groups teach little."""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from msgspec import Meta

from replaybuf.strategy import Budget, BufferView, Groups, Selection, Strategy, StrategyOptions, Waiting, fill


class NearTargetOptions(StrategyOptions, frozen=True):
    """`target`: mean reward that teaches most; `max_staleness`: largest number of versions a group may be behind."""

    target: Annotated[float, Meta(ge=0, le=1)] = 0.5
    max_staleness: Annotated[int, Meta(ge=1, le=1024)] = 2


class NearTarget(Strategy[NearTargetOptions]):
    """Takes groups on their last usable version first, then groups with a mean reward nearest to a target.

    Invariant: 0 <= version(step) - policy_version <= max_staleness, each group once. A group that teaches little is
    delayed, not dropped: on its last usable version it comes first, so slow and hard prompts are trained too.
    """

    Options: ClassVar[type[StrategyOptions]] = NearTargetOptions
    look_ahead = 1  # a trainer may prefetch the next batch while it trains

    @property
    def max_staleness(self) -> int:
        """Largest staleness at use: the option."""
        return self.options.max_staleness

    def select(
        self, groups: Groups, buffer: BufferView, budget: Budget, rng: np.random.Generator
    ) -> Selection | Waiting:
        """Order by (not on its last version, distance to the target), then as stored."""
        can_wait = buffer.version - groups.policy_version < self.options.max_staleness
        distance = np.abs(groups.reward_mean - self.options.target)
        return fill(groups, np.lexsort((distance, can_wait)), budget)
