"""One-step off-policy: generation for step N runs while step N-1 trains (k-step with `max_staleness` = k)."""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from msgspec import UNSET, Meta, UnsetType

from replaybuf.strategy import Budget, BufferView, Flow, Groups, Selection, Strategy, StrategyOptions, Waiting, fill
from replaybuf_strategies.adaptive import adaptive_capacity
from replaybuf_strategies.draws import ascending


class OneStepOffPolicyOptions(StrategyOptions, frozen=True):
    """Options of `one-step-off-policy`.

    - `max_staleness` (k >= 0): largest number of versions that a group may be behind the policy it trains
    - `adaptive`: admit only as many groups as keep the trainer from waiting, by measured speeds
    """

    max_staleness: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 1
    adaptive: bool | UnsetType = UNSET


class OneStepOffPolicy(Strategy[OneStepOffPolicyOptions]):
    """Staleness at most k, each group once, oldest first, one step of look-ahead.

    Invariant: 0 <= version(step) - policy_version <= k. Groups with the least time left come first: the oldest version,
    then the order of arrival, so that a slow prompt is trained before it becomes too stale.
    """

    Options: ClassVar[type[StrategyOptions]] = OneStepOffPolicyOptions
    look_ahead = 1

    @property
    def max_staleness(self) -> int:
        """Largest staleness at use: the option k."""
        return self.options.max_staleness

    def admit(self, buffer: BufferView, flow: Flow) -> int:
        """Return the number of groups that may start now: the window, or the part of it that is needed."""
        window = super().admit(buffer, flow)
        return adaptive_capacity(buffer, flow, window) if self.options.adaptive else window

    def select(
        self, groups: Groups, buffer: BufferView, budget: Budget, rng: np.random.Generator
    ) -> Selection | Waiting:
        """Take the oldest policy version first, then the order in which groups were stored."""
        last_version = (buffer.step + 1) // buffer.steps_per_publish - self.options.max_staleness
        return fill(groups, ascending(groups.policy_version), budget, last_version)
