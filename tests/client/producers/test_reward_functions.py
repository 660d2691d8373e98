"""Reward functions with the signature of TRL, called without TRL."""

from __future__ import annotations

from typing import Any

import pytest

from replaybuf.client.producers import call_rewards
from replaybuf.errors import RewardFault

GIVEN: dict[str, Any] = {"prompts": ["p", "p"], "completions": ["a", "bb"], "completion_ids": [[1], [2, 3]]}


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


async def right(completions: list[str], answer: list[str], **_: Any) -> list[float | None]:
    return [1.0 if text == wanted else None for text, wanted in zip(completions, answer, strict=True)]


def test_rewards_are_weighted_and_kept_by_name() -> None:
    """None counts as 0; coroutine functions are awaited; columns of the data set arrive."""
    first, second = call_rewards([length, right], weights=[0.5, 2.0], answer=["a", "x"], **GIVEN)
    assert (first.reward, first.rewards) == (2.5, {"length": 1.0, "right": 1.0})
    assert (second.reward, second.rewards) == (1.0, {"length": 2.0, "right": 0.0})


def test_a_function_may_log_without_a_trainer() -> None:
    def logs(log_extra: Any, log_metric: Any, trainer_state: Any, **_: Any) -> list[float]:
        log_extra("text", ["x", "y"])
        log_metric("m", 1.0)
        return [0.0 if trainer_state is None else 1.0] * 2

    assert [scored.reward for scored in call_rewards([logs], **GIVEN)] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "wrong: 1 reward; needed: one per completion, 2"),
        ([1.0, float("nan")], r"wrong: nan for completions\[1\]; needed: a finite number or None"),
        ([1.0, None], r"completions\[1\]: None from every function; needed: a number from at least one"),
    ],
)
def test_a_wrong_result_names_the_function_and_the_completion(returned: list[Any], message: str) -> None:
    def wrong(**_: Any) -> list[Any]:
        return returned

    with pytest.raises(RewardFault, match=message):
        call_rewards([wrong], **GIVEN)


def test_wrong_weights_and_names_are_rejected() -> None:
    with pytest.raises(RewardFault, match="weights: 2 weights; needed: one per function, 1"):
        call_rewards([length], weights=[1.0, 1.0], **GIVEN)
    with pytest.raises(RewardFault, match="functions: two functions of one name"):
        call_rewards([length, length], **GIVEN)
