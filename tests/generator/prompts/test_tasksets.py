"""Tasksets: a plug-in makes the rows of `--prompts verifiers:TASKSET`; without it the error has the install command."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from replaybuf.environment import Row, Taskset
from replaybuf.errors import Invalid, MissingExtra
from replaybuf.generator.environments import load_rewards
from replaybuf.generator.prompts.sources import Endless, Source, open_source
from replaybuf.plugins import entry_points as plugins
from replaybuf.plugins.entry_points import TASKSETS
from tests.generator.prompts.test_sources import Letters

SOURCE = Source(prompts="verifiers:words", name="s", options={"of": "ab"})


class Words:
    """The letters of the option `of`, for ever if the option `infinite` is set."""

    def __init__(self, taskset: str, options: dict[str, Any], tokenizer: Path | None) -> None:
        self._named = f"{taskset} of {tokenizer}"
        self._letters: str = options["of"]
        self.infinite = options.get("infinite", False)

    def rows(self) -> Iterator[Row]:
        return ((f"row {number}", self.row(number)) for number in range(len(self._letters)))

    def row(self, number: int) -> dict[str, Any]:
        return {"prompt": self._letters[number % len(self._letters)], "answer": self._named}


_: type[Taskset] = Words


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    """What is installed beside the core: nothing, until a test adds something."""
    entry_points: list[EntryPoint] = []
    monkeypatch.setattr(plugins, "entry_points", lambda **selection: EntryPoints(entry_points).select(**selection))
    plugins.installed.cache_clear()
    yield entry_points
    plugins.installed.cache_clear()


def test_the_plug_in_of_a_taskset_makes_the_rows_of_prompts(installed: list[EntryPoint]) -> None:
    installed.append(EntryPoint("verifiers", f"{__name__}:Words", TASKSETS))
    prompts = open_source(SOURCE, Letters())
    assert isinstance(prompts, list)
    assert [(prompt.text, prompt.answer, prompt.where) for prompt in prompts] == [
        ("a", "words of None", "row 0"),
        ("b", "words of None", "row 1"),
    ]
    endless = open_source(
        Source(prompts="verifiers:words", name="s", options={"of": "ab", "infinite": True}), Letters()
    )
    assert isinstance(endless, Endless)
    assert [endless.at(place).text for place in (101, 4)] == ["b", "a"]


def test_without_the_package_of_tasksets_the_error_has_the_install_command() -> None:
    """As prompts and as an environment."""
    command = (
        r"plug-in 'verifiers' needs an optional dependency; install it with: pip install replaybuf-verifiers \(in "
    )
    with pytest.raises(MissingExtra, match=f"the taskset {command}"):
        open_source(SOURCE, Letters())
    with pytest.raises(MissingExtra, match=f"the environment {command}"):
        load_rewards("verifiers:0.5,exact-match")


def test_a_taskset_as_an_environment_is_an_error_with_the_right_options() -> None:
    with pytest.raises(Invalid, match="--prompts verifiers:gsm8k --environment verifiers"):
        load_rewards("verifiers:gsm8k")
