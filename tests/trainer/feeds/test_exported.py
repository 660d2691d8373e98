"""Training from an export: the losses that the run had, digit for digit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from replaybuf import Client
from replaybuf.client.exports.export import export_run
from replaybuf.errors import Invalid
from replaybuf.wire.model.checkpoints import latest_checkpoint
from replaybuf_trainer.feeds.opening import open_feed
from replaybuf_trainer.models.loading import load_model
from replaybuf_trainer.option_groups import HeldOutOptions
from replaybuf_trainer.options import TrainOptions
from replaybuf_trainer.trainer import Trainer
from tests.conftest import RunClient, ServeProcess
from tests.trainer.scripted import STEPS, fill
from tests.waiting import eventually

CHANGING = ("time", "wait_reasons", "mfu", "train_mfu", "published_bytes", "peak_memory_bytes")
"""Figures besides times that differ between two trainings of the same batches."""


@pytest.fixture
def folder(service: ServeProcess, run: RunClient, models: Path, tmp_path: Path) -> Path:
    """The export of a run that was trained from the weights of `a`; a cursor kept its bytes."""
    fill(run)
    with Client(service.url, run.run) as client:
        client.read_cursor("keep", "stored", 1)
        train(tmp_path, models, tmp_path / "online.jsonl", url=service.url, run=run.run, checkpoint_every_steps=2)
        export_run(client, run.run, tmp_path / "export", lambda done, total: None)
    return tmp_path / "export"


def train(tmp_path: Path, models: Path, metrics: Path, **fields: Any) -> int:
    offline = "from_export" in fields or "fake_data" in fields
    folders = {} if offline else {"checkpoint_dir": tmp_path / "c", "weights_dir": tmp_path / "w"}
    options = TrainOptions(**{"model": models / "a", "metrics_file": metrics} | folders | fields)
    with open_feed(options) as feed:
        return Trainer(options, feed).train()


def export_freed(run: RunClient, folder: Path, freed: str) -> None:
    """Export a run when the rollouts of a group are gone."""
    eventually(lambda: run.get(f"groups/{freed}").json()["rollouts"] is None, 30.0)
    with Client(str(run.http.base_url), run.run) as client:
        export_run(client, run.run, folder, lambda done, total: None)


def figures(metrics: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file without times."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.endswith("_s") and k not in CHANGING} for line in lines]


def test_an_export_trains_with_the_losses_of_the_run(folder: Path, models: Path, tmp_path: Path) -> None:
    """Every figure of every step, and so the weights at the end, are the same in float32 on the CPU."""
    checkpoints = tmp_path / "offline-c"
    steps = train(tmp_path, models, tmp_path / "offline.jsonl", from_export=folder, checkpoint_dir=checkpoints)
    assert steps == STEPS
    assert figures(tmp_path / "offline.jsonl") == figures(tmp_path / "online.jsonl")
    online, offline = latest_checkpoint(tmp_path / "c"), latest_checkpoint(checkpoints)
    assert online is not None and offline is not None
    weights = load_model(online / "model").state_dict(), load_model(offline / "model").state_dict()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_training_from_an_export_resumes_at_its_checkpoint(folder: Path, models: Path, tmp_path: Path) -> None:
    for steps in (2, None):
        options = {"from_export": folder, "checkpoint_dir": tmp_path / "offline-c", "steps": steps}
        assert train(tmp_path, models, tmp_path / "offline.jsonl", **options) == (steps or STEPS)
    assert [line["step"] for line in figures(tmp_path / "offline.jsonl")] == list(range(STEPS))


def test_held_out_groups_are_evaluated_on_schedule_and_change_nothing(
    folder: Path, models: Path, tmp_path: Path
) -> None:
    """The first evaluation has the loss of a step with the same groups and weights; the training is the same."""
    held_out = {"eval_from": folder, "eval_options": HeldOutOptions(every_steps=2, groups=1)}
    train(tmp_path, models, tmp_path / "m.jsonl", from_export=folder, steps=4, **held_out)
    lines = figures(tmp_path / "m.jsonl")
    assert [line["step"] for line in lines if "eval_loss" in line] == [1, 3]
    plain = [{name: value for name, value in line.items() if not name.startswith("eval_")} for line in lines]
    assert plain == figures(tmp_path / "online.jsonl")
    assert lines[1]["eval_loss_tokens"] == lines[0]["loss_tokens"]
    assert lines[1]["eval_kl"] != lines[0]["kl"] != lines[3]["eval_kl"]  # of the same groups, but other weights
    phases = [json.loads(line)["phase_s"] for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert "evaluate" not in phases[0] and phases[1]["evaluate"] > 0


def test_held_out_groups_that_lack_a_column_end_the_training_before_it_starts(
    folder: Path, models: Path, tmp_path: Path
) -> None:
    with pytest.raises(Invalid, match="the batch has no old_logprobs"):
        train(tmp_path, models, tmp_path / "m.jsonl", fake_data=True, eval_from=folder, loss="decoupled-ppo")
    assert not (tmp_path / "m.jsonl").exists() or not (tmp_path / "m.jsonl").read_text()


def test_groups_that_nobody_trained_are_cut_into_batches(
    service: ServeProcess, run: RunClient, models: Path, tmp_path: Path
) -> None:
    fill(run)
    with Client(service.url, run.run) as client:
        export_run(client, run.run, tmp_path / "export", lambda done, total: None)
    assert train(tmp_path, models, tmp_path / "m.jsonl", from_export=tmp_path / "export") == STEPS


def test_an_export_without_rollouts_says_what_is_missing(
    service: ServeProcess, run: RunClient, models: Path, tmp_path: Path
) -> None:
    fill(run)
    train(tmp_path, models, tmp_path / "online.jsonl", url=service.url, run=run.run)
    export_freed(run, tmp_path / "export", f"g{STEPS - 1}")
    with pytest.raises(Invalid, match=r"no batch to train on: the rollouts of group 'g0' of step 0 .*cursor"):
        train(tmp_path, models, tmp_path / "m.jsonl", from_export=tmp_path / "export")
    with pytest.raises(Invalid, match="is not an export"):
        train(tmp_path, models, tmp_path / "m.jsonl", from_export=tmp_path)


def test_steps_with_freed_groups_are_left_out_with_a_warning(
    service: ServeProcess, run: RunClient, models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(run)
    train(tmp_path, models, tmp_path / "m.jsonl", url=service.url, run=run.run, steps=2)
    epoch = run.attach(resume_step=2)
    run.train(epoch, range(2, STEPS))
    export_freed(run, tmp_path / "export", "g1")
    assert train(tmp_path, models, tmp_path / "offline.jsonl", from_export=tmp_path / "export") == STEPS - 2
    assert [line["step"] for line in figures(tmp_path / "offline.jsonl")] == [2, 3]
    assert f"left out: 2 of {STEPS} steps: the rollouts of group 'g0' of step 0" in caplog.text
