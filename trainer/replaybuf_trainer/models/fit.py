"""Checks before the start: run, model and tokenizer fit together, and attention fits into memory."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from replaybuf.errors import Invalid
from replaybuf.wire.answer.run_status import RunFacts
from replaybuf.wire.model.shape import read_model_config
from replaybuf_trainer.models.packed_forward import attention_of
from replaybuf_trainer.options import TrainOptions

logger = logging.getLogger(__name__)

MANY_BYTES = 2**30
"""Memory of attention masks from which on a warning is logged."""
SDPA_BYTES = 6
"""Bytes per pair of tokens of a row, measured on a CPU: the mask as bool and as float32."""


def check_fit(model: Any, options: TrainOptions, facts: RunFacts) -> None:
    """Raise `Invalid` for token ids that the model lacks; log a warning for other doubts."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    if facts.vocab_size is not None and facts.vocab_size > vocabulary:
        raise Invalid(
            f"run {options.source} has token ids up to vocab_size {facts.vocab_size}; the model has {vocabulary}",
            name="vocab_size",
            value=facts.vocab_size,
            bound=vocabulary,
        )
    tokens = tokenizer_size(options.model)
    if tokens > vocabulary:
        raise Invalid(
            f"the tokenizer of {options.model} has token ids up to {tokens - 1}; the model has {vocabulary} tokens; "
            "resize the embeddings of the model or use its own tokenizer",
            name="tokenizer",
            value=tokens,
            bound=vocabulary,
        )
    if options.run and facts.vocab_size is not None and facts.vocab_size < tokens:
        logger.warning(
            "run %s has vocab_size %d; the tokenizer has %d tokens: the service rejects rollouts with the others",
            *(options.source, facts.vocab_size, tokens),
        )
    needed = attention_bytes(model, options, facts.batch.seq_len or 0)
    if needed >= MANY_BYTES:
        logger.warning(
            "attention %s needs about %.1f GiB for %d rows of %d tokens; use attention flash on a GPU, a smaller "
            "--rows-per-forward, or a smaller seq_len",
            *(options.model_options.attention, needed / 2**30, options.rows_per_forward, facts.batch.seq_len),
        )


def tokenizer_size(folder: Path) -> int:
    """Return the highest token id of a tokenizer + 1; 0 without a tokenizer.json. Raises `Invalid`."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return 0
    config = read_model_config(path)
    vocabulary = config.get("model", {}).get("vocab", ())
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    highest: int = max([*ids, *(token["id"] for token in config.get("added_tokens", ()))], default=-1)
    return highest + 1


def attention_bytes(model: Any, options: TrainOptions, seq_len: int) -> int:
    """Estimate the memory of masks and attention weights of one forward pass over full rows, of any rollouts.

    With eager attention each layer keeps its weights for the backward pass, and one layer has two more copies.
    A checkpointed layer keeps none, but has them again while the backward pass computes it.
    """
    pairs = options.rows_per_forward * seq_len**2
    config = model.config.get_text_config()
    layers = config.num_hidden_layers
    if interval := options.model_options.activation_checkpointing:
        layers -= len(range(0, layers, interval)) - 1
    factors = {"sdpa": SDPA_BYTES, "eager": 4 * config.num_attention_heads * (layers + 2)}
    return int(pairs * factors.get(attention_of(model), 0))
