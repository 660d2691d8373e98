"""Tiny random models of several families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

SHAPE = {
    "vocab_size": 98,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2_SHAPE = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}

ACCEPTED: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.0625},
    "gemma2": {"query_pre_attn_scalar": 8, "final_logit_softcapping": 30.0, "sliding_window": 4},
    "gemma3_text": {"sliding_window": 4},
    "gpt2": GPT2_SHAPE,
    "gpt_neox": {},
    "granite": {"logits_scaling": 8.0},
    "llama": {},
    "mistral": {"sliding_window": 4},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "nanochat": {},
    "phi": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
"""Scaled or capped logits, a bias of the head, learned positions, sliding windows, experts."""
MIXING: dict[str, dict[str, Any]] = {
    "bert": {"is_decoder": False},
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_state": 8},
    "mamba": {"state_size": 8},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
}
"""Later tokens, alibi, recurrent states, and positions that are not restarted."""


def tiny(family: str, attention: str | None = None, **fields: Any) -> Any:
    """Create a model with random weights."""
    settings = SHAPE | (ACCEPTED | MIXING)[family] | fields
    torch.manual_seed(0)
    transformers_logging.disable_progress_bar()
    config = AutoConfig.for_model(family, **settings)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def write_tiny(folder: Path, family: str, **fields: Any) -> Path:
    """Write a model folder without a tokenizer, and return it."""
    tiny(family, **fields).save_pretrained(folder)
    return folder
