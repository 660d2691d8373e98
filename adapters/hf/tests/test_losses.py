"""The default loss on packed rows is that of the reference trainer."""

from __future__ import annotations

import pytest
import torch
from transformers import Trainer

from replaybuf_hf import ReplaybufTrainerMixin, clipped_policy_loss, token_logprobs
from replaybuf_trainer.losses import BatchTotals, load_objective
from replaybuf_trainer.losses.statistics import Tally
from replaybuf_trainer.models.packed_forward import packed_forward
from replaybuf_trainer.models.tiny import new_model
from replaybuf_trainer.reading import read_tensors
from tests.trainer.batches import packed_body, rollouts


@pytest.mark.parametrize("weighted", [False, True])
def test_loss_and_gradient_are_those_of_grpo(weighted: bool) -> None:
    model = new_model(0)
    batch = read_tensors(packed_body(rollouts(4, seed=1), [[0, 1], [2, 3]], pad_to_multiple_of=64))
    rows = [dict(row) for row in batch.micro_batches]
    for row in rows if weighted else []:
        row["sampling_weights"] = torch.tensor([0.25, 2.0])
    tokens = sum(int(row["loss_mask"].sum()) for row in rows)

    ours = sum(clipped_policy_loss(token_logprobs(model, row), row) for row in rows) / tokens
    gradients = torch.autograd.grad(ours, list(model.parameters()))
    objective = load_objective("grpo", normalise="token")
    theirs = objective.value(packed_forward(model, rows), BatchTotals(tokens, 4), Tally())
    expected = torch.autograd.grad(theirs, list(model.parameters()))
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    for gradient, expected_gradient in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-6)


class PolicyTrainer(ReplaybufTrainerMixin, Trainer):
    def __init__(self) -> None:
        """Without a run: the loss needs none."""


def test_the_loss_comes_with_its_logprobs_on_request() -> None:
    model = new_model(0)
    (row,) = read_tensors(packed_body(rollouts(2, seed=1), [[0, 1]], pad_to_multiple_of=64)).micro_batches
    trainer = PolicyTrainer()
    loss, outputs = trainer.compute_loss(model, row, return_outputs=True, num_items_in_batch=10)
    torch.testing.assert_close(loss, trainer.compute_loss(model, row, num_items_in_batch=10))
    torch.testing.assert_close(outputs["logprobs"], token_logprobs(model, row))
