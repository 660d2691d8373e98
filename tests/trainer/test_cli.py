"""The commands of the trainer package."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replaybuf.cli.main import main
from replaybuf.errors import MissingExtra
from replaybuf.plugins import entry_points as plugins
from replaybuf_trainer import cli
from replaybuf_trainer.options import EngineOptions, InitModelOptions, TrainOptions

COMMANDS = {
    "engine": cli.engine,
    "fetch-weights": cli.fetch_weights,
    "init-model": cli.init_model,
    "train": cli.train,
}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_an_entry_point_mounts_each_command(name: str) -> None:
    assert plugins.load(plugins.COMMANDS, name) is COMMANDS[name]


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (cli.engine, EngineOptions(model=Path("m"))),
        (cli.init_model, InitModelOptions(out=Path("m"))),
        (cli.train, TrainOptions(run="r", model=Path("m"))),
    ],
)
def test_without_torch_the_error_names_the_install_command(
    monkeypatch: pytest.MonkeyPatch, command: Callable[..., None], options: Any
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match=r"pip install 'replaybuf\[trainer\]'"):
        command(options=options)


def test_the_helper_of_an_engine_needs_no_torch() -> None:
    code = "import sys, replaybuf_trainer.fetch_weights; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_a_trainer_needs_a_run_and_a_model_and_no_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The options are complete: the command fails only because torch is missing."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit) as ended:
        main(["train", "r", "--url", "http://127.0.0.1:8900", "--model", "m"])
    assert ended.value.code == 1
    assert "pip install 'replaybuf[trainer]'" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["-1", "257"])
def test_a_number_of_tables_outside_its_bounds_is_rejected(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "r", "--model", "m", "--tables", number])
    assert "--tables" in "".join(capsys.readouterr())
