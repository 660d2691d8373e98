"""Filters that come with replaybuf: they drop groups that are not worth training, once, on arrival.

Filters of a run apply in order; the first one that drops a group gives the reason. The metric
`replaybuf_groups_dropped_total{reason}` counts dropped groups, whose tokens were spent.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from replaybuf.strategy import Budget, BufferView, Evictions, Filter, Groups, StrategyOptions, contradiction

LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
"""Rewards have single precision: a bound beyond it would accept all groups, or none."""

Reward = Annotated[float, Meta(ge=-LARGEST_FLOAT32, le=LARGEST_FLOAT32)]


class ZeroVarianceOptions(StrategyOptions, frozen=True):
    """Options of `zero-variance`."""

    tolerance: Annotated[
        float,
        Meta(ge=0, lt=LARGEST_FLOAT32, description="Largest standard deviation of rewards that counts as zero."),
    ] = 1e-6


class ZeroVariance(Filter[ZeroVarianceOptions]):
    """Drop groups whose rollouts all have the same reward: reward_std <= tolerance, reason `zero_variance`.

    With advantages within the group (GRPO) all of them are 0, so such a group costs time and teaches nothing (dynamic
    sampling: Yu et al. 2025, DAPO, section 3.2). A group of one rollout is always dropped.
    """

    Options: ClassVar[type[StrategyOptions]] = ZeroVarianceOptions

    def check(self, budget: Budget, group_size: int | None) -> None:
        """Raise `Invalid` for a run with groups of one rollout."""
        if group_size == 1:
            raise contradiction(
                "group_size", 1, "at least 2", "filter zero-variance would drop every group: one reward has no variance"
            )

    def drop(self, groups: Groups, buffer: BufferView) -> Evictions:
        """Return the groups without variance."""
        return _dropped(groups, (groups.reward_std <= self.options.tolerance, "zero_variance"))


BelowOne = Annotated[float, Meta(ge=0, lt=1)]


class RewardWindowOptions(StrategyOptions, frozen=True):
    """Options of `reward-window`: `low` or `high` must be set, and low <= high."""

    low: Annotated[Reward | None, Meta(description="Least mean reward that is kept. Default: no bound.")] = None
    high: Annotated[Reward | None, Meta(description="Largest mean reward that is kept. Default: no bound.")] = None
    easy_fraction: Annotated[BelowOne, Meta(description="Share of the groups above high that is kept.")] = 0.0
    hard_fraction: Annotated[BelowOne, Meta(description="Share of the groups below low that is kept.")] = 0.0

    def __post_init__(self) -> None:
        for name, fraction, bound in (
            ("easy_fraction", self.easy_fraction, self.high),
            ("hard_fraction", self.hard_fraction, self.low),
        ):
            if fraction and bound is None:
                side = "high" if name == "easy_fraction" else "low"
                raise contradiction(
                    f"filter.options.{name}", fraction, "0", f"{side} is null, so the pool does not exist"
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
    """Keep groups of medium difficulty, low <= reward_mean <= high, and a share of those on either side.

    Groups above are the easy pool, groups below the hard pool. A pool with fraction f keeps the groups with h(row) < f,
    where h hashes the group's row number into [0, 1): f of them in the long run, and always the same ones. Others are
    dropped as `too_easy` or `too_hard`. (In prime-rl pools hold prompts, and fractions are of generated groups.)
    """

    Options: ClassVar[type[StrategyOptions]] = RewardWindowOptions

    def drop(self, groups: Groups, buffer: BufferView) -> Evictions:
        """Return the groups outside the window that are not kept."""
        low = -np.inf if self.options.low is None else self.options.low
        high = np.inf if self.options.high is None else self.options.high
        mean, lot = groups.reward_mean, _lots(groups.row)
        easy = (mean > np.float32(high)) & (lot >= self.options.easy_fraction)
        hard = (mean < np.float32(low)) & (lot >= self.options.hard_fraction)
        return _dropped(groups, (easy, "too_easy"), (hard, "too_hard"))


class OverlongOptions(StrategyOptions, frozen=True):
    """Options of `overlong`; one of them must be set."""

    max_tokens: Annotated[
        Annotated[int, Meta(ge=2)] | None,
        Meta(description="Most tokens of a rollout, prompt included. Default: no bound."),
    ] = None
    max_truncated: Annotated[
        BelowOne | None,
        Meta(description="Largest share of a group's rollouts that ended at their token limit. Default: no bound."),
    ] = None

    def __post_init__(self) -> None:
        if self.max_tokens is None and self.max_truncated is None:
            raise contradiction(
                "filter.options.max_tokens",
                None,
                "a number where max_truncated is null",
                "nothing would ever be dropped",
            )


class Overlong(Filter[OverlongOptions]):
    """Drop groups by length: a rollout is too long, or too many rollouts ended at their token limit.

    longest_tokens > max_tokens (`overlong_rollout`), or truncated / rollouts > max_truncated (`truncated_rollouts`):
    their reward depends on the limit, not on the answer. Shifts the length distribution towards short groups; see
    `replaybuf_groups_dropped_total`.
    """

    Options: ClassVar[type[StrategyOptions]] = OverlongOptions

    def drop(self, groups: Groups, buffer: BufferView) -> Evictions:
        """Return the groups with a rollout that is too long, or too many truncated ones."""
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
    """Return each group that matches a rule, once, with the reason of the first such rule."""
    rows: list[int] = []
    reasons: list[str] = []
    left = np.ones(len(groups), bool)
    for holds, reason in rules:
        dropped = groups.row[holds & left].tolist()
        left &= ~holds
        rows += dropped
        reasons += [reason] * len(dropped)
    return Evictions(tuple(rows), tuple(reasons))
