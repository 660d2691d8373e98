"""A reward that raises, hangs or is not a number costs one group, with a reason, and blocks nothing."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

import pytest

from replaybuf.errors import RewardFault
from replaybuf.generator.environments import Reward, Score, load_rewards
from replaybuf.generator.environments.scoring import MAX_STUCK, Scorer, Scores
from replaybuf.generator.prompts import Prompt
from tests.generator.doubles import TIMEOUT_S, Broken, Spelling, make_prompt

HERE = "tests.generator.reward_functions"
PROMPT = make_prompt("abc")


def score(environment: Any, *completions: str, timeout_s: float = TIMEOUT_S) -> Scores:
    return asyncio.run(Scorer(environment, timeout_s=timeout_s).score(PROMPT, completions))


def test_scores_are_returned_as_columns_with_parts() -> None:
    scores = score(Spelling(), "cba", "c")
    assert scores.rewards.tolist() == [1.0, 0.0]
    assert {name: part.tolist() for name, part in scores.parts.items()} == {"length": [3.0, 1.0]}


def test_an_environment_may_return_numbers() -> None:
    """For a reward without parts."""
    assert score(Broken(lambda prompt, text: len(text)), "cba", "c").rewards.tolist() == [3.0, 1.0]


def fault(environment: Any, **options: float) -> RewardFault:
    with pytest.raises(RewardFault, match="reward of prompt 'abc'") as caught:
        score(environment, "x", "y", **options)
    return caught.value


def raising(error: BaseException) -> Callable[[Prompt, str], Score]:
    def score(prompt: Prompt, text: str) -> Score:
        raise error

    return score


class Panic(BaseException):
    """An error of an extension that was not written in Python."""


RAISED = [
    *(ValueError("no parse"), TimeoutError("no parse"), SystemExit("no parse"), KeyboardInterrupt("no parse")),
    *(asyncio.CancelledError("no parse"), concurrent.futures.CancelledError("no parse"), Panic("no parse")),
]


@pytest.mark.parametrize("error", [*RAISED, StopIteration("no parse")], ids=repr)
def test_a_reward_that_raises_is_a_fault_with_its_error(error: BaseException) -> None:
    reported = fault(Broken(raising(error)))
    assert reported.reason == "reward_raised"
    assert "no parse" in reported.detail


@pytest.mark.parametrize("error", RAISED, ids=repr)
async def test_a_coroutine_that_raises_costs_only_its_group(error: BaseException) -> None:
    """The loop that all coroutines share goes on, and the waiting task gets the error."""

    class Raising:
        def check(self, prompt: Prompt) -> None:
            """Accept any prompt."""

        async def score(self, prompt: Prompt, completion_text: str) -> Score:
            await begun.wait() if completion_text == "other" else begun.set()
            if completion_text == "task":
                await asyncio.create_task(self.score(prompt, "raise"))
            if completion_text in ("raise", "task"):
                raise error
            return Score(1.0)

    begun = asyncio.Event()
    async with asyncio.timeout(TIMEOUT_S):
        scorer = Scorer([Reward("raising", Raising())], timeout_s=TIMEOUT_S)
        other = asyncio.create_task(scorer.score(PROMPT, ["other"]))
        await asyncio.sleep(0)
        for text in ("raise", "task", "raise"):
            with pytest.raises(RewardFault, match="no parse") as caught:
                await scorer.score(PROMPT, [text, "x"])
            assert caught.value.reason == "reward_raised"
        assert (await other).rewards.tolist() == [1.0]


async def test_cancelled_scoring_is_not_a_fault() -> None:
    scoring = asyncio.create_task(Scorer(load_rewards(f"{HERE}:waited"), timeout_s=60.0).score(PROMPT, ["hang"]))
    await asyncio.sleep(0)
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_not_finite_is_a_fault(value: float) -> None:
    assert fault(Broken(lambda prompt, text: Score(value))).reason == "reward_not_finite"
    assert fault(Broken(lambda prompt, text: Score(0.0, {"part": value}))).reason == "reward_not_finite"


@pytest.mark.parametrize("made", [None, "high", Score("high"), Score(0.0, {"part": "high"})])  # type: ignore[arg-type,dict-item]
def test_a_reward_of_another_type_is_a_fault(made: Any) -> None:
    assert fault(Broken(lambda prompt, text: made)).reason == "reward_raised"


def test_completions_with_different_parts_are_a_fault() -> None:
    assert fault(Broken(lambda prompt, text: Score(0.0, {text: 1.0}))).reason == "reward_parts_differ"


async def test_a_hanging_reward_is_left_behind_after_the_time_limit() -> None:
    released, ended = threading.Event(), threading.Event()

    def hang(prompt: Prompt, text: str) -> Score:
        released.wait(TIMEOUT_S)
        ended.set()
        return Score(0.0)

    scorer = Scorer(Broken(hang), timeout_s=0.05)
    with pytest.raises(RewardFault, match=r"did not finish within 0\.05 s") as caught:
        await scorer.score(PROMPT, ["x"])
    assert caught.value.reason == "reward_timeout"
    assert scorer.stuck == 1
    released.set()
    await asyncio.to_thread(ended.wait, TIMEOUT_S)
    async with asyncio.timeout(TIMEOUT_S):
        while scorer.stuck:  # noqa: ASYNC110 - the thread's last instructions have no event
            await asyncio.sleep(0.001)


async def test_no_scoring_starts_while_too_many_hang() -> None:
    """Each is a fault with a reason; scoring starts again after they ended."""
    released = threading.Event()
    begun: list[str] = []

    def hang(prompt: Prompt, text: str) -> Score:
        begun.append(text)
        released.wait(TIMEOUT_S)
        return Score(0.0)

    scorer = Scorer(Broken(hang), timeout_s=0.01)
    for _ in range(MAX_STUCK):
        with pytest.raises(RewardFault):
            await scorer.score(PROMPT, ["x"])
    with pytest.raises(RewardFault, match="16 earlier scorings still hang") as caught:
        await scorer.score(PROMPT, ["late"])
    assert caught.value.reason == "reward_timeout" and "late" not in begun
    released.set()
    async with asyncio.timeout(TIMEOUT_S):
        while scorer.stuck:  # noqa: ASYNC110 - the threads' last instructions have no event
            await asyncio.sleep(0.001)
    scorer = Scorer(Broken(hang), timeout_s=TIMEOUT_S)
    assert (await scorer.score(PROMPT, ["x"])).rewards.tolist() == [0.0]


async def test_groups_are_scored_at_the_same_time() -> None:
    both = threading.Barrier(2)

    def meet(prompt: Prompt, text: str) -> Score:
        both.wait(TIMEOUT_S)
        return Score(1.0)

    scorer = Scorer(Broken(meet), timeout_s=TIMEOUT_S)
    await asyncio.gather(scorer.score(PROMPT, ["x"]), scorer.score(PROMPT, ["y"]))


def test_rewards_are_added_by_weight_and_recorded_by_name() -> None:
    scores = score(load_rewards(f"{HERE}:length:2,{HERE}:waited:-1"), "abc", "a")
    assert scores.rewards.tolist() == [3.0, 1.0]
    assert {name: part.tolist() for name, part in scores.parts.items()} == {
        "length": [3.0, 1.0],
        "waited": [3.0, 1.0],
        "waited.half": [1.5, 0.5],
    }


def test_a_single_reward_without_weight_stays_as_it_is() -> None:
    scores = score(load_rewards(f"{HERE}:waited"), "abc")
    assert (scores.rewards.tolist(), list(scores.parts)) == ([3.0], ["half"])


def test_a_coroutine_that_raises_is_a_fault_with_its_error() -> None:
    with pytest.raises(RewardFault, match=r"raised ValueError\('no parse'\)"):
        score(load_rewards(f"{HERE}:waited"), "abc", "raise")


async def test_a_hanging_coroutine_is_cancelled_and_blocks_nothing() -> None:
    scorer = Scorer(load_rewards(f"{HERE}:length,{HERE}:waited"), timeout_s=0.1)
    for _ in range(MAX_STUCK + 1):
        with pytest.raises(RewardFault) as caught:
            await scorer.score(PROMPT, ["hang"])
        assert caught.value.reason == "reward_timeout"
    assert scorer.stuck == 0


def test_a_sum_that_is_not_finite_is_a_fault() -> None:
    with pytest.raises(RewardFault, match="the weighted sum holds") as caught:
        score(load_rewards(f"{HERE}:length:1e308,{HERE}:waited:1e308"), "abc")
    assert caught.value.reason == "reward_not_finite"
