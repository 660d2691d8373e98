"""Rollouts of several turns, with an engine over real HTTP and a scripted tool environment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from replaybuf.errors import EngineFault, Invalid, RewardFault
from replaybuf.generator.engines import Sample, Sampling, VllmEngine
from replaybuf.generator.environments import Turn, load_rewards, multi_turn
from replaybuf.generator.environments.episodes import Episodes
from replaybuf.generator.environments.scoring import Scorer, Scores
from replaybuf.generator.fleet import Fleet
from replaybuf.generator.prompts import Prompt
from tests.generator.doubles import TIMEOUT_S, EngineDouble, ids, make_prompt, make_tokenizer
from tests.generator.turn_environments import Scripted

HERE = "tests.generator.turn_environments"


class Speaking(EngineDouble):
    """Engine that returns the given texts in order; the version rises by `rises` with each."""

    def __init__(
        self, *texts: str, rises: int = 0, finish_reason: str = "stop", encode: Callable[[str], list[int]] = ids
    ) -> None:
        super().__init__(version=3)
        said = iter(texts)

        async def say(request: dict[str, Any]) -> dict[str, Any]:
            spoken = [next(said) for _ in range(request["n"])]
            choices = [
                self.choice(
                    request["prompt"],
                    index=index,
                    token_ids=token_ids,
                    logprobs={"token_logprobs": [-0.25] * len(token_ids)},
                    finish_reason=finish_reason,
                    weight_versions=[{"version": str(self.version), "start": 0, "end": len(token_ids)}],
                )
                for index, token_ids in enumerate(map(encode, spoken))
            ]
            self.version = int(self.version) + rises
            return {"id": "c", "model": self.model, "choices": choices}

        self.always = say


def play(
    folder: Path,
    engine: EngineDouble,
    environment: Scripted,
    *,
    n: int = 1,
    max_tokens: int = 40,
    max_turns: int = 8,
    timeout_s: float = TIMEOUT_S,
) -> tuple[Sample, Scores]:
    async def main() -> tuple[Sample, Scores]:
        async with asyncio.timeout(TIMEOUT_S), engine.up():
            fleet = Fleet([VllmEngine(engine.url, timeout_s=TIMEOUT_S)], max_staleness=1)
            tokenizer = make_tokenizer(folder)
            episodes = Episodes(environment, tokenizer, max_turns=max_turns, timeout_s=timeout_s)
            try:
                sampling = Sampling(n=n, max_tokens=max_tokens, seed=5)
                return await episodes.play(fleet, make_prompt("abc"), sampling, fleet.check_rest)
            finally:
                await fleet.aclose()

    return asyncio.run(main())


def scripted(*answers: str | Sequence[int] | None, **options: Any) -> Scripted:
    """Answer turn k with the k-th answer, then end."""

    async def answer(number: int, turn: Turn) -> str | Sequence[int] | None:
        return answers[number] if number < len(answers) else None

    return Scripted(answer, **options)


def test_turns_and_answers_form_one_completion_with_answers_masked(tmp_path: Path) -> None:
    engine, environment = Speaking("call", "done"), scripted(" two ")
    sample, scores = play(tmp_path, engine, environment)
    assert sample.completion_ids.tolist() == ids("call two done")
    assert sample.completion_mask is not None
    assert sample.completion_mask.tolist() == [True] * 4 + [False] * 5 + [True] * 4
    assert sample.inference_logprobs.tolist() == [-0.25] * 4 + [0.0] * 5 + [-0.25] * 4
    assert sample.version_spans.tolist() == [[0, 3, 0, 13]]
    assert (sample.finish_reasons, sample.metadata["turns"]) == (("stop",), [2])
    assert scores.rewards.tolist() == [1.0]
    first, second = engine.requests
    assert first["prompt"] == ids("abc")
    assert second["prompt"] == ids("abccall two "), "token by token what was sampled and answered"
    assert (first["max_tokens"], second["max_tokens"]) == (40, 31)
    assert first["seed"] != second["seed"]
    assert [turn.text for turn in environment.turns[0]] == ["call", "done"]
    assert environment.turns[0][0].token_ids == ids("call")
    assert environment.closed == 1


def test_answers_may_be_token_ids(tmp_path: Path) -> None:
    sample, _ = play(tmp_path, Speaking("a", "b"), scripted([7, 8, 9]))
    assert sample.completion_ids.tolist() == [*ids("a"), 7, 8, 9, *ids("b")]


def test_an_answer_has_the_version_of_the_turn_before_it(tmp_path: Path) -> None:
    sample, _ = play(tmp_path, Speaking("one", "two", "six", rises=1), scripted(" x ", " y "))
    assert sample.version_spans.tolist() == [[0, 3, 0, 6], [0, 4, 6, 12], [0, 5, 12, 15]]
    assert sample.policy_version == 3


def test_a_version_that_falls_between_turns_fails_the_group(tmp_path: Path) -> None:
    with pytest.raises(EngineFault) as caught:
        play(tmp_path, Speaking("one", "two", rises=-1), scripted(" x "))
    assert caught.value.reason == "superseded"


def test_each_rollout_of_a_group_has_its_own_episode(tmp_path: Path) -> None:
    async def answer(number: int, turn: Turn) -> str | None:
        return None if turn.text in ("stop", "end") else " go "

    environment = Scripted(answer)
    sample, _ = play(tmp_path, Speaking("stop", "on", "stop", "end", "end"), environment, n=3)
    assert sorted(sample.metadata["turns"]) == [1, 1, 2]
    assert sample.completion_lengths.tolist() == [4, 9, 4]
    assert sample.version_spans.tolist() == [[0, 3, 0, 4], [1, 3, 0, 9], [2, 3, 0, 4]]
    assert environment.closed == 3


def test_a_rollout_ends_at_the_turn_bound(tmp_path: Path) -> None:
    environment = scripted(" x ", " y ", " z ")
    sample, _ = play(tmp_path, Speaking("a", "b", "c"), environment, max_turns=2)
    assert sample.completion_ids.tolist() == ids("a x b"), "the answer that no turn follows is left out"
    assert (sample.finish_reasons, sample.metadata["turns"]) == (("max_turns",), [2])


@pytest.mark.parametrize(("max_tokens", "text"), [(8, "a xyz b"), (7, "a xyz b"), (6, "a"), (5, "a")])
def test_a_rollout_ends_if_an_answer_leaves_no_space_for_a_turn(tmp_path: Path, max_tokens: int, text: str) -> None:
    sample, _ = play(tmp_path, Speaking("a", "b"), scripted(" xyz "), max_tokens=max_tokens)
    assert sample.completion_ids.tolist() == ids(text)
    assert sample.finish_reasons == (("stop",) if text != "a" else ("length",))


def test_a_turn_that_was_cut_off_is_not_answered(tmp_path: Path) -> None:
    environment = scripted(" x ")
    sample, scores = play(tmp_path, Speaking("abcd", finish_reason="length"), environment, max_tokens=4)
    assert (sample.finish_reasons, environment.turns) == (("length",), [[]])
    assert scores.rewards.tolist() == [1.0], "it is scored all the same"


def test_cut_off_receives_the_turn_that_was_cut_off(tmp_path: Path) -> None:
    cut_off: list[Turn] = []

    class Heeding(Scripted):
        def start(self, prompt: Prompt) -> Any:
            episode: Any = super().start(prompt)

            async def heed(turn: Turn) -> None:
                cut_off.append(turn)

            episode.cut_off = heed
            return episode

    environment = Heeding(scripted(" x ").answers)
    play(tmp_path, Speaking("abcd", finish_reason="length"), environment, max_tokens=4)
    assert (environment.turns, cut_off) == ([[]], [Turn("abcd", ids("abcd"))])
    cut_off.clear()
    play(tmp_path, Speaking("a", "b"), Heeding(scripted(" xyz ").answers), max_tokens=5)
    assert cut_off == [], "an answer left no room; the turn before it was answered"


async def _hang(number: int, turn: Turn) -> str:
    await asyncio.Event().wait()
    return ""


async def _raise(number: int, turn: Turn) -> str:
    raise ConnectionError("sandbox is gone")


async def _let_out(number: int, turn: Turn) -> str:
    inner = asyncio.ensure_future(asyncio.sleep(TIMEOUT_S))
    inner.cancel()
    await inner
    return ""


async def _exit(number: int, turn: Turn) -> str:
    raise SystemExit("tool ended")


async def _fault(number: int, turn: Turn) -> str:
    raise RewardFault("environment_rewritten", "a reason of its own")


@pytest.mark.parametrize(
    ("environment", "reason", "message"),
    [
        (Scripted(_raise), "environment_raised", "raised ConnectionError('sandbox is gone')"),
        (Scripted(_hang), "environment_timeout", "did not answer within 0.3 s"),
        (Scripted(_let_out), "environment_raised", "CancelledError()"),
        (Scripted(_exit), "environment_raised", "SystemExit('tool ended')"),
        (Scripted(_fault), "environment_rewritten", "a reason of its own"),
        (scripted(""), "environment_bad_answer", "answered a turn with ''"),
        (scripted([3, 999]), "environment_bad_answer", "ids below 29"),
        (scripted(score=ValueError("no verdict")), "reward_raised", "raised ValueError('no verdict')"),
        (scripted(score=float("nan")), "reward_not_finite", "is not finite"),
    ],
    ids=[
        "raises",
        "hangs",
        "cancels",
        "exits",
        "names it",
        "empty",
        "unknown ids",
        "score raises",
        "nan",
    ],
)
def test_faults_of_an_environment_fail_the_group_and_close_the_episode(
    tmp_path: Path, environment: Scripted, reason: str, message: str
) -> None:
    with pytest.raises(RewardFault) as caught:
        play(tmp_path, Speaking("a", "b"), environment, timeout_s=0.3 if reason.endswith("timeout") else TIMEOUT_S)
    assert caught.value.reason == reason
    assert message in caught.value.detail
    assert (caught.value.__cause__ is not None) == reason.endswith("_raised")  # the traceback of the environment


def test_a_multi_turn_environment_must_be_the_only_reward() -> None:
    (reward,) = load_rewards(f"{HERE}:Echo")
    assert isinstance(multi_turn([reward]), Scripted)
    assert multi_turn(load_rewards("exact-match")) is None
    for text in (f"{HERE}:Echo:0.5", f"{HERE}:Echo,exact-match"):
        rewards = load_rewards(text)
        assert multi_turn(rewards) is None
        with pytest.raises(Invalid, match="environment 'Echo' plays turns; it must be the only one"):
            Scorer(rewards, timeout_s=1.0)


@pytest.mark.parametrize("error", [OSError("busy"), SystemExit("busy"), asyncio.CancelledError("busy")], ids=repr)
def test_a_failing_close_does_not_lose_the_rollout(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    environment = scripted()
    environment.close_raises = error
    sample, _ = play(tmp_path, Speaking("a"), environment)
    assert sample.completion_ids.tolist() == ids("a")
    assert "cannot close the episode of prompt 'abc': " in caplog.text and repr("busy") in caplog.text
