"""Cost of a rollout for a trainer, a·L + b·L² floating-point operations, from the shape of its model."""

from __future__ import annotations

from typing import Annotated

import msgspec

from replaybuf.wire.config import Cost

_Count = Annotated[int, msgspec.Meta(ge=1)]


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A dense transformer decoder, with the names of a Hugging Face `config.json`.

    `num_key_value_heads` None: as many as heads; `head_dim` None: hidden_size / num_attention_heads; `gated`: the MLP
    has three matrices (SwiGLU), not two.
    """

    num_hidden_layers: _Count
    hidden_size: _Count
    num_attention_heads: _Count
    intermediate_size: _Count
    vocab_size: _Count
    num_key_value_heads: _Count | None = None
    head_dim: _Count | None = None
    gated: bool = True


def cost_of(shape: ModelShape) -> Cost:
    """Count the operations of a forward pass over one rollout of L tokens; a backward pass has twice as many of each.

    With h = hidden size, l layers, d = head_dim, H heads, K key-value heads, f = intermediate size, V = vocabulary:

        linear    = 2·(l·(2·h·d·(H + K) + m·h·f) + h·V)     m = 3 gated, else 2
        quadratic = 2·l·d·H

    Two operations per weight and token (Kaplan et al. 2020, section 2.1: C = 2N + 2·n_layer·n_ctx·d_attn per token, of
    which the second term is ours). Narayanan et al. (2021, appendix) count 2·h·V for the logits, as here, and 4·s²·h
    per layer: what the causal mask hides, too, which a flash kernel leaves out.
    """
    dim = shape.head_dim or shape.hidden_size // shape.num_attention_heads
    heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads or shape.num_attention_heads
    attention = 2 * shape.hidden_size * dim * (heads + kv_heads)
    mlp = (3 if shape.gated else 2) * shape.hidden_size * shape.intermediate_size
    linear = 2 * (shape.num_hidden_layers * (attention + mlp) + shape.hidden_size * shape.vocab_size)
    return Cost(float(linear), float(2 * shape.num_hidden_layers * dim * heads))
