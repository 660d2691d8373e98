"""TRL's asynchronous trainer on a CPU, for tests and first tries: TRL 1.16 needs a GPU in two places.

- `tree_attention` uses FlashAttention 3; here is the same attention in torch
- `get_peak_flops_per_device` asks CUDA for the name of the device
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from trl.experimental.async_grpo import async_grpo_trainer, packing


def allow_cpu() -> None:
    """Let `AsyncGRPOTrainer` of this process train on a CPU, by other functions in the place of two of TRL's own."""
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen_attention)


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    _max_q: int,
    _max_k: int,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """Attend from the last queries of each segment to its path: query [T, H, D], key and value [K, G, D]."""
    if not causal or window_size != (-1, -1):
        raise NotImplementedError(f"causal is {causal} and window_size {window_size}; on a CPU: True and (-1, -1)")
    query, key, value = (part.transpose(0, 1) for part in (query, key, value))
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    outputs = []
    for number in range(len(ends_q) - 1):
        q = query[:, ends_q[number] : ends_q[number + 1]]
        k, v = (part[:, ends_k[number] : ends_k[number + 1]] for part in (key, value))
        before = k.shape[1] - q.shape[1]
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(before)
        attended = torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=mask, scale=softmax_scale, enable_gqa=True
        )
        outputs.append(attended[0])
    return torch.cat(outputs, dim=1).transpose(0, 1)
