"""Loading of model folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from replaybuf.client.cost import ModelShape
from replaybuf.errors import Invalid

MODEL_TYPE = Qwen3Config.model_type
SHAPE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
"""Keys of config.json that two folders of the same model share."""


def load_model(folder: Path) -> Any:
    """Load a Qwen3 model folder in float32 on the CPU. Raises `Invalid` for another model type."""
    config = folder / "config.json"
    if not config.is_file():
        raise Invalid(f"model folder {folder} has no config.json", name="model", value=str(folder))
    kind = _read_config(config).get("model_type")
    if kind != MODEL_TYPE:  # transformers would load the weights that fit and draw the rest at random
        raise Invalid(
            f"model folder {folder} has model_type {kind!r}; the reference trainer and its engine need {MODEL_TYPE!r}",
            name="model_type",
            value=kind,
            bound=MODEL_TYPE,
        )
    transformers_logging.disable_progress_bar()
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model.eval()


def shape_of(model: Any) -> ModelShape:
    """Return the sizes that a rollout's cost depends on."""
    config = model.config
    return ModelShape(**{name: getattr(config, name) for name in ModelShape.__struct_fields__ if name != "gated"})


def check_same_shape(folder: Path, other: Path) -> None:
    """Raise `Invalid` if two model folders differ in the type or a size of the model."""
    shapes = [
        {name: config.get(name) for name in SHAPE}
        for config in (_read_config(f / "config.json") for f in (folder, other))
    ]
    if differ := [name for name in SHAPE if shapes[0][name] != shapes[1][name]]:
        found, given = (", ".join(f"{name} {shape[name]}" for name in differ) for shape in shapes)
        raise Invalid(
            f"{folder} has {found}; {other} has {given}; use another --checkpoint-dir, or the model of the checkpoint",
            name="model",
            value=str(other),
        )


def _read_config(config: Path) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(config.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise Invalid(f"{config} does not decode: {error}", name="model", value=str(config)) from None
    return found if isinstance(found, dict) else {}
