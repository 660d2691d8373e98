"""The filters that come with replaybuf: groups that are not worth training, judged once, when they arrive.

Filters of a run compose in their order: the first one that drops a group names the reason. Tokens of dropped groups
were spent; what is dropped and why is counted (`replaybuf_groups_dropped_total{reason}`).
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from replaybuf.strategy import Budget, BufferView, Evictions, Filter, Groups, StrategyOptions, contradiction

LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
"""Rewards are kept in single precision: beyond it a bound is infinite to them, and lets all or nothing through."""

Reward = Annotated[float, Meta(ge=-LARGEST_FLOAT32, le=LARGEST_FLOAT32)]


class ZeroVarianceOptions(StrategyOptions, frozen=True):
    """`tolerance`: largest standard deviation of rewards that counts as none."""

    tolerance: Annotated[float, Meta(ge=0, lt=LARGEST_FLOAT32)] = 1e-6


class ZeroVariance(Filter[ZeroVarianceOptions]):
    """Drop groups in which all rollouts have one reward: reward_std <= tolerance, reason `zero_variance`.

    Their advantages are all 0 where they are taken within the group (GRPO), so they cost a step and teach nothing
    (dynamic sampling: Yu et al. 2025, DAPO, section 3.2). A group of one rollout is always dropped.
    """

    Options: ClassVar[type[StrategyOptions]] = ZeroVarianceOptions

    def check(self, budget: Budget, group_size: int | None) -> None:
        """Refuse groups of one rollout. Raises `Invalid`."""
        if group_size == 1:
            raise contradiction(
                "group_size", 1, "at least 2", "filter zero-variance would drop every group: one reward has no variance"
            )

    def drop(self, groups: Groups, buffer: BufferView) -> Evictions:
        """Name the groups without variance."""
        return _dropped(groups, (groups.reward_std <= self.options.tolerance, "zero_variance"))


BelowOne = Annotated[float, Meta(ge=0, lt=1)]


class RewardWindowOptions(StrategyOptions, frozen=True):
    """`low`, `high`: bounds of the mean reward, both inside; null = none. One of them must be set, and low <= high.

    `easy_fraction`, `hard_fraction`: share kept of the groups above `high`, and below `low`.
    """

    low: Reward | None = None
    high: Reward | None = None
    easy_fraction: BelowOne = 0.0
    hard_fraction: BelowOne = 0.0

    def __post_init__(self) -> None:
        for name, fraction, bound in (
            ("easy_fraction", self.easy_fraction, self.high),
            ("hard_fraction", self.hard_fraction, self.low),
        ):
            if fraction and bound is None:
                side = "high" if name == "easy_fraction" else "low"
                raise contradiction(
                    f"filter.options.{name}", fraction, "0", f"{side} is null, so there is no such pool"
                )
        low, high = self.low, self.high
        if low is None and high is None:
            raise contradiction(
                "filter.options.low", None, "a number where high is null", "nothing would ever be dropped"
            )
        if low is not None and high is not None and low > high:
            raise contradiction(
                "filter.options.low", low, f"at most {high:g}", f"high is {high}, so every group would be dropped"
            )


class RewardWindow(Filter[RewardWindowOptions]):
    """Keep groups of middling difficulty, low <= reward_mean <= high, and a share of those on either side.

    Above is the easy pool, below the hard one. Of a pool with fraction f the groups with h(row) < f are kept, where h
    is a hash of the group's row number into [0, 1): f of them in the long run, each judged alike whenever it is asked
    about. What is not kept is dropped as `too_easy` or `too_hard`. (prime-rl has pools of prompts, and fractions of
    what is generated; here a pool is of groups, which exist already.)
    """

    Options: ClassVar[type[StrategyOptions]] = RewardWindowOptions

    def drop(self, groups: Groups, buffer: BufferView) -> Evictions:
        """Name the groups outside the window."""
        low = -np.inf if self.options.low is None else self.options.low
        high = np.inf if self.options.high is None else self.options.high
        mean, lot = groups.reward_mean, _lots(groups.row)
        easy = (mean > np.float32(high)) & (lot >= self.options.easy_fraction)
        hard = (mean < np.float32(low)) & (lot >= self.options.hard_fraction)
        return _dropped(groups, (easy, "too_easy"), (hard, "too_hard"))


class OverlongOptions(StrategyOptions, frozen=True):
    """`max_tokens`: most tokens of a rollout, prompt included (2 at the least); `max_truncated`: largest share of a
    group's rollouts that ended at their token limit. null = no bound; one of them must be set.
    """

    max_tokens: Annotated[int, Meta(ge=2)] | None = None
    max_truncated: BelowOne | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is None and self.max_truncated is None:
            raise contradiction(
                "filter.options.max_tokens",
                None,
                "a number where max_truncated is null",
                "nothing would ever be dropped",
            )


class Overlong(Filter[OverlongOptions]):
    """Drop groups by length: a rollout is too long, or too many were cut at their token limit.

    longest_tokens > max_tokens (`overlong_rollout`), or truncated / rollouts > max_truncated (`truncated_rollouts`):
    their reward judges the limit, not the answer.

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


def _lots(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Hash row numbers into [0, 1): the finaliser of SplitMix64 (Steele et al. 2014), its upper 53 bits."""
    mixed = rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


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
