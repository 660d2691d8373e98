"""Advantages are relative to the group, by the estimator that the run names."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.advantages import ESTIMATORS, GRPO_EPSILON, advantages, check_estimator
from replaybuf.errors import Invalid
from replaybuf.group import Float64s

REWARDS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=32).map(lambda values: np.array(values, np.float64))
NAMES = st.sampled_from(sorted(ESTIMATORS))


def test_grpo_divides_by_the_population_standard_deviation() -> None:
    assert advantages("grpo", np.array([1.0, 0.0, 0.0, 1.0])) == pytest.approx([1, -1, -1, 1], rel=3 * GRPO_EPSILON)


def test_dr_grpo_leaves_the_scale_of_the_rewards() -> None:
    assert advantages("dr-grpo", np.array([4.0, 0.0, 0.0, 0.0])).tolist() == [3.0, -1.0, -1.0, -1.0]


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_equal_rewards_give_exact_zeros(name: str) -> None:
    assert advantages(name, np.full(7, 0.1)).tolist() == [0.0] * 7


def test_an_unknown_estimator_is_refused_with_the_valid_ones() -> None:
    with pytest.raises(Invalid, match=r"advantage is 'ppo'; valid: dr-grpo, grpo"):
        check_estimator("ppo")


@pytest.mark.parametrize("rewards", [[1.0, float("nan")], [float("inf")], [float("inf"), 0.0], [1e308, -1e308]])
def test_rewards_without_finite_advantages_are_refused(rewards: list[float]) -> None:
    with pytest.raises(Invalid, match="no finite advantages"):
        advantages("grpo", np.array(rewards))


def test_no_rewards_are_refused() -> None:
    with pytest.raises(Invalid, match="rewards is empty"):
        advantages("grpo", np.array([]))


@given(NAMES, REWARDS)
def test_advantages_of_a_group_sum_to_zero(name: str, rewards: Float64s) -> None:
    result = advantages(name, rewards)
    assert result.shape == rewards.shape
    assert abs(result.mean()) <= 1e-6 * max(1.0, np.abs(result).max())


@given(NAMES, REWARDS)
def test_a_better_reward_never_has_a_lower_advantage(name: str, rewards: Float64s) -> None:
    order = np.argsort(rewards)
    assert (np.diff(advantages(name, rewards)[order]) >= 0).all()


@given(NAMES, REWARDS)
def test_advantages_do_not_depend_on_the_order_of_the_rollouts(name: str, rewards: Float64s) -> None:
    order = np.random.default_rng(len(rewards)).permutation(len(rewards))
    expected = advantages(name, rewards)[order]
    assert advantages(name, rewards[order]) == pytest.approx(expected, abs=1e-6, rel=1e-6)


@given(REWARDS)
def test_grpo_advantages_are_bounded_by_the_group_size(rewards: Float64s) -> None:
    assert np.abs(advantages("grpo", rewards)).max() <= np.sqrt(len(rewards)) * (1 + 1e-9)
