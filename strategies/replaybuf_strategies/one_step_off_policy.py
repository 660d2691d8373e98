"""One-step off-policy: generation for step N runs while step N-1 trains (k-step with `max_staleness` = k)."""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from msgspec import UNSET, Meta, UnsetType

from replaybuf.strategy import Budget, BufferView, Flow, Groups, Selection, Strategy, StrategyOptions, Waiting, fill
from replaybuf_strategies.adaptive import adaptive_capacity
from replaybuf_strategies.draws import ascending
from replaybuf_strategies.slots import admit_retries, check_slots, fill_slots


class OneStepOffPolicyOptions(StrategyOptions, frozen=True):
    """Options of `one-step-off-policy`."""

    max_staleness: Annotated[
        int, Meta(ge=0, le=2**31 - 1, description="Most versions that a group may be behind the policy it trains (k).")
    ] = 1
    adaptive: Annotated[
        bool | UnsetType,
        Meta(description="Admit only as many groups as keep the trainer from waiting, by measured speeds."),
    ] = UNSET
    exact_slots: Annotated[
        bool | UnsetType,
        Meta(description="Bind each group to its step when its ticket is issued; needs batch.groups_per_batch."),
    ] = UNSET


class OneStepOffPolicy(Strategy[OneStepOffPolicyOptions]):
    """Staleness at most k, each group once, oldest first, one step of look-ahead.

    Invariant: 0 <= version(step) - policy_version <= k. Groups with the least time left come first: the oldest version,
    then the order of arrival, so that a slow prompt is trained before it becomes too stale. With `exact_slots` tickets
    give the order, and a batch waits for its slow prompts (`slots`).
    """

    Options: ClassVar[type[StrategyOptions]] = OneStepOffPolicyOptions
    look_ahead = 1

    @property
    def max_staleness(self) -> int:
        """Largest staleness at use: the option k."""
        return self.options.max_staleness

    def check(self, budget: Budget, steps_per_publish: int, max_tokens_live: int | None) -> None:
        """Reject slots without a number of them. Raises `Invalid`."""
        if self.options.exact_slots:
            check_slots(budget)

    def admit(self, buffer: BufferView, flow: Flow) -> int:
        """Return the number of groups that may start now: the window, or the part of it that is needed."""
        capacity = super().admit(buffer, flow)
        if self.options.adaptive:
            capacity = adaptive_capacity(buffer, flow, capacity)
        return admit_retries(buffer, capacity, self.max_staleness) if self.options.exact_slots else capacity

    def select(
        self, groups: Groups, buffer: BufferView, budget: Budget, rng: np.random.Generator
    ) -> Selection | Waiting:
        """Take the oldest policy version first, then the order in which groups were stored; or the next slots."""
        if self.options.exact_slots:
            return fill_slots(groups, buffer, budget)
        last_version = (buffer.step + 1) // buffer.steps_per_publish - self.options.max_staleness
        return fill(groups, ascending(groups.policy_version), budget, last_version)
