"""kill -9 of a trainer in every phase: the resumed loss curve and weights are those without a kill, digit for digit."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import pkgutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch

from replaybuf.client.client import Client
from replaybuf_trainer.feeds.service import ServiceFeed
from replaybuf_trainer.models.loading import load_model
from replaybuf_trainer.option_groups import ReaderOptions
from replaybuf_trainer.options import TrainOptions
from replaybuf_trainer.trainer import Trainer
from tests.conftest import RunClient, ServeProcess
from tests.forked import ForkedFunction
from tests.trainer.scripted import STEPS, fill
from tests.waiting import patience

TIMEOUT_S = 60.0
EXACT = ("loss", "grad_norm", "entropy", "ratio_mean", "learning_rate", "reward_mean")
IN_AN_EPOCH = "in the second epoch of a batch"
PHASES = {
    IN_AN_EPOCH: ("replaybuf_trainer.models.policy.packed_logprobs", 6, {0, 2}),
    "in the forward pass": ("replaybuf_trainer.models.policy.packed_logprobs", 3, {0, 2}),
    "after the ack": ("replaybuf_trainer.publications.Publications.publish_due", 3, {0, 2}),
    "while it writes weights": ("replaybuf_trainer.models.policy.WholeWeights.save_weights", 5, {0, 2}),
    "before it publishes": ("replaybuf.client.client.Client.publish_policy", 4, {0, 2}),
    "while it writes a checkpoint": ("replaybuf_trainer.checkpoints.shards.save_file", 1, {0}),
    "while it completes a checkpoint": ("replaybuf_trainer.checkpoints.folders.sync_folder", 1, {0}),
    "before the service knows the checkpoint": ("replaybuf.client.client.Client.checkpoint", 1, {2}),
}
"""The function at whose n-th call the process dies, and the steps that its newest checkpoint may have; a thread writes
the checkpoint of step 2."""


def train_until_killed(options: TrainOptions, function: str, number: int) -> None:
    """Train in this process; kill it at the n-th call of a function."""
    torch.set_num_threads(1)
    called, calls = pkgutil.resolve_name(function), itertools.count(1)

    def deadly(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return called(*args, **kwargs)

    with mock.patch(function, deadly):
        train(options)


def train(options: TrainOptions) -> int:
    with Client(options.url, options.run) as client:
        return Trainer(options, ServiceFeed(options, client)).train()


def curve(folder: Path) -> dict[int, dict[str, float]]:
    """The figures of each step, from its last line in the metrics file."""
    lines = (msgspec.json.decode(line) for line in (folder / "train.jsonl").read_bytes().splitlines())
    return {line["step"]: {name: line[name] for name in EXACT} for line in lines}


def options_of(run: RunClient, folder: Path, model: Path, **fields: Any) -> TrainOptions:
    """Fill a run, and return the options of its trainer."""
    fill(run)
    folder.mkdir()
    return TrainOptions(
        url=str(run.http.base_url),
        run=run.run,
        model=model,
        checkpoint_dir=folder / "checkpoints",
        weights_dir=folder / "weights",
        metrics_file=folder / "train.jsonl",
        checkpoint_every_steps=2,
        schedule="cosine",
        warm_up_steps=1,
        reader_options=ReaderOptions(wait_ms=500),
        **fields,
    )


Whole = Callable[..., Path]


@pytest.fixture(scope="module")
def whole(service: ServeProcess, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Train without a kill, once for each set of options; return the folder."""

    @functools.cache
    def trained(**fields: Any) -> Path:
        folder = tmp_path_factory.mktemp("whole") / "whole"
        run = RunClient(service.url, f"whole-{os.getpid()}-{'-'.join(fields)}".strip("-").replace("_", "-"))
        options = options_of(run, folder, models / "a", **fields)
        run.http.close()
        assert train(options) == STEPS
        return folder

    return trained


@pytest.mark.parametrize(
    ("phase", "fields"),
    [
        *((phase, {}) for phase in PHASES if phase != IN_AN_EPOCH),
        ("after the ack", {"lora_rank": 4}),
        (IN_AN_EPOCH, {"epochs_per_batch": 2}),
    ],
    ids=str,
)
def test_a_killed_trainer_resumes_with_the_same_curve(
    phase: str, fields: dict[str, int], run: RunClient, whole: Whole, tmp_path: Path, models: Path
) -> None:
    function, number, newest = PHASES[phase]
    killed = options_of(run, tmp_path / "killed", models / "a", **fields)
    process = ForkedFunction(target=train_until_killed, args=(killed, function, number), trainer=True)
    process.start()
    process.join(TIMEOUT_S * patience())
    assert process.exitcode == -signal.SIGKILL
    written = {path.name for path in killed.checkpoint_dir.glob("step-*")}
    assert written in [{f"step-{step:06d}"} if step else set() for step in newest]
    assert train(killed) == STEPS

    folders = (tmp_path / "killed", whole(**fields))
    assert curve(folders[0]) == curve(folders[1])
    resumed, expected = (load_model(folder / "weights" / f"v{STEPS:06d}").state_dict() for folder in folders)
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)
    assert run.state()["checkpoints"] == [2, STEPS]


@pytest.mark.parametrize("steps", [None, STEPS])
def test_a_trainer_that_ends_reports_the_checkpoint_whose_report_was_lost(
    steps: int | None, run: RunClient, tmp_path: Path, models: Path
) -> None:
    """It has no step left, of the run or of its option, after which it could report one."""
    options = options_of(run, tmp_path / "killed", models / "a", steps=steps)
    with mock.patch.object(Client, "checkpoint", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        train(dataclasses.replace(options, checkpoint_every_steps=100))
    assert run.state()["checkpoints"] == []
    assert train(options) == STEPS
    assert run.state()["checkpoints"] == [STEPS]
