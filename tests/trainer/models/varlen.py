"""A slow attention function of variable length, called as transformers calls FlashAttention."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from transformers import AttentionInterface

NAME = "varlen_of_the_tests"


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend inside each segment of one flat row, or of each whole row without segments; `query` [B, heads, L, D]."""
    assert attention_mask is None
    bounds = [0, query.shape[2]]
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        assert query.shape[0] == 1 and cu_seq_lens_q.dtype == torch.int32
        assert torch.equal(cu_seq_lens_q, cu_seq_lens_k)
        bounds = cu_seq_lens_q.tolist()
        assert bounds[0] == 0 and bounds[-1] == query.shape[2]
        assert max_length_q == max_length_k == max(cu_seq_lens_q.diff().tolist())
    parts = []
    for start, end in itertools.pairwise(bounds):
        places = torch.arange(end - start)
        distance = places[:, None] - places[None]
        seen = (distance >= 0) & (distance < (sliding_window or end))
        q, k, v = (each[:, :, start:end] for each in (query, key, value))
        parts.append(
            torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scaling, enable_gqa=True)
        )
    return torch.cat(parts, 2).transpose(1, 2), None


AttentionInterface.register(NAME, attend)
