"""One-step off-policy: generation for step N runs while step N-1 trains (k-step with `max_staleness` = k)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from replaybuf.strategy import Budget, BufferView, Groups, Selection, Strategy, StrategyOptions, Waiting, fill

_PASSES = 8
_PIECE = 65_536


class OneStepOffPolicyOptions(StrategyOptions, frozen=True):
    """`max_staleness` (k >= 0): how many versions a group may be behind the policy it trains."""

    max_staleness: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 1


class OneStepOffPolicy(Strategy[OneStepOffPolicyOptions]):
    """Staleness at most k, each group once, oldest first, one step of look-ahead.

    Invariant: 0 <= version(step) - policy_version <= k. Groups with the least time left come first: the oldest version,
    then the order of arrival, so that a slow prompt is trained before it becomes too stale.
    """

    Options: ClassVar[type[StrategyOptions]] = OneStepOffPolicyOptions

    @property
    def max_staleness(self) -> int:
        """Largest staleness at use: the option k."""
        return self.options.max_staleness

    @property
    def look_ahead(self) -> int:
        """One step: a trainer may prefetch the next batch while it trains."""
        return 1

    def select(
        self, groups: Groups, buffer: BufferView, budget: Budget, rng: np.random.Generator
    ) -> Selection | Waiting:
        """Take the oldest policy version first, then the order in which groups were stored."""
        return fill(groups, oldest_first(groups), budget)


def oldest_first(groups: Groups) -> Iterator[npt.NDArray[np.int64]]:
    """Order positions by policy version, then by storing, in pieces: `argsort(policy_version, kind="stable")`.

    One version after the other, for as long as a batch asks: within a staleness window there are few versions, and
    most batches are full within the oldest. What is left after `_PASSES` versions is sorted at once.
    """
    versions = groups.policy_version
    version = int(versions.min()) if len(versions) else None
    passes = 0
    while version is not None and passes < _PASSES:
        for start in range(0, len(versions), _PIECE):
            yield np.flatnonzero(versions[start : start + _PIECE] == version) + start
        later = versions[versions > version]
        version = int(later.min()) if len(later) else None
        passes += 1
    if version is not None:
        rest = np.flatnonzero(versions >= version)
        yield rest[np.argsort(versions[rest], kind="stable")]
