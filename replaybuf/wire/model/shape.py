"""Sizes of the model in a folder, from its config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from replaybuf.errors import Invalid
from replaybuf.files import MODEL_FILE_BYTES, read_bounded

CONFIG_FILE = "config.json"
SHAPE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "moe_intermediate_size",
    "num_experts",
    "num_local_experts",
    "n_embd",
    "n_layer",
    "n_head",
)
"""Keys of config.json that two folders of the same model share; GPT-2 has its own names."""


def check_same_shape(folder: Path, other: Path, way_out: str) -> None:
    """Raise `Invalid` with a way out if two model folders differ in the type or a size of the model."""
    shapes = [
        {name: config.get(name) for name in SHAPE}
        for config in (read_model_config(path / CONFIG_FILE) for path in (folder, other))
    ]
    if differing := [name for name in SHAPE if shapes[0][name] != shapes[1][name]]:
        first, second = (", ".join(f"{name} {shape[name]}" for name in differing) for shape in shapes)
        detail = f"{folder} has {first}; {other} has {second}; {way_out}"
        raise Invalid(detail, name="model", value=str(other))


def read_model_config(config: Path) -> dict[str, Any]:
    """Decode a config.json. Raises `Invalid`."""
    try:
        content = msgspec.json.decode(read_bounded(config, MODEL_FILE_BYTES))
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise Invalid(f"{config} does not decode: {error}", name="model", value=str(config)) from None
    return content if isinstance(content, dict) else {}
