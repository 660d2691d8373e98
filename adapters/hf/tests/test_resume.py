"""kill -9 and resume: the loss curve and weights are those of a training without a kill, digit for digit."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from trainings import STEPS, Settings, Training, curve, fill, train_hf, train_lightning

from tests.conftest import RunClient

Train = Callable[[Settings], None]
BOTH = pytest.mark.parametrize("train", [train_hf, train_lightning])


def settings_of(run: RunClient, folder: Path) -> Settings:
    # dropout: a resume must also restore what the ranks draw at random
    return {"folder": str(folder), "options": {"url": str(run.http.base_url), "run": run.run}, "dropout": 0.1}


def lines_of(settings: Settings) -> int:
    path = Path(settings["folder"]) / "lines.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


@BOTH
def test_the_curve_after_random_kills_is_that_of_a_whole_training(
    train: Train,
    run: RunClient,
    connect: Callable[[str, str], RunClient],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Each kill comes up to 0.5 s after a random step; one that comes after the end counts as none."""
    url, chance = str(run.http.base_url), random.Random(request.config.getoption("--kill-seed"))
    fill(run)
    assert Training(train, settings_of(run, tmp_path / "whole")).wait() == {}
    expected = curve(tmp_path / "whole")
    assert sorted(expected) == list(range(1, STEPS + 1))
    losses = run.get("history").json()["metrics"]["loss"]
    assert losses == pytest.approx([expected[step]["loss"] for step in sorted(expected)], abs=1e-4)

    kills = attempt = 0
    while kills < request.config.getoption("--kills"):
        attempt += 1
        killed = connect(url, f"{run.run}-killed-{attempt}")
        fill(killed)
        settings = settings_of(killed, tmp_path / f"killed-{attempt}")
        for _ in range(2):
            training = Training(train, settings)
            done, more = lines_of(settings), chance.randrange(1, 4)
            while lines_of(settings) < done + more and training.processes[0].is_alive():
                training.processes[0].join(0.005)
            training.processes[0].join(chance.uniform(0.0, 0.5))
            kills += training.kill(first=chance.randrange(2))
        assert Training(train, settings).wait() == {}
        assert curve(Path(settings["folder"])) == expected
        weights, whole = (
            torch.load(Path(folder) / "weights.pt") for folder in (settings["folder"], tmp_path / "whole")
        )
        assert all(torch.equal(weights[name], whole[name]) for name in whole)
        assert killed.state()["state"] == "finished"
        assert killed.state()["checkpoints"][-1] == STEPS
