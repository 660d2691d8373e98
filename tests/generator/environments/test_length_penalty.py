"""The length penalty: 0 for short completions, -1 at the maximum length, between them a straight line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.errors import Invalid
from replaybuf.generator.engines import Sampling
from replaybuf.generator.environments import Score
from replaybuf.generator.environments.length_penalty import LengthPenalty, LengthPenaltyOptions
from replaybuf.generator.preflight import check_length_penalty
from replaybuf.wire.group import Group
from tests.generator.doubles import Broken, EngineDouble, ServiceDouble
from tests.generator.test_preflight import facts
from tests.generator.turn_environments import Echo
from tests.generator.worlds import completed

LONGEST = 1 << 20


@st.composite
def penalties(draw: st.DrawFn) -> LengthPenalty:
    longest = draw(st.integers(1, LONGEST))
    return LengthPenalty(longest, draw(st.integers(1, longest)))


@given(penalties(), st.lists(st.integers(0, 2 * LONGEST), min_size=1, max_size=32))
def test_no_longer_completion_has_a_smaller_penalty(penalty: LengthPenalty, lengths: list[int]) -> None:
    values = penalty.penalties(np.array(sorted(lengths), np.int32))
    assert (np.diff(values) <= 0).all()
    assert ((values >= -1) & (values <= 0)).all()


@given(penalties())
def test_the_penalty_begins_after_the_free_tokens_and_is_1_at_the_maximum(penalty: LengthPenalty) -> None:
    free = penalty.max_tokens - penalty.cache_tokens
    values = penalty.penalties(np.array([0, free, free + 1, penalty.max_tokens, penalty.max_tokens + 1], np.int32))
    assert values.tolist() == [0.0, 0.0, pytest.approx(-1 / penalty.cache_tokens), -1.0, -1.0]


def test_it_is_the_soft_overlong_punishment_of_dapo() -> None:
    """20,480 tokens with a cache of 4,096, as in the paper."""
    lengths = np.array([16384, 17408, 18432, 20480], np.int32)
    assert LengthPenalty(20480, 4096).penalties(lengths).tolist() == [0.0, -0.25, -0.5, -1.0]


def options(cache: int, longest: int | None = None) -> LengthPenaltyOptions:
    return LengthPenaltyOptions(cache_tokens=cache, max_tokens=longest)


def test_the_maximum_is_by_default_that_of_a_completion() -> None:
    assert options(20).penalty(100) == LengthPenalty(100, 20)
    assert options(20, 80).penalty(100) == LengthPenalty(80, 20)
    assert options(100).penalty(100) == LengthPenalty(100, 100)


@pytest.mark.parametrize(
    ("cache", "longest", "named"),
    [
        (101, None, "cache_tokens"),
        (81, 80, "cache_tokens"),
        (20, 120, "max_tokens"),
    ],
)
def test_options_that_punish_nothing_or_everything_are_refused(cache: int, longest: int | None, named: str) -> None:
    with pytest.raises(Invalid) as caught:
        options(cache, longest).penalty(100)
    assert caught.value.name == named


def test_an_estimator_that_ignores_rewards_is_refused() -> None:
    check_length_penalty(None, facts(advantage="process"))
    check_length_penalty(LengthPenalty(8, 4), facts(advantage="grpo"))
    with pytest.raises(Invalid, match="process rewards"):
        check_length_penalty(LengthPenalty(8, 4), facts(advantage="process"))


def group_of(folder: Path, **world: Any) -> Group:
    service = ServiceDouble(prompts=1)
    completed(folder, service, length_penalty=LengthPenalty(4, 2), **world)
    return service.groups[0]


def test_it_is_added_to_the_reward_and_is_a_part_of_it(tmp_path: Path) -> None:
    """The completions have 3 tokens; the penalty begins above 2."""
    group = group_of(tmp_path)
    assert group.rewards.tolist() == [0.5] * len(group.rewards)
    assert {name: part.tolist()[0] for name, part in group.reward_parts.items()} == {
        "length": 3.0,
        "length_penalty": -0.5,
    }


def test_turns_and_answers_count_together(tmp_path: Path) -> None:
    group = group_of(tmp_path, turns=Echo(), sampling=Sampling(n=4, max_tokens=40))
    assert group.completion_lengths.tolist() == [17] * len(group.rewards)
    assert group.reward_parts["length_penalty"].tolist() == [-1.0] * len(group.rewards)


def test_a_part_with_the_name_of_the_penalty_fails_the_group(tmp_path: Path) -> None:
    service = ServiceDouble(prompts=1)
    taken = Broken(lambda prompt, text: Score(1.0, {"length_penalty": 2.0}))
    world = completed(tmp_path, service, EngineDouble(), environment=taken, length_penalty=LengthPenalty(4, 2))
    assert set(world.reasons.values()) == {"reward_part_taken"}
