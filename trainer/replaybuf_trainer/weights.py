"""Model folders."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from replaybuf_trainer.folders import whole_folder

WEIGHTS_FILE = "model.safetensors"


def save_model(
    model: Any, tokenizer_dir: Path, folder: Path, weights: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Write a model folder (config, weights, tokenizer) and read the header of its weights back.

    `weights`: by parameter name; None = those of the model.
    """
    with whole_folder(folder) as scratch:
        model.save_pretrained(scratch, safe_serialization=True, state_dict=weights)
        for path in tokenizer_dir.glob("token*"):
            shutil.copy2(path, scratch)
        with safe_open(scratch / WEIGHTS_FILE, framework="pt") as file:
            file.keys()
