"""Reading of safetensors files whose names, shapes and values must fit the model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from replaybuf.errors import Invalid

Shape: TypeAlias = tuple[int, ...]


def read_tensors(path: Path, shapes: Mapping[str, Shape], optional: Set[str] = frozenset()) -> dict[str, torch.Tensor]:
    """Read the tensors of these names and shapes; those of `optional` may be missing.

    Raises `Invalid` for a broken file, other names or shapes, NaN and infinity.
    """
    try:
        tensors: dict[str, torch.Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise Invalid(f"weights {path} cannot be read: {error}", name="weights_path", value=str(path.parent)) from error
    check_names(str(path), tensors, shapes, optional)
    check_shapes(str(path), {name: tuple(tensor.shape) for name, tensor in tensors.items()}, shapes)
    check_finite(str(path), tensors)
    return tensors


def check_names(where: str, names: Collection[str], shapes: Mapping[str, Shape], optional: Set[str]) -> None:
    """Raise `Invalid` if a tensor is missing, unless it is optional, or not of the model."""
    missing, unknown = shapes.keys() - set(names) - optional, set(names) - shapes.keys()
    if missing or unknown:
        raise Invalid(
            f"weights {where} do not fit the model: missing {sorted(missing)[:3]}, unknown {sorted(unknown)[:3]}",
            name="weights_path",
            value=where,
        )


def check_shapes(where: str, file_shapes: Mapping[str, Shape], shapes: Mapping[str, Shape]) -> None:
    """Raise `Invalid` if a tensor is not of the model or has another shape."""
    for name, shape in file_shapes.items():
        if shape != shapes.get(name):
            expected = f"{shape}, the model has {shapes.get(name)}"
            raise Invalid(f"weights {where}: {name} has shape {expected}", name=name, value=list(shape))


def check_finite(where: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise `Invalid` for NaN and infinity."""
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise Invalid(f"weights {where}: {name} holds NaN or infinity", name=name)
