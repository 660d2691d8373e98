"""Reading of safetensors files whose names, shapes and values must fit the model."""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from replaybuf.errors import Invalid


def read_tensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], optional: Set[str] = frozenset()
) -> dict[str, torch.Tensor]:
    """Read the tensors of these names and shapes; those of `optional` may be missing.

    Raises `Invalid` for a broken file, other names or shapes, NaN and infinity.
    """
    try:
        tensors: dict[str, torch.Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise Invalid(f"weights {path} cannot be read: {error}", name="weights_path", value=str(path.parent)) from error
    missing, unknown = shapes.keys() - tensors.keys() - optional, tensors.keys() - shapes.keys()
    if missing or unknown:
        raise Invalid(
            f"weights {path} do not fit the model: missing {sorted(missing)[:3]}, unknown {sorted(unknown)[:3]}",
            name="weights_path",
            value=str(path.parent),
        )
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != shapes[name]:
            expected = f"{tuple(tensor.shape)}, the model has {shapes[name]}"
            raise Invalid(f"weights {path}: {name} has shape {expected}", name=name, value=list(tensor.shape))
        if not bool(torch.isfinite(tensor).all()):
            raise Invalid(f"weights {path}: {name} holds NaN or infinity", name=name)
    return tensors
