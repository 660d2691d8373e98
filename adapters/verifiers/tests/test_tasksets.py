"""Tasksets on verifiers: the contract that its double passes, and unsupported tasksets."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from taskset_contract import HERE, TasksetContract, opened

from replaybuf.errors import Invalid
from replaybuf.wire import pipes
from replaybuf_verifiers.environment import Verifiers
from replaybuf_verifiers.process import PROCESS, PYTHON, WORKER
from replaybuf_verifiers.worker.messages import Answer, Describe, Described, Ready
from tests.generator.doubles import make_prompt

NEEDY = {
    "contained": ("needs a container", "class T(WordTask):\n    NEEDS_CONTAINER = True"),
    "worthless": ("has no reward", "class T(vf.Task[WordData]): ..."),
    "hidden": (
        "excludes secret from the data",
        "from pydantic import Field\nclass D(WordData):\n    secret: str = Field('', exclude=True)\n"
        "class T(WordTask, vf.Task[D]):\n    pass",
    ),
    "empty": ("holds no task", "class T(WordTask): ..."),
    "staged": ("has stage_verifier", "class T(WordTask):\n    async def stage_verifier(self, trace, runtime): ..."),
    "boxed": (
        "has tools in a runtime of type docker",
        "class Box(vf.Toolset[vf.ToolsetConfig]): ...\nclass T(WordTask):\n    @classmethod\n"
        "    def toolsets(cls, config): return [Box(vf.ToolsetConfig(runtime=vf.DockerConfig()))]",
    ),
    "equipped": (
        "has the harness equipped, which needs a container",
        "class T(WordTask): ...\nclass Mill(vf.Harness[vf.HarnessConfig]):\n    async def launch(self, **_): ...\n"
        "__all__.append('Mill')",
    ),
    "peopled": (
        "has 2 agents: solver, judge",
        "class T(WordTask): ...\nclass C(vf.EnvConfig):\n    solver: vf.AgentConfig = vf.AgentConfig()\n"
        "    judge: vf.AgentConfig = vf.AgentConfig()\n"
        "class Peopled(vf.Env[C]):\n    async def run(self, task, agents): ...\n__all__.append('Peopled')",
    ),
}
MODULE = """
import verifiers.v1 as vf
from backwards import Backwards, BackwardsConfig, WordData, WordTask

__all__ = ["Mine"]
{task}


class Mine(vf.Taskset[T, BackwardsConfig]):
    def load(self):
        for word in self.config.words:
            yield T({data}, self.config.task)
"""


class TestVerifiers(TasksetContract):
    """verifiers 0.4."""


@pytest.fixture
def folder(python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a process with verifiers finds tasksets."""
    monkeypatch.setenv(PYTHON, str(python))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(HERE)]))
    PROCESS.close()
    yield tmp_path
    PROCESS.close()


def write(
    folder: Path,
    name: str,
    *,
    task: str = "class T(WordTask): ...",
    data: str = "T.data_type()(prompt=word, answer='')",
) -> None:
    """Write a taskset."""
    (folder / f"{name}.py").write_text(MODULE.format(task=task, data=data))


def test_an_unsupported_taskset_is_rejected_by_name(folder: Path) -> None:
    """All in one process, which survives every rejection."""
    for name, (_, task) in NEEDY.items():
        write(folder, name, task=task)
    made = Verifiers()
    for name, (message, _) in NEEDY.items():
        options: dict[str, list[str]] = {"words": []} if name == "empty" else {}
        with pytest.raises(Invalid, match=f"taskset {name} {message}"):
            made.check(make_prompt(verifiers={"taskset": name, "options": options, "task": {}}))


def test_the_process_needs_no_replaybuf(python: Path, folder: Path) -> None:
    """Its interpreter may be one that has only verifiers and msgspec."""
    for package in ("replaybuf", "replaybuf_verifiers"):
        (folder / f"{package}.py").write_text("raise ImportError('not here')")
    command = [python, "-P", WORKER, pipes.__file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        answers = pipes.received(process.stdout, msgspec.msgpack.Decoder(Answer))
        assert next(answers) == (0, Ready(version="0.4.0"))
        process.stdin.write(pipes.framed(1, Describe(taskset="backwards")))
        process.stdin.flush()
        assert next(answers) == (1, Described(infinite=False, plays=None, unfit=None))


def test_a_row_without_a_possible_reply_is_named(folder: Path) -> None:
    """A user who opens is rejected when prompts are read, an image by the environment."""
    write(folder, "opened_by_a_user", data="WordData(prompt=None, answer='x')")
    write(folder, "in_an_image", data="WordData(prompt=word, answer='x', image='python:3.11')")
    with pytest.raises(Invalid, match=r"prompts verifiers:opened_by_a_user, row 1: has no prompt: its user opens"):
        opened("verifiers:opened_by_a_user")
    (prompt, _) = opened("verifiers:in_an_image")
    with pytest.raises(Invalid, match="its task has image"):
        Verifiers().check(prompt)
