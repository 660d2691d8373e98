"""Checkpoints of the first releases: whole moments and random state in one file, weights in the model folder alone."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor, distribute_tensor

from replaybuf_trainer.checkpoints.folders import broken
from replaybuf_trainer.models.policy import Policy

FILE = "optimizer.safetensors"
_RANDOM_STATE = "random_state"


def load(checkpoint: Path, policy: Policy) -> None:
    """Load moments and random state; the policy has the weights already. Raises `Invalid` for a broken file.

    Older checkpoints have no random state; torch's own stays.
    """
    try:
        stored = load_file(checkpoint / FILE)
    except (OSError, SafetensorError) as error:
        raise broken(checkpoint, f"{FILE}: {error}") from error
    for name, parameter in policy.model.named_parameters():
        moments = {key: stored[f"{key}.{name}"] for key in ("exp_avg", "exp_avg_sq") if f"{key}.{name}" in stored}
        if moments:
            placed = {key: _like(parameter, value) for key, value in moments.items()}
            policy.optimizer.state[parameter] = {"step": stored[f"step.{name}"].clone(), **placed}
    if _RANDOM_STATE in stored:
        torch.set_rng_state(stored[_RANDOM_STATE])


def _like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if isinstance(parameter, DTensor):
        return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
    return value.to(parameter.device)
