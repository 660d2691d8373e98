"""The filters that come with replaybuf: groups that are not worth training, judged once, when they arrive.

Filters of a run compose in their order: the first one that drops a group names the reason. Tokens of dropped groups
were spent; what is dropped and why is counted (`replaybuf_groups_dropped_total{reason}`).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from replaybuf.errors import Invalid
from replaybuf.strategy import BufferView, Evictions, Filter, Groups, StrategyOptions


class ZeroVarianceOptions(StrategyOptions, frozen=True):
    """`tolerance`: largest standard deviation of rewards that counts as none."""

    tolerance: Annotated[float, Meta(ge=0)] = 1e-6


class ZeroVariance(Filter[ZeroVarianceOptions]):
    """Drop groups in which all rollouts have one reward: reward_std <= tolerance, reason `zero_variance`.

    Their advantages are all 0 where they are taken within the group (GRPO), so they cost a step and teach nothing
    (dynamic sampling: Yu et al. 2025, DAPO, section 3.2). A group of one rollout is always dropped.
    """

    Options: ClassVar[type[StrategyOptions]] = ZeroVarianceOptions

    def drop(self, groups: Groups, buffer: BufferView) -> Evictions:
        """Name the groups without variance."""
        return _dropped(groups, (groups.reward_std <= self.options.tolerance, "zero_variance"))


class RewardWindowOptions(StrategyOptions, frozen=True):
    """`low`, `high`: bounds of the mean reward, both inside; null = none. One of them must be set, and low <= high."""

    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        low, high = self.low, self.high
        if low is None and high is None:
            raise _contradiction("low", None, "a number where high is null", "nothing would ever be dropped")
        if low is not None and high is not None and low > high:
            raise _contradiction("low", low, high, f"high is {high}, so every group would be dropped")


class RewardWindow(Filter[RewardWindowOptions]):
    """Keep groups of middling difficulty: low <= reward_mean <= high.

    Above, the prompt is `too_easy`; below, `too_hard`.
    """

    Options: ClassVar[type[StrategyOptions]] = RewardWindowOptions

    def drop(self, groups: Groups, buffer: BufferView) -> Evictions:
        """Name the groups outside the window."""
        low = -np.inf if self.options.low is None else self.options.low
        high = np.inf if self.options.high is None else self.options.high
        mean = groups.reward_mean
        return _dropped(groups, (mean > np.float32(high), "too_easy"), (mean < np.float32(low), "too_hard"))


class OverlongOptions(StrategyOptions, frozen=True):
    """`max_tokens`: most tokens of a rollout, prompt included; `max_truncated`: largest share of a group's rollouts
    that ended at their token limit. null = no bound; one of them must be set.
    """

    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_truncated: Annotated[float, Meta(ge=0, lt=1)] | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is None and self.max_truncated is None:
            raise _contradiction(
                "max_tokens", None, "a number where max_truncated is null", "nothing would ever be dropped"
            )


class Overlong(Filter[OverlongOptions]):
    """Drop groups by length: longest_tokens > max_tokens (`overlong_rollout`), or truncated / rollouts > max_truncated
    (`truncated_rollouts`): their reward judges the limit, not the answer.

    Shifts the length distribution towards short groups; `replaybuf_groups_dropped_total` says how much is dropped.
    """

    Options: ClassVar[type[StrategyOptions]] = OverlongOptions

    def drop(self, groups: Groups, buffer: BufferView) -> Evictions:
        """Name the groups that are too long or too often cut."""
        longest, truncated = self.options.max_tokens, self.options.max_truncated
        none = np.zeros(len(groups), bool)
        too_long = none if longest is None else groups.longest_tokens > longest
        cut = none if truncated is None else groups.truncated > truncated * groups.rollouts.astype(np.float64)
        return _dropped(groups, (too_long, "overlong_rollout"), (cut, "truncated_rollouts"))


def _dropped(groups: Groups, *rules: tuple[npt.NDArray[np.bool_], str]) -> Evictions:
    """Name each group that a rule holds for, once, with the reason of the first such rule."""
    rows: list[int] = []
    reasons: list[str] = []
    left = np.ones(len(groups), bool)
    for holds, reason in rules:
        found = groups.row[holds & left].tolist()
        left &= ~holds
        rows += found
        reasons += [reason] * len(found)
    return Evictions(tuple(rows), tuple(reasons))


def _contradiction(name: str, value: Any, bound: Any, why: str) -> Invalid:
    option = f"filter.options.{name}"
    return Invalid(f"{option} is {value!r}; {why}; it must be {bound!r}", name=option, value=value, bound=bound)
