"""Model folders that appear complete or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

WEIGHTS_FILE = "model.safetensors"


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder and rename it to `folder` at the end, so that no reader sees half of it."""
    scratch = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        yield scratch
        for path in [*scratch.rglob("*"), scratch]:
            sync(path)
        shutil.rmtree(folder, ignore_errors=True)
        scratch.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


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


def keep_newest(folder: Path, pattern: str, keep: int) -> None:
    """Delete all folders but the last `keep` by name."""
    for old in sorted(folder.glob(pattern))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    """Write a file or folder through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
