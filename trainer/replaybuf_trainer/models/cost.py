"""Operations of a model per rollout, counted from its weights."""

from __future__ import annotations

from typing import Any

import torch

from replaybuf.wire.config import Cost


def model_cost(model: Any) -> Cost:
    """Count the operations of a forward pass over one rollout of L tokens, linear · L + quadratic · L².

    `linear`: two per weight that a token meets: all matrices of the layers, k / E of the matrices of E experts of which
    k are active, and the output layer, but no embeddings and no adapters. `quadratic` as `replaybuf.client.cost`, also
    with keys and values of two sizes. Layers with a sliding window count as full ones: too much beyond the window.
    """
    config = model.config.get_text_config()
    head = model.get_output_embeddings().weight
    embeddings = [module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    left_out = {id(weight) for weight in (*embeddings, head)}
    weights = head.numel()
    for name, matrix in model.named_parameters():
        if matrix.dim() < 2 or id(matrix) in left_out or "lora_" in name:
            continue
        weights += matrix.numel() * _active_experts(config) // len(matrix) if matrix.dim() == 3 else matrix.numel()
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    keys, values = getattr(config, "qk_head_dim", None) or size, getattr(config, "v_head_dim", None) or size
    return Cost(2.0 * weights, float(config.num_hidden_layers * heads * (keys + values)))


def _active_experts(config: Any) -> int:
    """Return the number of experts that a token meets, by the names of several families."""
    return int(getattr(config, "num_experts_per_tok", None) or config.moe_top_k)
