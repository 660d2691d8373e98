"""The demo's model: a tiny Qwen3 and a character tokenizer, and what every trainer and engine does with a model.

A model folder is a complete Hugging Face folder, which vLLM can serve as it is. The default `Shape` has 800,384
parameters; its vocabulary is 3 special tokens and the 95 printable ASCII characters.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from replaybuf.errors import Invalid

logger = logging.getLogger(__name__)

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
CHARACTERS = "".join(chr(code) for code in range(0x20, 0x7F))

_HEAD_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Configuration keys of architectures that change the logits after the output layer."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of the demo's model; `max_model_len` in tokens. Input and output embeddings are tied, weights float32."""

    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 384
    max_model_len: int = 256


def build_tokenizer() -> Any:
    """Build the character tokenizer: one token per printable ASCII character, nothing added.

    Encoding any other character raises: a prompt that loses characters silently would be scored as if it had them.
    """
    vocabulary = {token: number for number, token in enumerate((PAD, BOS, EOS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=Shape().max_model_len,
        clean_up_tokenization_spaces=False,
    )


def build_model(shape: Shape, seed: int) -> torch.nn.Module:
    """Build the model with random weights; the same seed gives the same ones."""
    config = Qwen3Config(
        vocab_size=3 + len(CHARACTERS),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_model_len,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(pad_token_id=PAD_ID, bos_token_id=BOS_ID, eos_token_id=EOS_ID)
    return cast(torch.nn.Module, model)


def load_model(folder: Path) -> torch.nn.Module:
    """Load a model folder as float32, for evaluation.

    Raises `Invalid` where the folder does not hold a model in safetensors, or one whose architecture changes the logits
    after its output layer, which `project` would not do.
    """
    transformers_logging.disable_progress_bar()
    if not (folder / "config.json").is_file():
        raise Invalid(f"model folder {folder} has no config.json", name="model", value=str(folder))
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa", use_safetensors=True, local_files_only=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise Invalid(f"model folder {folder} does not load: {error}", name="model", value=str(folder)) from error
    for key in _HEAD_CHANGES:
        if getattr(model.config, key, None) is not None:
            raise Invalid(f"model folder {folder} sets {key}, which is not supported here", name="model", value=key)
    return cast(torch.nn.Module, model.eval())


def hidden_states(model: torch.nn.Module, **inputs: Any) -> torch.Tensor:
    """Run the layers without the output layer: hidden states [B, L, H] of `input_ids` [B, L]."""
    return cast(torch.Tensor, cast(Any, model).get_decoder()(use_cache=False, **inputs).last_hidden_state)


def project(model: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Run the output layer: logits [..., V] of hidden states [..., H], as float32."""
    return cast(torch.Tensor, cast(Any, model).get_output_embeddings()(hidden)).float()


def eos_ids(model: torch.nn.Module) -> frozenset[int]:
    """Return the token ids that end a completion, as the folder's generation configuration gives them."""
    found = cast(Any, model).generation_config.eos_token_id
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, list) else [found])


def max_model_len(model: torch.nn.Module) -> int:
    """Return the longest sequence the model takes, prompt and completion together, in tokens."""
    return int(cast(Any, model).config.max_position_embeddings)
