"""Advantage estimators and process rewards."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.errors import Invalid
from replaybuf.kernel.strategy.advantages import (
    ESTIMATORS,
    GRPO_EPSILON,
    ProcessReward,
    advantages,
    check_estimator,
    group_advantages,
    process_advantages,
)
from replaybuf.wire.group import Float64s, GroupJson, RolloutJson, group_from_json

NAN, INFINITY = float("nan"), float("inf")
REWARDS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=32).map(lambda values: np.array(values, np.float64))
GROUPS = st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(1, 4096)), min_size=1, max_size=32).map(
    lambda pairs: (np.array([p[0] for p in pairs], np.float64), np.array([p[1] for p in pairs], np.float64))
)
NAMES = st.sampled_from(sorted(ESTIMATORS))


def test_grpo_divides_by_the_population_standard_deviation() -> None:
    assert advantages("grpo", np.array([1.0, 0.0, 0.0, 1.0])) == pytest.approx([1, -1, -1, 1], rel=3 * GRPO_EPSILON)


def test_dr_grpo_keeps_the_scale_of_the_rewards() -> None:
    assert advantages("dr-grpo", np.array([4.0, 0.0, 0.0, 0.0])).tolist() == [3.0, -1.0, -1.0, -1.0]


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    assert advantages("rloo", np.array([4.0, 0.0, 0.0, 2.0])) == pytest.approx([4 - 2 / 3, -2.0, -2.0, 2 - 4 / 3])


def test_rloo_length_gives_a_rollout_of_half_the_length_twice_the_weight_per_token() -> None:
    result = advantages("rloo-length", np.array([1.0, 0.0, 1.0]), np.array([2.0, 6.0, 4.0]))
    assert result == pytest.approx([0.5 * 4 / 2, -1.0 * 4 / 6, 0.5 * 4 / 4])


def test_tokens_that_were_not_sampled_do_not_count_as_length() -> None:
    """The first rollout has a tool result of four tokens, so both rollouts have two sampled tokens."""
    masks = ([1, 1, 0, 0, 0, 0], [1, 1])
    group = group_from_json(
        GroupJson(
            prompt_id="p",
            policy_version=0,
            rollouts=[
                RolloutJson(
                    prompt_ids=[1],
                    completion_ids=[2] * len(mask),
                    completion_mask=mask,
                    inference_logprobs=[-0.5] * len(mask),
                    reward=reward,
                )
                for mask, reward in zip(masks, (1.0, 0.0), strict=True)
            ],
        )
    )
    assert group_advantages("rloo-length", group).tolist() == [1.0, -1.0]
    group.completion_mask[:6] = False
    assert np.isfinite(group_advantages("rloo-length", group)).all(), "also if nothing was sampled"


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_a_single_rollout_has_no_advantage(name: str) -> None:
    assert advantages(name, np.array([3.0]), np.array([5.0])).tolist() == [0.0]


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_equal_rewards_give_exact_zeros(name: str) -> None:
    assert advantages(name, np.full(7, 0.1)).tolist() == [0.0] * 7


def test_an_unknown_estimator_is_rejected_with_the_valid_names() -> None:
    with pytest.raises(Invalid, match=r"advantage is 'ppo'; valid: dr-grpo, grpo, process, rloo, rloo-length"):
        check_estimator("ppo")


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@pytest.mark.parametrize(
    "rewards", [[float("nan")], [1.0, float("nan")], [float("inf")], [float("inf"), 0.0], [1e308, -1e308]]
)
def test_rewards_without_finite_advantages_are_rejected(name: str, rewards: list[float]) -> None:
    with pytest.raises(Invalid, match="no finite advantages"):
        advantages(name, np.array(rewards))


@pytest.mark.parametrize("name", ["dr-grpo", "rloo", "rloo-length"])
def test_rewards_whose_advantages_exceed_float32_are_rejected(name: str) -> None:
    """Each reward fits float32, which the trainer gets, but their difference does not."""
    with pytest.raises(Invalid, match="no finite advantages in float32"):
        advantages(name, np.array([3e38, -3e38, 3e38]))


def test_empty_rewards_are_rejected() -> None:
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


@given(GROUPS)
def test_every_rollout_weighs_the_same_under_rloo_length(group: tuple[Float64s, Float64s]) -> None:
    """The advantages of a rollout's tokens sum to its leave-one-out advantage times the mean length."""
    rewards, tokens = group
    by_rollout = advantages("rloo-length", rewards, tokens) * tokens
    assert by_rollout == pytest.approx(advantages("rloo", rewards, tokens) * tokens.mean(), rel=1e-9, abs=1e-9)
    assert abs(by_rollout.mean()) <= 1e-6 * max(1.0, np.abs(by_rollout).max())


@given(REWARDS)
def test_rloo_agrees_with_its_definition(rewards: Float64s) -> None:
    others = [np.delete(rewards, i).mean() if len(rewards) > 1 else rewards[i] for i in range(len(rewards))]
    scale = max(1.0, np.abs(rewards).max())
    assert advantages("rloo", rewards) == pytest.approx(rewards - np.array(others), rel=1e-9, abs=1e-9 * scale)


@given(REWARDS)
def test_grpo_advantages_are_bounded_by_the_group_size(rewards: Float64s) -> None:
    assert np.abs(advantages("grpo", rewards)).max() <= np.sqrt(len(rewards)) * (1 + 1e-9)


# ---------------------------------------------------------------------- process rewards

PROCESSES = st.lists(
    st.integers(1, 12).flatmap(
        lambda length: st.tuples(
            st.lists(st.tuples(st.integers(1, length), st.floats(-10, 10)), max_size=4), st.just(length)
        )
    ),
    min_size=1,
    max_size=5,
).filter(lambda rollouts: any(taken for taken, _ in rollouts))
"""Process rewards and length of each rollout of a group."""


@given(PROCESSES)
def test_a_token_gets_the_sum_of_the_normalised_process_rewards_that_end_at_or_after_it(
    rollouts: list[tuple[list[ProcessReward], int]],
) -> None:
    """Compared with DeepSeekMath, section 4.1.3, computed token by token."""
    lengths = np.array([length for _, length in rollouts], np.int32)
    every = np.array([reward for taken, _ in rollouts for _, reward in taken])
    mean, spread = every.mean(), every.std()
    flat = (every == every[0]).all()
    expected = [
        0.0 if flat else sum((reward - mean) / (spread + GRPO_EPSILON) for end, reward in taken if end > token)
        for taken, length in rollouts
        for token in range(length)
    ]
    advantages = process_advantages([taken for taken, _ in rollouts], lengths)
    assert advantages.dtype == np.float32
    assert advantages == pytest.approx(np.array(expected), rel=1e-4, abs=1e-4)


@given(REWARDS)
def test_one_process_reward_at_the_end_of_every_rollout_is_grpo(rewards: Float64s) -> None:
    lengths = np.arange(1, len(rewards) + 1, dtype=np.int32)
    rewards_at = [[(int(length), float(reward))] for length, reward in zip(lengths, rewards, strict=True)]
    expected = np.repeat(advantages("grpo", rewards), lengths)
    assert process_advantages(rewards_at, lengths) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("end", [0, 4, -1])
def test_a_process_reward_that_ends_outside_its_completion_is_rejected(end: int) -> None:
    with pytest.raises(Invalid, match=rf"a process reward of rollout 1 ends at token {end}; its completion has 3"):
        process_advantages([[(2, 1.0)], [(end, 0.0)]], np.array([2, 3], np.int32))


def test_a_group_without_any_process_reward_is_rejected() -> None:
    with pytest.raises(Invalid, match="rewards is empty"):
        process_advantages([[], []], np.array([2, 3], np.int32))
