"""Loading of model folders."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available
from transformers.utils import logging as transformers_logging

from replaybuf.errors import Invalid, counted
from replaybuf.files import MODEL_FILE_BYTES, check_size
from replaybuf.wire.model.shape import CONFIG_FILE, read_model_config
from replaybuf_trainer.folders import whole_folder

Attention: TypeAlias = Literal["eager", "sdpa", "flash"]
WEIGHTS_FILE = "model.safetensors"


def load_model(
    folder: Path,
    attention: Attention | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype | Literal["auto"] = torch.float32,
    name: str = "model",
) -> Any:
    """Load a causal language model in evaluation mode: dropout would change the logprobs of a policy.

    `attention` None: the model's own choice. `dtype` "auto": that of the folder. Raises `Invalid` with `name` for a
    folder that is not a model, lacks weights or does not support the attention. Code in model folders never runs.
    """
    config = folder / CONFIG_FILE
    if not config.is_file():
        raise Invalid(f"model folder {folder} has no config.json", name=name, value=str(folder))
    kind = read_model_config(config).get("model_type")
    device = device or torch.device("cpu")
    transformers_logging.disable_progress_bar()
    try:
        for file in folder.glob("*.json"):  # transformers reads the index of the weights, and others
            check_size(file, file.stat().st_size, MODEL_FILE_BYTES)
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=attention and transformers_attention(attention, device),
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (ValueError, OSError, KeyError, ImportError, RuntimeError) as error:  # causes that transformers names
        raise Invalid(
            f"model folder {folder} with model_type {kind!r} does not load: {error}", name=name, value=str(folder)
        ) from error
    if missing := sorted(report["missing_keys"]):  # transformers draws them at random
        shown = ", ".join(missing[:3])
        raise Invalid(
            f"model folder {folder} lacks {counted(len(missing), 'weight')} of {type(model).__name__}, such as {shown}",
            name=name,
            value=shown,
        )
    return model.to(device).eval()


def transformers_attention(attention: Attention, device: torch.device) -> str:
    """Return the name of an attention function in transformers. Raises `Invalid` if it is missing here."""
    if attention != "flash":
        return attention
    lacks = "a CUDA GPU" if device.type != "cuda" else "the package flash-attn, or flash-attn-3 on Hopper GPUs"
    if device.type == "cuda" and is_flash_attn_3_available() and torch.cuda.get_device_capability(device)[0] >= 9:
        return "flash_attention_3"
    if device.type == "cuda" and is_flash_attn_2_available():
        return "flash_attention_2"
    raise Invalid(f"attention flash needs {lacks}; use sdpa", name="attention", value=attention)


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
