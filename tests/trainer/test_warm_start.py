"""The demo's model and problems: held-out words stay out of training, and every program can read the folder."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import get_args, get_type_hints

import msgspec
import numpy as np
import pytest

from replaybuf.errors import Invalid, MissingExtra
from replaybuf.generator.environments import check_prompts, load_environment, score_of
from replaybuf.generator.prompts import Prompt
from replaybuf.generator.prompts.sources import read_prompts
from replaybuf.lab.demo import folder
from replaybuf.lab.study.file import StudyFile
from replaybuf.wire.text.model_tokenizer import Tokenizer
from replaybuf_trainer import problems, warm_start
from replaybuf_trainer.models.tiny import CHARACTERS, character_tokenizer, new_model
from replaybuf_trainer.options import InitModelOptions
from replaybuf_trainer.problems import TASKS, Problems, collect_problems
from replaybuf_trainer.warm_start import make, sampled_accuracy

# Imported by the tests that need it: every worker collects every test, and the import takes 2 s.
pytestmark = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="needs the extra `demo`")

SCANNED_ENTRIES = 6000
"""A tenth of what the command looks through: some 5,500 problems."""


@pytest.fixture(scope="module", autouse=True)
def _small_scan() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(problems, "SCANNED_ENTRIES", SCANNED_ENTRIES)
        yield


@pytest.fixture(scope="module", params=TASKS)
def drawn(request: pytest.FixtureRequest) -> tuple[str, Problems]:
    """A task and its problems of seed 0."""
    return request.param, collect_problems(request.param, 0)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder made with a target that the first check reaches."""
    folder = tmp_path_factory.mktemp("made") / "model"
    make(folder, "spell_backward", 0, 0.0)
    return folder


def read(folder: Path, name: str) -> list[Prompt]:
    """Read a prompts file as the generator does."""
    return read_prompts(folder / name, Tokenizer(folder))


# ---------------------------------------------------------------------- the tokenizer


def test_every_printable_character_is_one_token_and_comes_back() -> None:
    """Spaces, too; nothing is added or cleaned up."""
    tokenizer = character_tokenizer()
    text = "".join(CHARACTERS) + " a  b ,c ."
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert len(tokenizer) == len(set(ids)) + 3 == 98
    assert tokenizer.decode(ids) == text


def test_the_console_of_the_demo_has_the_same_tokenizer(tmp_path: Path) -> None:
    """The demo's service starts before there is a model, so the file is in the package; copy it after a change."""
    character_tokenizer().save_pretrained(tmp_path)
    assert (folder.CHARACTERS / "tokenizer.json").read_text() == (tmp_path / "tokenizer.json").read_text()


def test_an_unknown_character_is_rejected() -> None:
    """A prompt that loses characters would be scored as if it had them."""
    with pytest.raises(Exception, match=r"UNK|unk"):
        character_tokenizer().encode("crème>")


# ---------------------------------------------------------------------- the problems


def terms(prompt: str) -> tuple[int, str, int]:
    """Split the prompt of a sum into its numbers and its sign."""
    sign = "+" if "+" in prompt else "-"
    left, right = prompt.removesuffix("=").split(sign)
    return int(left), sign, int(right)


def other_form(task: str, prompt: str) -> str:
    """Return the problem that gives this one away: the word backwards, or the terms exchanged."""
    if task == "spell_backward":
        return f"{prompt[-2::-1]}>"
    left, sign, right = terms(prompt)
    return f"{right}{sign}{left}="


def test_held_out_problems_occur_nowhere_else(drawn: tuple[str, Problems]) -> None:
    """Neither as they are nor in their other form, in either case, in training, warm start or checks."""
    task, parts = drawn
    sets = [{problem.prompt.lower() for problem in part} for part in (parts.train, parts.check, parts.held_out)]
    for number, part in enumerate(sets):
        for other in sets[number + 1 :]:
            assert not part & (other | {other_form(task, prompt) for prompt in other})


def test_there_are_enough_problems(drawn: tuple[str, Problems]) -> None:
    """200 held out, thousands left to train on, none twice."""
    _, parts = drawn
    assert len(parts.held_out) == 200 and len(parts.check) == 400
    assert len(parts.train) > SCANNED_ENTRIES / 3
    prompts = [problem.prompt.lower() for part in (parts.train, parts.check, parts.held_out) for problem in part]
    assert len(prompts) == len(set(prompts))


def test_answers_are_right_and_short(drawn: tuple[str, Problems]) -> None:
    """The engine samples at most 8 tokens, the end token among them."""
    task, parts = drawn
    for problem in (*parts.held_out, *parts.train):
        if task == "spell_backward":
            right = problem.prompt[-2::-1]
        else:
            first, sign, second = terms(problem.prompt)
            right = str(first + second if sign == "+" else first - second)
        assert problem.answer == right and len(problem.answer) < warm_start.MAX_NEW_TOKENS


def test_the_seed_decides_the_problems(drawn: tuple[str, Problems]) -> None:
    """The same seed gives the same ones, another one others."""
    task, parts = drawn
    assert collect_problems(task, 0) == parts
    assert collect_problems(task, 1).held_out != parts.held_out


def test_command_and_study_know_the_same_tasks() -> None:
    """Neither of them can import the table: it lies behind torch's package."""
    for fields in (InitModelOptions, StudyFile):
        assert get_args(get_type_hints(fields)["task"]) == tuple(TASKS)


# ---------------------------------------------------------------------- the folder


@pytest.mark.parametrize(("name", "split"), [("prompts.jsonl", "train"), ("held_out.jsonl", "held_out")])
def test_generator_and_environment_read_the_problems(made: Path, name: str, split: str) -> None:
    """Each prompt reads, is scored 1 for its answer and less for another, and has a name of its own."""
    prompts = read(made, name)
    environment = load_environment("reasoning-gym")
    check_prompts(environment, prompts)
    assert len({prompt.prompt_id for prompt in prompts}) == len(prompts)
    for prompt in prompts[:50]:
        assert prompt.prompt_id.startswith(f"spell_backward/{split}/")
        assert prompt.text == f"{(prompt.answer or '')[::-1]}>"
        assert score_of(environment.score(prompt, prompt.answer or "")).reward == 1.0
        assert score_of(environment.score(prompt, f"{prompt.answer}x")).reward < 1.0
        assert score_of(environment.score(prompt, "")).reward == 0.0


def test_the_same_seed_creates_the_same_folder(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights, tokenizer and problems are equal byte for byte. Standard output names the supervised warm start."""
    again = tmp_path / "again"
    make(again, "spell_backward", 0, 0.0)
    names = sorted(path.name for path in made.iterdir())
    assert sorted(path.name for path in again.iterdir()) == names
    assert [name for name in names if (made / name).read_bytes() != (again / name).read_bytes()] == []
    output = capsys.readouterr().out
    assert "not reinforcement learning" in output
    assert "sampled accuracy" in output


def test_a_target_that_is_not_reached_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the accuracy, the steps and the target."""
    monkeypatch.setattr(warm_start, "MAX_STEPS", 10)
    with pytest.raises(Invalid, match=r"after 10 supervised steps; the target is 0\.9"):
        make(tmp_path / "model", "spell_backward", 0, 0.9)
    assert list(tmp_path.iterdir()) == []


def test_the_error_for_an_unknown_task_lists_the_tasks(tmp_path: Path) -> None:
    """Before anything is made."""
    with pytest.raises(Invalid, match=r"'poetry'; it must be one of: spell_backward, chain_sum"):
        make(tmp_path / "model", "poetry", 0, 0.5)
    assert list(tmp_path.iterdir()) == []


def test_without_reasoning_gym_the_error_has_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """In full, to be copied."""
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with pytest.raises(MissingExtra, match=r"pip install 'replaybuf\[demo\]'"):
        collect_problems("chain_sum", 0)


def test_accuracy_is_the_share_of_right_answers(drawn: tuple[str, Problems]) -> None:
    """A model that has learned nothing has none."""
    _, parts = drawn
    rng = np.random.default_rng(0)
    assert sampled_accuracy(new_model(0).eval(), character_tokenizer(), parts.check[:2], rng) == 0.0


def test_problems_have_the_fields_for_scoring(made: Path) -> None:
    """Dataset and entry of reasoning-gym, in every line."""
    for line in (made / "held_out.jsonl").read_bytes().splitlines():
        task = msgspec.json.decode(line)["metadata"]["reasoning_gym"]
        assert task["dataset"] == "spell_backward"
        assert task["entry"]["answer"] == task["entry"]["metadata"]["word"][::-1]
