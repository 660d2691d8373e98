"""LoRA adapter folders in PEFT's format with random weights, and a slow reference that merges them into a model."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from replaybuf_trainer.models.loading import load_model

TARGETS = ("q_proj", "v_proj", "down_proj")
PREFIX, SUFFIXES = "base_model.model.", (".lora_A.weight", ".lora_B.weight")


def write_adapter(
    folder: Path, base: Path, seed: int, targets: Sequence[str] = TARGETS, rank: int = 4, **config: Any
) -> Path:
    """Write an adapter of a model folder, strong enough to change every logprob; return its folder."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for key, weight in load_file(base / "model.safetensors").items():
        name = key.removesuffix(".weight")
        if name.rpartition(".")[2] in targets:
            outputs, inputs = weight.shape
            for suffix, shape in zip(SUFFIXES, ((rank, inputs), (outputs, rank)), strict=True):
                tensors[PREFIX + name + suffix] = torch.randn(shape, generator=random) * 0.2
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": list(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    return folder


def merged(base: Path, adapter: Path) -> Any:
    """Load a model folder and set W + s B A, with s = alpha / r, or alpha / sqrt(r) for rslora."""
    model = load_model(base)
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    tensors = load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for name, layer in model.named_modules():
            if PREFIX + name + SUFFIXES[0] in tensors:
                a, b = (tensors[PREFIX + name + suffix] for suffix in SUFFIXES)
                layer.weight += scale * b @ a
    return model
