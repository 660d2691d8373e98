"""The examples train, publish and resume as they are."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from trainings import STEPS, fill

from tests.conftest import RunClient
from tests.trainer.served import served, write_model

EXAMPLES = Path(__file__).parents[3] / "examples" / "hf"


def start(monkeypatch: pytest.MonkeyPatch, program: str, run: RunClient, folder: Path, *options: str) -> None:
    arguments = ["--url", str(run.http.base_url), "--run", run.run, "--model", str(folder / "model"), "--cpu"]
    arguments += ["--output", str(folder / "out"), "--save-steps", "2", *options]
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    runpy.run_path(str(EXAMPLES / program), run_name="__main__")


def test_the_trainer_resumes_and_its_engine_has_each_version(
    run: RunClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(run)
    with served(write_model(tmp_path / "model", 0)) as engine:
        for steps in ("2", str(STEPS)):
            start(monkeypatch, "train.py", run, tmp_path, "--steps", steps, "--engine", engine.url)
            assert engine.version() == steps
    state = run.state()
    assert (state["state"], state["published_version"], state["checkpoints"]) == ("finished", STEPS, [STEPS - 2, STEPS])
    assert state["config"]["max_steps"] == STEPS


def test_lightning_resumes_and_writes_each_version(
    run: RunClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(run)
    write_model(tmp_path / "model", 0)
    for steps in ("2", str(STEPS)):
        start(monkeypatch, "train_lightning.py", run, tmp_path, "--steps", steps)
    state = run.state()
    assert (state["state"], state["published_version"], state["checkpoints"]) == ("finished", STEPS, [STEPS - 2, STEPS])
    assert sorted(int(path.name) for path in (tmp_path / "out" / "weights").iterdir()) == list(range(STEPS + 1))
