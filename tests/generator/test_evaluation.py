"""Evaluation: scores of held-out prompts and the versions that sampled them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replaybuf.errors import EngineUnfit, Invalid, RewardFault
from replaybuf.generator.engines import VllmEngine
from replaybuf.generator.environments import Score, Turn
from replaybuf.generator.environments.episodes import Episodes
from replaybuf.generator.environments.scoring import Scorer
from replaybuf.generator.evaluation import EvaluationResult, HeldOut
from tests.generator.doubles import TIMEOUT_S, Broken, EngineDouble, Gate, Spelling, make_prompt, make_tokenizer, reply
from tests.generator.environments.test_episodes import Speaking, scripted
from tests.generator.turn_environments import Scripted


def held_out(scorer: Scorer | Episodes, texts: list[str], folder: Path, **options: Any) -> HeldOut:
    prompts = [make_prompt(text) for text in texts]
    sampling: dict[str, Any] = {"max_tokens": 8} | options
    return HeldOut(name="words", prompts=prompts, scorer=scorer, tokenizer=make_tokenizer(folder), **sampling)


def run(
    double: EngineDouble,
    folder: Path,
    texts: list[str],
    environment: Any = None,
    done: Callable[[int, int], None] | None = None,
    **options: Any,
) -> EvaluationResult:
    async def main() -> EvaluationResult:
        async with double.up():
            engine = VllmEngine(double.url, timeout_s=TIMEOUT_S)
            scorer: Scorer | Episodes
            if isinstance(environment, Scripted):
                scorer = Episodes(environment, make_tokenizer(folder), max_turns=8, timeout_s=TIMEOUT_S)
            else:
                scorer = Scorer(environment or Spelling(), timeout_s=TIMEOUT_S)
            try:
                return await held_out(scorer, texts, folder, **options).evaluate(engine, done)
            finally:
                await engine.aclose()

    return asyncio.run(main())


def test_the_result_has_mean_reward_and_versions(tmp_path: Path) -> None:
    double = EngineDouble(version=4)
    double.script.append(reply(token_ids=[0, 0, 0], weight_versions=[{"version": 5, "start": 0, "end": 3}]))
    result = run(double, tmp_path, ["abc"] * 4, max_inflight_prompts=1)
    assert result == EvaluationResult(
        accuracy=0.75, standard_error=0.25, parts={"length": 3.0}, n=4, failed=0, versions=(4, 5)
    )


def test_episodes_are_played_to_their_end_across_versions(tmp_path: Path) -> None:
    """The last turn is three versions newer than the first."""
    environment = scripted(" x ", " y ", " z ")
    result = run(Speaking("a", "b", "c", "d", rises=1), tmp_path, ["abc"], environment, max_tokens=40)
    assert (result.accuracy, result.n, result.failed, result.versions) == (1.0, 1, 0, (3, 4, 5, 6))
    assert [turn.text for turn in environment.turns[0]] == ["a", "b", "c", "d"]


def test_a_failed_episode_is_a_failed_prompt(tmp_path: Path) -> None:
    async def answers(number: int, turn: Turn) -> str | None:
        if turn.text == "c":
            raise ValueError("no such move")
        return " x " if number == 0 else None

    double = Speaking("a", "b", "c")
    reported: list[tuple[int, int]] = []
    result = run(
        double,
        tmp_path,
        ["abc", "abd"],
        Scripted(answers),
        lambda *counts: reported.append(counts),
        max_tokens=40,
        max_inflight_prompts=1,
    )
    assert (result.accuracy, result.n, result.failed) == (1.0, 1, 1)
    assert reported == [(1, 2), (2, 2)], "the failed one too"


def test_temperature_and_number_of_samples_can_be_set(tmp_path: Path) -> None:
    double = EngineDouble()
    assert run(double, tmp_path, ["abc", "abd"], temperature=1.0, samples=3).n == 6
    assert {(request["n"], request["temperature"]) for request in double.requests} == {(3, 1.0)}


async def test_no_more_prompts_are_in_flight_than_allowed(tmp_path: Path) -> None:
    gate, double = Gate(), EngineDouble()
    double.always = gate
    async with double.up():
        engine = VllmEngine(double.url, timeout_s=TIMEOUT_S)
        scorer = Scorer(Spelling(), timeout_s=TIMEOUT_S)
        words = held_out(scorer, ["a", "b", "c", "d"], tmp_path, max_inflight_prompts=2)
        evaluating = asyncio.create_task(words.evaluate(engine))
        await gate.requests(2)
        assert gate.arrived.locked()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(gate.requests(1), 0.1)
        gate.open.set()
        assert (await evaluating).n == 4
        await engine.aclose()


def test_failed_prompts_are_counted_separately(tmp_path: Path) -> None:
    def picky(prompt: Any, text: str) -> Score:
        if prompt.text == "abd":
            raise ValueError("cannot judge")
        return Score(1.0)

    result = run(EngineDouble(), tmp_path, ["abc", "abd", "abe"], Broken(picky))
    assert (result.accuracy, result.n, result.failed) == (1.0, 2, 1)


def test_an_evaluation_without_any_score_raises_the_last_fault(tmp_path: Path) -> None:
    with pytest.raises(RewardFault, match="is not finite"):
        run(EngineDouble(), tmp_path, ["abc"], Broken(lambda prompt, text: Score(float("nan"))))


def test_an_unfit_engine_is_raised_although_other_prompts_succeeded(tmp_path: Path) -> None:
    double = EngineDouble()
    double.script.append(reply(weight_versions=[{"version": "other", "start": 0, "end": 3}]))
    with pytest.raises(EngineUnfit):
        run(double, tmp_path, ["abc", "abc"])


def test_an_evaluation_without_prompts_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="prompts is empty"):
        run(EngineDouble(), tmp_path, [])
