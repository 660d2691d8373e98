"""The demo's tiny Qwen3 model with a character tokenizer."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
CHARACTERS = [chr(code) for code in range(32, 127)]
CONTEXT_TOKENS = 256


def character_tokenizer() -> Any:
    """Create a tokenizer with one token per printable ASCII character, and pad, bos, eos: 98 tokens."""
    vocabulary = {token: number for number, token in enumerate([PAD, BOS, EOS, *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary))  # without an unknown token, other characters are errors
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=PAD, bos_token=BOS, eos_token=EOS)


def tiny_config() -> Qwen3Config:
    """Return the shape of the demo's model: 0.8 M parameters, 4 layers of 128, tied embeddings."""
    return Qwen3Config(
        vocab_size=len(CHARACTERS) + 3,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def new_model(seed: int) -> Any:
    """Create a model with random weights, float32."""
    torch.manual_seed(seed)
    transformers_logging.disable_progress_bar()  # of no use for one shard
    return Qwen3ForCausalLM(tiny_config()).float()
