"""Groups from ticket, prompt, sample and scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from replaybuf.errors import RewardFault
from replaybuf.generator.engines import Sample
from replaybuf.generator.environments.scoring import Scores
from replaybuf.generator.group_maker import new_group
from replaybuf.wire.contract import Ticket
from replaybuf.wire.group import Group
from tests.generator.doubles import make_prompt

SAMPLE = Sample(
    completion_ids=np.array([1, 2, 3], np.int32),
    completion_lengths=np.array([1, 2], np.int32),
    inference_logprobs=np.full(3, -0.5, np.float32),
    version_spans=np.array([[0, 4, 0, 1], [1, 4, 0, 2]], np.int32),
    finish_reasons=("stop", "stop"),
    metadata={},
)


def join(*rewards: float, advantage: str = "grpo", **metadata: Any) -> Group:
    return new_group(
        Ticket(ticket="t", prompt_index=7, attempt=1, expires_in_s=600.0),
        make_prompt(**metadata),
        SAMPLE,
        Scores(np.array(rewards), {}),
        temperature=1.0,
        advantage=advantage,
        metadata={"env": "e"},
    )


def test_a_group_of_equal_rewards_is_flagged_and_kept() -> None:
    assert join(0.5, 0.5).metadata == {"env": "e", "zero_variance": True}
    assert join(0.5, 0.4).metadata == {"env": "e"}


def test_advantages_use_the_runs_estimator_and_the_lengths() -> None:
    group = join(1.0, 0.0, advantage="rloo-length")
    assert group.advantages is not None
    assert group.advantages.tolist() == [1.5, -0.75]


def test_rewards_too_large_to_average_are_a_fault() -> None:
    with pytest.raises(RewardFault, match="no finite advantages") as caught:
        join(1e308, -1e308)
    assert caught.value.reason == "reward_too_large"
