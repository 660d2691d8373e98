"""AdamW as the trainer uses it, and one step of it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from replaybuf_trainer.parallel.shards import whole


def adam(parameters: Iterable[torch.nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
    """Return AdamW without weight decay."""
    return torch.optim.AdamW(list(parameters), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)


def descend(
    optimizer: torch.optim.Optimizer, learning_rate: float, clip_norm: float, *, finite_loss: bool = True
) -> float:
    """Take a step with the gradients that have added up, and clear them; return their norm.

    Without a finite loss and norm the weights stay as they are.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    norm = float(whole(torch.nn.utils.clip_grad_norm_(parameters, clip_norm)))
    if finite_loss and math.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm
