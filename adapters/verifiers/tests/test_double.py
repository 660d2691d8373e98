"""Tasksets on a double of their process; `test_tasksets.py` runs the same contract on verifiers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import taskset_double
from taskset_contract import TasksetContract, opened

from replaybuf.errors import Invalid, MissingExtra
from replaybuf.wire.pipes import framed
from replaybuf_verifiers.environment import Verifiers
from replaybuf_verifiers.process import PROCESS, PYTHON, WORKER
from replaybuf_verifiers.worker.messages import ScoreReply
from replaybuf_verifiers.worker.traces import split_reasoning
from tests.generator.doubles import TIMEOUT_S, make_prompt
from tests.waiting import patience


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a script that replaces the interpreter and always runs the double."""
    script = tmp_path_factory.mktemp("double") / "python"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} {taskset_double.__file__}\n")
    script.chmod(0o755)
    return script


class TestDouble(TasksetContract):
    """The double."""


@pytest.fixture
def closed() -> Iterator[None]:
    """Close the process before and after the test."""
    PROCESS.close()
    yield
    PROCESS.close()


@pytest.mark.usefixtures("closed")
def test_without_verifiers_the_error_has_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra for the generator's own interpreter, the packages for another one."""
    (tmp_path / "verifiers.py").write_text("raise ImportError('not here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv(PYTHON, raising=False)
    with pytest.raises(MissingExtra, match=r"pip install 'replaybuf\[verifiers\]'"):
        opened()
    monkeypatch.setenv(PYTHON, sys.executable)
    with pytest.raises(Invalid, match=r"not here'?\)?\. Install it: .* -m pip install 'verifiers>=0\.4,<0\.5' msgspec"):
        opened()


@pytest.mark.usefixtures("closed")
@pytest.mark.parametrize("name", ["absent", "broken"])
def test_an_unusable_interpreter_is_named_in_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "broken").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "broken").chmod(0o755)
    monkeypatch.setenv(PYTHON, str(tmp_path / name))
    with pytest.raises(Invalid, match=f"{tmp_path / name} does not run verifiers: ") as caught:
        opened()
    assert caught.value.name == PYTHON


def test_prompts_of_other_sources_are_rejected() -> None:
    with pytest.raises(Invalid, match=r"verifiers needs prompts from verifiers:TASKSET"):
        Verifiers().check(make_prompt())
    with pytest.raises(Invalid, match=r"metadata\.verifiers: .*`task`"):
        Verifiers().check(make_prompt(verifiers={"taskset": "x"}))


def test_a_task_that_needs_a_container_is_rejected() -> None:
    task = {"taskset": "x", "task": {}, "needs": ["image"]}
    with pytest.raises(Invalid, match=r"its task has image"):
        Verifiers().check(make_prompt(verifiers=task))


def test_the_process_ends_with_its_generator_in_the_middle_of_a_score(python: Path) -> None:
    with subprocess.Popen([python, WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.read(1)
        score = ScoreReply(taskset="backwards", task={"answer": "x"}, reply="block")
        process.stdin.write(framed(1, score))
        process.stdin.close()
        assert process.wait(TIMEOUT_S * patience()) == 0


@pytest.mark.parametrize(
    ("reply", "thought", "said"),
    [
        ("a b", None, "a b"),
        ("<think>\nhm\n</think>\n\na", "hm", "a"),
        ("hm</think>a", "hm", "a"),
        ("<think>hm", "hm", ""),
        ("a <think> b", None, "a <think> b"),
    ],
)
def test_reasoning_ends_at_the_closing_tag(reply: str, thought: str | None, said: str) -> None:
    assert split_reasoning(reply) == (thought, said)
