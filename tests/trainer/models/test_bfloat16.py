"""bfloat16 under autocast: close to float32 where it counts, float32 where it must be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from replaybuf_trainer.losses import BatchTotals, Tally, load_objective
from replaybuf_trainer.models.loading import load_model
from replaybuf_trainer.models.policy import Policy
from tests.trainer.batches import Rollout, packed, rollouts, trained_rows

ROWS = [[4, 0, 2], [1], [5, 3]]
LOGPROB_BOUND = 0.02
"""Nats; float32 and bfloat16 differ by about 0.004 for this model."""
GRADIENT_BOUND = 0.05
"""Norm of the difference of all gradients, as a share of their norm; about 0.01 here."""
STEPS = 12


def policy(models: Path, dtype: torch.dtype, learning_rate: float = 1e-3) -> Policy:
    return Policy(load_model(models / "a"), learning_rate, models / "a", dtype=dtype)


def backward(trained: Policy, members: list[Rollout]) -> float:
    """Add up the gradients of a GRPO loss row by row; return the loss."""
    batch = packed(members, ROWS)
    objective, totals, tally = load_objective("grpo"), BatchTotals(batch.meta.batch_loss_tokens, len(members)), Tally()
    for row in trained_rows(batch):
        torch.autograd.backward(objective.value(trained.forward([row]), totals, tally))
    return tally.loss


def test_logprobs_and_gradients_are_close_to_those_of_float32(models: Path) -> None:
    members = rollouts(6, seed=0)
    rows = trained_rows(packed(members, ROWS))
    gradients, logprobs = [], []
    for dtype in (torch.float32, torch.bfloat16):
        trained = policy(models, dtype)
        with torch.no_grad():
            logprobs.append(trained.forward(rows).logprobs)
        backward(trained, members)
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in trained.model.parameters()]))
    exact, coarse = logprobs
    assert 1e-5 < float((exact - coarse).abs().max()) < LOGPROB_BOUND, "equal logprobs: nothing was in bfloat16"
    assert float((gradients[1] - gradients[0]).norm() / gradients[0].norm()) < GRADIENT_BOUND


def test_weights_gradients_moments_and_logprobs_stay_float32(models: Path) -> None:
    """The logprobs are those of the float32 output layer: logits of bfloat16 have 8 bits."""
    trained = policy(models, torch.bfloat16)
    seen: list[torch.dtype] = []
    for layer in trained.model.model.layers:
        layer.mlp.down_proj.register_forward_hook(lambda _, inputs, made: seen.append(made.dtype))
    backward(trained, rollouts(6, seed=0))
    kept: dict[str, Any] = {"gradients": [parameter.grad for parameter in trained.model.parameters()]}
    trained.step(1e-3, 1.0, has_loss=True)
    kept["weights"] = list(trained.model.parameters())
    kept["moments"] = [each for state in trained.optimizer.state.values() for each in state.values()]
    for name, tensors in kept.items():
        assert {tensor.dtype for tensor in tensors} == {torch.float32}, name
    assert set(seen) == {torch.bfloat16}
    logprobs = trained.forward(trained_rows(packed(rollouts(6, seed=0), ROWS))).logprobs
    assert logprobs.dtype == torch.float32
    assert not torch.equal(logprobs, logprobs.to(torch.bfloat16).float())


def test_updates_below_the_resolution_of_bfloat16_add_up(models: Path) -> None:
    """A step of 1e-6 on a weight of 1.0 is lost in bfloat16, whose neighbours are 0.004 apart."""
    small = 1e-6
    trained = policy(models, torch.bfloat16, small)
    norm = trained.model.model.norm.weight
    before = norm.detach().clone()
    for _ in range(3):
        backward(trained, rollouts(6, seed=0))
        trained.step(small, 1.0, has_loss=True)
    assert float((norm.detach() - before).abs().max()) > 2 * small


def test_training_lowers_the_loss_as_in_float32(models: Path) -> None:
    """The same completions with advantage 1, off policy by a little: their logprobs rise alike in both types."""
    members = [
        Rollout(
            rollout.prompt_ids,
            rollout.completion_ids,
            rollout.completion_mask,
            rollout.inference_logprobs,
            rollout.ref_logprobs,
            1.0,
        )
        for rollout in rollouts(6, seed=1)
    ]
    rows = trained_rows(packed(members, ROWS))
    rises = []
    for dtype in (torch.float32, torch.bfloat16):
        trained = policy(models, dtype)
        means = []
        for _ in range(STEPS):
            tokens = trained.forward(rows)
            means.append(float(tokens.logprobs.detach().mean()))
            torch.autograd.backward(-tokens.logprobs.mean())
            trained.step(1e-3, 1.0, has_loss=True)
        rises.append(means[-1] - means[0])
    assert rises[0] > 0.5
    assert rises[1] == pytest.approx(rises[0], rel=0.05)
