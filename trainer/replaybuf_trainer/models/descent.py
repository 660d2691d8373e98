"""AdamW as the trainer uses it, and one step of it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

import torch

from replaybuf_trainer.parallel.ranks import whole

Tensors = dict[str, torch.Tensor]


def adam(parameters: Iterable[torch.nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
    """Return AdamW without weight decay."""
    return torch.optim.AdamW(list(parameters), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)


def descend(
    optimizer: torch.optim.Optimizer, learning_rate: float, clip_norm: float, *, has_loss: bool = True
) -> float:
    """Take a step with the gradients that have added up, and clear them; return their norm.

    Without a finite loss of at least one token, and a finite norm, the weights stay as they are: AdamW's moments would
    move them without a gradient too.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    norm = float(whole(torch.nn.utils.clip_grad_norm_(parameters, clip_norm)))
    if has_loss and math.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def parameter_state(parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> Tensors:
    """Return parameters and moments by name, as views. A count of steps gets an axis, as safetensors needs one."""
    moments = {
        f"optimizer.{key}.{name}": value.reshape(1) if value.ndim == 0 else value
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    return {f"model.{name}": value.detach() for name, value in parameters.items()} | moments


def make_moments(
    parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer, names: Collection[str]
) -> None:
    """Give parameters empty moments if `names`, those of a stored `parameter_state`, has some for them."""
    for name, parameter in parameters.items():
        if f"optimizer.step.{name}" in names:
            moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
