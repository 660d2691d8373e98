"""The gradient of TRL on a batch is the gradient of `replaybuf train`: the samples lose nothing on their way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from training import GROUPS, SIZE, fill, make_trainer
from transformers import TrainerCallback

from replaybuf_trainer.losses import BatchTotals, Tally, load_objective
from replaybuf_trainer.models.policy import load_policy
from replaybuf_trainer.options import TrainOptions
from replaybuf_trainer.reading import read_tensors
from tests.conftest import RunClient

SPREAD = 0.4
"""Ratios lie on both sides of the clip."""


class Gradients(TrainerCallback):
    """Keeps the gradient of the only step, by parameter."""

    def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
        self.by_name = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def trl_gradient(run: RunClient, model: Path, out: Path, micro_batches: int) -> torch.Tensor:
    gradients = Gradients()
    trainer = make_trainer(
        run,
        model,
        out,
        max_steps=1,
        per_device_train_batch_size=GROUPS * SIZE // micro_batches,
        gradient_accumulation_steps=micro_batches,
        max_grad_norm=0,
        save_strategy="no",  # a checkpoint would free the batch
    )
    trainer.add_callback(gradients)
    trainer.train()
    return torch.cat([gradients.by_name[name].flatten() for name in sorted(gradients.by_name)])


def own_gradient(run: RunClient, model: Path) -> torch.Tensor:
    batch = read_tensors(run.batch(0, epoch=1).content)
    policy, objective = load_policy(model, TrainOptions(model=model)), load_objective("grpo")
    totals = BatchTotals(batch.meta.batch_loss_tokens, batch.meta.batch_rollouts)
    for adapter, rows in batch.parts(8):
        objective.value(policy.forward(rows, adapter), totals, Tally()).backward()
    parameters = dict(policy.model.named_parameters())
    return torch.cat([parameters[name].grad.flatten() for name in sorted(parameters)])


def test_one_micro_batch_has_the_gradient_of_replaybuf_train(run: RunClient, model: Path, tmp_path: Path) -> None:
    fill(run, steps=2, spread=SPREAD)
    theirs, ours = trl_gradient(run, model, tmp_path, micro_batches=1), own_gradient(run, model)
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5 * float(ours.norm()))


def test_a_mean_per_micro_batch_changes_the_direction_little(run: RunClient, model: Path, tmp_path: Path) -> None:
    fill(run, steps=2, spread=SPREAD)
    theirs, ours = trl_gradient(run, model, tmp_path, micro_batches=2), own_gradient(run, model)
    assert torch.nn.functional.cosine_similarity(theirs, ours, dim=0) > 0.9
