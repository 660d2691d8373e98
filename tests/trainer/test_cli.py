"""The trainer package's commands: mounted by entry point, and clear where torch is missing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replaybuf.cli.main import main
from replaybuf.errors import MissingExtra
from replaybuf.kernel import plugins
from replaybuf_trainer import cli

COMMANDS = {"engine": cli.engine, "init-model": cli.init_model, "train": cli.train}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_command_is_found_by_its_entry_point(name: str) -> None:
    """`replaybuf NAME` is the function of this package."""
    assert plugins.load(plugins.COMMANDS, name) is COMMANDS[name]


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (cli.engine, {"model": Path("m")}),
        (cli.init_model, {"out": Path("m")}),
        (cli.train, {"run": "r", "model": Path("m")}),
    ],
)
def test_without_torch_the_command_to_install_it_is_told(
    monkeypatch: pytest.MonkeyPatch, command: Callable[..., None], options: dict[str, Any]
) -> None:
    """Before anything else happens."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match=r"pip install 'replaybuf\[trainer\]'"):
        command(**options)


def test_a_trainer_needs_a_run_and_a_model_and_no_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line as the design has it; it ends where torch is missing, and not at its options."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit) as ended:
        main(["train", "--url", "http://127.0.0.1:8900", "--run", "r", "--model", "m"])
    assert ended.value.code == 1
    assert "pip install 'replaybuf[trainer]'" in capsys.readouterr().err
