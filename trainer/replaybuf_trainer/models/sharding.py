"""FSDP2: each rank holds a part of every parameter, gradient and moment (Zhao et al. 2023, arXiv:2304.11277).

The layers are gathered one by one in the forward and backward pass; all other parameters make one group that stays
gathered in between. Gradients are summed, not averaged: `BatchTotals` already are of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from replaybuf_trainer.losses import Row
from replaybuf_trainer.models.packed_forward import packed_logprobs
from replaybuf_trainer.parallel.ranks import Ranks


class ShardedForward(torch.nn.Module):
    """A sharded model whose forward pass takes packed rows.

    FSDP gathers parameters in the forward pass of a module. The loss needs the weight of the output layer without its
    forward pass, so this module is the root that gathers both.
    """

    def __init__(self, model: Any, ranks: Ranks, layer_dtype: torch.dtype = torch.float32) -> None:
        """Shard the parameters of `model` in place.

        Layers are gathered in `layer_dtype`; all other parameters, and all gradients, are float32.
        """
        super().__init__()
        self.model = model
        mesh = init_device_mesh(ranks.device.type, (ranks.size,))
        for part in (*_layers(model), self):
            policy = MixedPrecisionPolicy(
                param_dtype=torch.float32 if part is self else layer_dtype,
                reduce_dtype=torch.float32,
                cast_forward_inputs=False,  # the columns of a batch stay float32
            )
            fully_shard(part, mesh=mesh, mp_policy=policy)
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction

    def forward(self, rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logprobs and entropies of all loss tokens of some rows, both [k]."""
        return packed_logprobs(self.model, rows)


def _layers(model: Any) -> list[torch.nn.Module]:
    """Return the decoder layers, by the names that transformers gives to layers which stay in one piece."""
    kinds = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in kinds]
