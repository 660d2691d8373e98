"""LoRA adapters in PEFT's folder format: reading, checks, and a forward pass with one adapter per row.

For input x [I] a linear layer with weights W [O, I] and an adapter of rank r returns W x + s B A x, with A [r, I],
B [O, r] and s = lora_alpha / r, or lora_alpha / sqrt(r) with `use_rslora`. Rows of one batch may have different
adapters, or none. The embedding and the output layer have no adapters.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
from msgspec import Meta

from replaybuf.errors import Invalid, NotFound
from replaybuf.files import CONFIG_BYTES, read_bounded
from replaybuf.wire.decoding import prepared
from replaybuf_trainer.engine.weight_files import read_tensors

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
LARGEST_RANK = 512
"""vLLM's largest rank."""
_PREFIX = "base_model.model."
_BLOCKS = "model.layers."
_UNSUPPORTED = (
    "alpha_pattern",
    "bias",
    "exclude_modules",
    "fan_in_fan_out",
    "layer_replication",
    "layers_to_transform",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_dora",
)
"""Options of PEFT that change the formula or the layers; each must be off."""


class _Config(msgspec.Struct):
    """`target_modules`: the ends of layer names, or a regular expression for whole names."""

    peft_type: Literal["LORA"]
    r: Annotated[int, Meta(ge=1, le=LARGEST_RANK)]
    lora_alpha: float
    target_modules: list[str] | str
    use_rslora: bool = False


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Lora:
    """Weights of one adapter: A [r, I] and s B [O, r] by name of the linear layer, float32."""

    layers: dict[str, tuple[torch.Tensor, torch.Tensor]]


def read_lora(model: Any, folder: Path) -> Lora:
    """Read an adapter of `model` from its folder.

    Raises `NotFound` without such a folder, `Invalid` where the adapter does not fit the model or needs more than A
    and B.
    """
    config = _read_config(folder)
    shapes: dict[str, tuple[int, ...]] = {}
    layers = [name for name in _linear_layers(model) if _targets(config.target_modules, name)]
    for name in layers:
        outputs, inputs = model.get_submodule(name).weight.shape
        shapes |= {_key(name, "A"): (config.r, inputs), _key(name, "B"): (outputs, config.r)}
    if not shapes:
        detail = f"adapter {folder} has target_modules {config.target_modules!r}; no linear layer of a block fits"
        raise Invalid(detail, name="target_modules", value=config.target_modules)
    tensors = read_tensors(folder / TENSORS_FILE, shapes)
    scale = config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)
    return Lora({name: (tensors[_key(name, "A")].float(), scale * tensors[_key(name, "B")].float()) for name in layers})


def _read_config(folder: Path) -> _Config:
    path = folder / CONFIG_FILE
    try:
        content = msgspec.json.decode(read_bounded(path, CONFIG_BYTES), type=dict[str, Any])
        config = msgspec.convert(content, prepared(_Config))
    except FileNotFoundError:
        raise NotFound(f"adapter folder {folder} has no {CONFIG_FILE}", name="lora_path", value=str(folder)) from None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Invalid(f"adapter {path}: {error}", name="lora_path", value=str(folder)) from error
    for name in _UNSUPPORTED:
        if content.get(name) not in (None, False, "none", [], {}):
            detail = f"adapter {path}: {name} is {content[name]!r}; this engine applies A and B of linear layers only"
            raise Invalid(detail, name=name, value=content[name])
    return config


def _linear_layers(model: Any) -> list[str]:
    """Return the names of all linear layers of the blocks."""
    return [
        name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear) and name.startswith(_BLOCKS)
    ]


def _targets(target_modules: list[str] | str, name: str) -> bool:
    """Return whether PEFT would adapt the layer of this name."""
    if isinstance(target_modules, str):
        try:
            return re.fullmatch(target_modules, name) is not None
        except re.error as error:
            detail = f"target_modules is {target_modules!r}, which is not a regular expression: {error}"
            raise Invalid(detail, name="target_modules", value=target_modules) from error
    return any(name == end or name.endswith(f".{end}") for end in target_modules)


def _key(name: str, matrix: str) -> str:
    return f"{_PREFIX}{name}.lora_{matrix}.weight"


_Part = tuple[slice, torch.Tensor, torch.Tensor]
"""Rows of a batch, A and s B."""


@contextlib.contextmanager
def adapted(model: Any, loras: Sequence[Lora | None]) -> Iterator[None]:
    """Apply `loras[i]` to row i of every batch that passes through the blocks of `model` inside the context.

    Layers without an adapter in the batch run as they are, so a batch of the base model costs nothing more. It is
    fastest where the rows of an adapter are neighbours.
    """
    parts: defaultdict[str, list[_Part]] = defaultdict(list)
    end = 0
    for lora, neighbours in itertools.groupby(loras):
        start, end = end, end + len(list(neighbours))
        for name, (a, b) in lora.layers.items() if lora is not None else ():
            parts[name].append((slice(start, end), a, b))
    hooks = [model.get_submodule(name).register_forward_hook(_add(of_layer)) for name, of_layer in parts.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _add(parts: list[_Part]) -> Callable[[Any, tuple[torch.Tensor], torch.Tensor], torch.Tensor]:
    """Return a forward hook that adds s B A x to the rows of each adapter."""

    def hook(_: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        for rows, a, b in parts:
            output[rows].add_(inputs[0][rows] @ a.T @ b.T)
        return output

    return hook
