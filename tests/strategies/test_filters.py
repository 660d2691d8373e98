"""Built-in filters: the groups they drop, the reasons, and their order."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from replaybuf.errors import Invalid
from replaybuf.kernel.strategy.plugin_set import build_filter
from replaybuf.strategy import Budget, Groups
from tests.builders import buffer_view, live_groups


def shown(count: int, **columns: Any) -> Groups:
    """Build groups of 2 rollouts with these columns."""
    plain = live_groups([10] * count)
    made = {name: np.array(getattr(plain, name)) for name in Groups.COLUMNS}
    return Groups(**made | {name: np.asarray(values, Groups.DTYPES[name]) for name, values in columns.items()})


def dropped(groups: Groups, *filters: tuple[str, dict[str, Any]]) -> dict[int, str]:
    """Apply filters in order, each to the groups that are left; return the reason of each dropped row."""
    reasons: dict[int, str] = {}
    for name, options in filters:
        left = groups.take(~np.isin(groups.row, list(reasons)))
        evictions = build_filter(name, options).drop(left, buffer_view())
        reasons |= dict(zip(evictions.rows, evictions.reasons, strict=True))
    return reasons


def test_groups_with_equal_rewards_are_dropped() -> None:
    """Float rounding does not count as variance; a larger tolerance drops more."""
    groups = shown(4, reward_std=[0.0, 1e-7, 0.01, 0.5])
    assert dropped(groups, ("zero-variance", {})) == {1: "zero_variance", 2: "zero_variance"}
    assert set(dropped(groups, ("zero-variance", {"tolerance": 0.1}))) == {1, 2, 3}


def test_a_reward_window_keeps_groups_of_medium_difficulty() -> None:
    """Both bounds are inclusive, and 0.8 matches 0.8 although rewards are float32."""
    groups = shown(4, reward_mean=[0.1, 0.2, 0.8, 0.9])
    window = ("reward-window", {"low": 0.2, "high": 0.8})
    assert dropped(groups, window) == {1: "too_hard", 4: "too_easy"}
    assert dropped(groups, ("reward-window", {"high": 0.1})) == dict.fromkeys((2, 3, 4), "too_easy")


def test_a_share_of_each_pool_outside_the_window_is_kept() -> None:
    """The example of docs/filters.md, and the hard pool; the result of a group does not depend on the others."""
    easy = shown(8, reward_mean=[0.9] * 8)
    window = {"low": 0.2, "high": 0.8, "easy_fraction": 0.25}
    assert dropped(easy, ("reward-window", window)) == dict.fromkeys((1, 2, 4, 6, 8), "too_easy")
    hard = shown(8, reward_mean=[0.1] * 8)
    assert dropped(hard, ("reward-window", window)) == dict.fromkeys(range(1, 9), "too_hard")
    assert set(dropped(hard, ("reward-window", {"low": 0.2, "hard_fraction": 0.5}))) == {1, 4, 8}
    alone = {row for at in range(8) for row in dropped(easy.take(np.array([at])), ("reward-window", window))}
    assert alone == {1, 2, 4, 6, 8}


@pytest.mark.parametrize("fraction", [0.01, 0.25, 0.9])
@pytest.mark.parametrize("every", [1, 8, 144])
def test_the_kept_share_of_a_pool_is_the_fraction(fraction: float, every: int) -> None:
    """Also if easy groups come at regular distances. Rows are fixed, so is the result: a fair hash would fail it
    with probability 1e-6 per case (4.9 standard deviations of the binomial, both sides).
    """
    count = 20_000
    rows = 1 + every * np.arange(count)
    groups = shown(count, row=rows, reward_mean=[1.0] * count)
    kept = count - len(dropped(groups, ("reward-window", {"high": 0.8, "easy_fraction": fraction})))
    assert abs(kept - fraction * count) < 4.9 * np.sqrt(count * fraction * (1 - fraction))


def test_long_and_truncated_groups_are_dropped_once() -> None:
    groups = shown(4, longest_tokens=[50, 51, 51, 20], truncated=[0, 2, 0, 1], rollouts=[2, 2, 2, 2])
    both = ("overlong", {"max_tokens": 50, "max_truncated": 0.25})
    assert dropped(groups, both) == {2: "overlong_rollout", 3: "overlong_rollout", 4: "truncated_rollouts"}
    assert dropped(groups, ("overlong", {"max_truncated": 0.5})) == {2: "truncated_rollouts"}
    assert dropped(groups, ("overlong", {"max_truncated": 0})) == dict.fromkeys((2, 4), "truncated_rollouts")


def test_the_first_filter_that_drops_a_group_names_the_reason() -> None:
    groups = shown(2, reward_std=[0, 0], longest_tokens=[99, 9])
    spec: tuple[str, dict[str, Any]] = ("zero-variance", {})
    other: tuple[str, dict[str, Any]] = ("overlong", {"max_tokens": 50})
    assert dropped(groups, spec, other) == {1: "zero_variance", 2: "zero_variance"}
    assert dropped(groups, other, spec) == {1: "overlong_rollout", 2: "zero_variance"}


@pytest.mark.parametrize(
    ("name", "options", "option"),
    [
        ("reward-window", {}, "filter.options.low"),
        ("reward-window", {"low": 0.6, "high": 0.5}, "filter.options.low"),
        ("reward-window", {"high": 0.6, "hard_fraction": 0.5}, "filter.options.hard_fraction"),
        ("reward-window", {"low": 0.6, "easy_fraction": 0.5}, "filter.options.easy_fraction"),
        ("reward-window", {"high": 0.6, "easy_fraction": 1.0}, "filter.options"),
        ("overlong", {}, "filter.options.max_tokens"),
        ("overlong", {"max_truncated": 1.0}, "filter.options"),
        ("overlong", {"max_tokens": 1}, "filter.options"),
        ("zero-variance", {"tolerance": -1}, "filter.options"),
        ("zero-variance", {"tolerance": 1e39}, "filter.options"),
        ("reward-window", {"low": 1e39}, "filter.options"),
        ("reward-window", {"high": -1e39}, "filter.options"),
        *(
            (name, {option: value}, f"filter.options.{option}")
            for name, option in (
                ("zero-variance", "tolerance"),
                ("reward-window", "low"),
                ("reward-window", "high"),
                ("reward-window", "easy_fraction"),
                ("overlong", "max_truncated"),
            )
            for value in (math.nan, math.inf, -math.inf)
        ),
        ("zero-variance", {"tolerances": 1}, "filter.options"),
    ],
)
def test_options_that_drop_nothing_or_everything_are_rejected(name: str, options: dict[str, Any], option: str) -> None:
    with pytest.raises(Invalid) as caught:
        build_filter(name, options)
    assert caught.value.name == option


def test_zero_variance_rejects_runs_with_groups_of_one_rollout() -> None:
    filter_, budget = build_filter("zero-variance", {}), Budget(1000, None, 100)
    with pytest.raises(Invalid, match="group_size is 1; filter zero-variance would drop every group") as caught:
        filter_.check(budget, 1)
    assert (caught.value.name, caught.value.value, caught.value.bound) == ("group_size", 1, "at least 2")
    for size in (2, None):
        filter_.check(budget, size)


def test_an_unknown_filter_is_an_error_that_lists_installed_ones() -> None:
    with pytest.raises(Invalid, match="filter is 'zero'; installed: overlong, reward-window, zero-variance"):
        build_filter("zero", {})
