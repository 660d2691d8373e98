"""Built-in environments: rewards of completions, and checks of prompts."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from replaybuf.errors import Invalid, MissingExtra
from replaybuf.generator.environments import ExactMatch, ReasoningGym, check_prompts, load_environment, load_rewards
from tests.generator.doubles import make_prompt

# Imported by the tests that need it: every worker collects every test, and the import takes 2 s.
pytestmark = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="needs the extra `demo`")

HERE = "tests.generator.reward_functions"
ENTRY = {"question": "Spell: sun", "answer": "nus", "metadata": {"word": "sun", "word_len": 3}}
TASK = {"dataset": "spell_backward", "entry": ENTRY}


@pytest.mark.parametrize(("completion", "reward"), [("bac", 1.0), ("  bac\n", 1.0), ("ba", 0.0), ("", 0.0)])
def test_exact_match_compares_the_stripped_completion(completion: str, reward: float) -> None:
    assert ExactMatch().score(make_prompt("cab", answer="bac "), completion).reward == reward


def test_exact_match_needs_an_answer() -> None:
    with pytest.raises(Invalid, match=r"words\.jsonl, line 1: has no answer"):
        check_prompts(ExactMatch(), [make_prompt()])


def test_reasoning_gym_scores_with_partial_credit() -> None:
    environment, prompt = ReasoningGym(), make_prompt("sun>", reasoning_gym=TASK)
    scores = [environment.score(prompt, completion).reward for completion in ("nus", "nsu", "")]
    assert scores[0] == 1.0
    assert 0.0 < scores[1] < 1.0
    assert scores[2] == 0.0


def test_a_prompt_can_switch_partial_credit_off() -> None:
    environment, prompt = ReasoningGym(), make_prompt("sun>", reasoning_gym=TASK | {"partial_credit": False})
    assert [environment.score(prompt, completion).reward for completion in ("nus", "nsu")] == [1.0, 0.0]


def test_reasoning_gym_makes_an_entry_from_the_answer() -> None:
    prompt = make_prompt("sun>", answer="nus", reasoning_gym={"dataset": "spell_backward"})
    ReasoningGym().check(prompt)
    assert ReasoningGym().score(prompt, "nus").reward == 1.0


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "metadata.reasoning_gym.dataset is missing"),
        ({"reasoning_gym": "spell_backward"}, "metadata.reasoning_gym.dataset is missing"),
        ({"reasoning_gym": {"dataset": "spell_backward"}}, "has neither answer nor"),
        ({"reasoning_gym": {"dataset": "no_such", "entry": ENTRY}}, "cannot create reasoning-gym dataset .no_such."),
        ({"reasoning_gym": TASK | {"config": {"min_word_len": -1}}}, "cannot create"),
    ],
)
def test_prompts_that_reasoning_gym_cannot_score_are_rejected(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        ReasoningGym().check(make_prompt(**metadata))


def test_without_reasoning_gym_the_error_has_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(MissingExtra, match=r"pip install 'replaybuf\[demo\]'"):
        ReasoningGym()


def test_environments_are_loaded_by_entry_point() -> None:
    assert isinstance(load_environment("exact-match"), ExactMatch)


def test_an_unknown_environment_is_an_error_that_lists_installed_ones() -> None:
    with pytest.raises(Invalid, match=r"environment is 'chess'; installed: .*exact-match"):
        load_environment("chess")


def test_demo_prompts_can_be_scored(tmp_path: Path) -> None:
    check_prompts(ReasoningGym(), [make_prompt("sun>", answer="nus", reasoning_gym=TASK)])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("exact-match", [("exact-match", 1.0)]),
        (f"{HERE}:length", [("length", 1.0)]),
        (f"exact-match:1.5,{HERE}:length:-0.5", [("exact-match", 1.5), ("length", -0.5)]),
        (f"{HERE}:Strict:2, exact-match:1e-3", [("Strict", 2.0), ("exact-match", 1e-3)]),
    ],
)
def test_rewards_are_parsed_with_their_weights(text: str, expected: list[tuple[str, float]]) -> None:
    assert [(reward.name, reward.weight) for reward in load_rewards(text)] == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{HERE}:absent", "does not import: AttributeError"),
        ("no_such_module_here:reward", "does not import: ModuleNotFoundError"),
        (f"{HERE}:NOT_CALLABLE", "is of type int; it must be a function or a class"),
        (f"{HERE}:Unchecked", "has score but no check"),
        (f"{HERE}:Broken", "raised RuntimeError('no licence on"),
        ("exact-match,exact-match:2", "names a reward twice"),
        ("exact-match:0", "all weights of environment"),
        ("exact-match,", "environment is ''"),
    ],
)
def test_an_invalid_reward_is_named_in_the_error(text: str, message: str) -> None:
    with pytest.raises(Invalid) as caught:
        load_rewards(text)
    assert message in caught.value.detail


def test_every_reward_checks_the_prompts() -> None:
    with pytest.raises(Invalid, match="line 1: has no answer; strict needs one"):
        check_prompts(load_rewards(f"{HERE}:length,{HERE}:Strict"), [make_prompt()])
