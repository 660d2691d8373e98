"""Choice of the rollouts of a step that stay readable: a function of rewards and seed alone."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.kernel.decide.samples import choose_groups, choose_rollouts
from replaybuf.wire.answer.samples import Why

REWARDS = st.sampled_from([-1.0, 0.0, 0.25, 1.0])
GROUPS = st.lists(st.tuples(REWARDS, st.integers(1, 4)), min_size=1, max_size=20)
REASONS: list[Why] = ["best", "worst", "chance"]
SEED = st.lists(st.integers(0, 2**53), min_size=1, max_size=4)


@given(GROUPS, st.integers(1, 64), SEED)
def test_the_best_and_the_worst_come_first_and_no_rollout_is_promised_twice(
    groups: list[tuple[float, int]], most: int, seed: list[int]
) -> None:
    means, rollouts = np.array([mean for mean, _ in groups]), np.array([size for _, size in groups])
    chosen = choose_groups(means, rollouts, most, seed)
    assert chosen == choose_groups(means.copy(), rollouts.copy(), most, seed)
    assert len(chosen) == min(most, rollouts.sum())
    assert [why for _, why in chosen] == ["best", "worst", *["chance"] * len(chosen)][: len(chosen)]
    assert means[chosen[0][0]] == means.max()
    assert len(chosen) < 2 or means[chosen[1][0]] == means.min()
    uses = Counter(position for position, _ in chosen)
    assert all(times <= rollouts[position] for position, times in uses.items())
    if len(chosen) <= len(groups):
        assert max(uses.values()) == 1, "groups without a choice come first"


@given(st.lists(REWARDS, min_size=1, max_size=12), st.data(), SEED)
def test_each_reason_gets_another_rollout_of_the_group(
    rewards: list[float], data: st.DataObject, seed: list[int]
) -> None:
    reasons = data.draw(st.lists(st.sampled_from(REASONS), min_size=1, max_size=len(rewards)))
    places = choose_rollouts(np.array(rewards), reasons, seed)
    assert places == choose_rollouts(np.array(rewards), reasons, seed)
    assert len(set(places)) == len(places) and set(places) <= set(range(len(rewards)))
    first = rewards[places[0]]
    assert first == {"best": max(rewards), "worst": min(rewards)}.get(reasons[0], first)


def test_chance_follows_the_seed() -> None:
    means, rollouts = np.zeros(1000), np.full(1000, 8)
    assert choose_groups(means, rollouts, 4, [0, 0, 1]) != choose_groups(means, rollouts, 4, [0, 0, 2])
