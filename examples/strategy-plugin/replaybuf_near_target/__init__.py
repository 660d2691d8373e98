"""A strategy of its own distribution: near-target, for runs in which many groups teach little."""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from msgspec import Meta

from replaybuf.strategy import Budget, BufferView, Groups, Selection, Strategy, StrategyOptions, Waiting, fill


class NearTargetOptions(StrategyOptions, frozen=True):
    """`target`: mean reward that teaches most; `max_staleness`: how many versions a group may be behind."""

    target: Annotated[float, Meta(ge=0, le=1)] = 0.5
    max_staleness: Annotated[int, Meta(ge=1, le=1024)] = 2


class NearTarget(Strategy[NearTargetOptions]):
    """Take groups whose mean reward is nearest to a target; those on their last usable version before all others.

    Invariant: 0 <= version(step) - policy_version <= max_staleness, each group once. A group that teaches little is
    put off, not dropped: at its last usable version it comes first, so that slow and hard prompts are trained too.
    """

    Options: ClassVar[type[StrategyOptions]] = NearTargetOptions

    @property
    def max_staleness(self) -> int:
        """Largest staleness at use: the option."""
        return self.options.max_staleness

    @property
    def look_ahead(self) -> int:
        """One step: a trainer may prefetch the next batch while it trains."""
        return 1

    def select(
        self, groups: Groups, buffer: BufferView, budget: Budget, rng: np.random.Generator
    ) -> Selection | Waiting:
        """Order by (not on its last version, distance to the target), equal ones as they were stored."""
        can_wait = buffer.version - groups.policy_version < self.options.max_staleness
        distance = np.abs(groups.reward_mean - self.options.target)
        return fill(groups, np.lexsort((distance, can_wait)), budget)
