"""kill -9 of a trainer in every phase: the resumed loss curve and weights are those without a kill, digit for digit."""

from __future__ import annotations

import itertools
import multiprocessing
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
from replaybuf_trainer.options import TrainOptions
from replaybuf_trainer.trainer import Trainer
from tests.conftest import RunClient
from tests.trainer.scripted import STEPS, fill

TIMEOUT_S = 60.0
EXACT = ("loss", "grad_norm", "entropy", "ratio_mean", "learning_rate", "reward_mean")
PHASES = {
    "in the forward pass": ("replaybuf_trainer.models.policy.packed_logprobs", 3, {0, 2}),
    "after the ack": ("replaybuf_trainer.publications.Publications.publish_due", 3, {0, 2}),
    "while it writes weights": ("replaybuf_trainer.models.policy.WholeWeights.save_weights", 5, {0, 2}),
    "before it publishes": ("replaybuf.client.client.Client.publish_policy", 4, {0, 2}),
    "while it writes a checkpoint": ("replaybuf_trainer.checkpoints.shards.save_file", 1, {0}),
    "while it completes a checkpoint": ("replaybuf_trainer.checkpoints.folders.sync", 1, {0}),
    "before the service knows the checkpoint": ("replaybuf.client.client.Client.checkpoint", 1, {2}),
}
"""The function at whose n-th call the process dies, and the steps that its newest checkpoint may have; a thread writes
the checkpoint of step 2."""

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["replaybuf_trainer.trainer"])


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


@pytest.mark.parametrize(("phase", "lora_rank"), [*((phase, None) for phase in PHASES), ("after the ack", 4)])
def test_a_killed_trainer_resumes_with_the_same_curve(
    phase: str,
    lora_rank: int | None,
    run: RunClient,
    connect: Callable[[str, str], RunClient],
    tmp_path: Path,
    models: Path,
) -> None:
    url = str(run.http.base_url)

    def options(name: str) -> TrainOptions:
        folder = tmp_path / name
        folder.mkdir()
        return TrainOptions(
            url=url,
            run=name,
            model=models / "a",
            checkpoint_dir=folder / "checkpoints",
            weights_dir=folder / "weights",
            metrics_file=folder / "train.jsonl",
            checkpoint_every_steps=2,
            schedule="cosine",
            warm_up_steps=1,
            wait_ms=500,
            lora_rank=lora_rank,
        )

    function, number, newest = PHASES[phase]
    fill(run)
    killed = options(run.run)
    process = processes.Process(target=train_until_killed, args=(killed, function, number))
    process.start()
    process.join(TIMEOUT_S)
    assert process.exitcode == -signal.SIGKILL
    written = {path.name for path in killed.checkpoint_dir.glob("step-*")}
    assert written in [{f"step-{step:06d}"} if step else set() for step in newest]
    assert train(killed) == STEPS

    whole = connect(url, f"{run.run}-whole")
    fill(whole)
    assert train(options(whole.run)) == STEPS
    assert curve(tmp_path / run.run) == curve(tmp_path / whole.run)
    found, expected = (
        load_model(tmp_path / name / "weights" / f"v{STEPS:06d}").state_dict() for name in (run.run, whole.run)
    )
    assert all(torch.equal(found[name], expected[name]) for name in expected)
