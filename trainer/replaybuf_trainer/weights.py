"""Weights as Hugging Face folders: written atomically, read with every check that can be made beforehand.

Inference engines die of a broken folder after they have said yes to it, so nothing is ever half-written here and
nothing is loaded unchecked: names, shapes and finiteness come first, the model is touched last.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from replaybuf.errors import Invalid
from replaybuf_trainer.folders import atomic_folder, keep_newest

WEIGHTS_FILE = "model.safetensors"
SHARDS_FILE = "model.safetensors.index.json"
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
"""What a model folder holds beside its weights."""
_PREFIX = "version"
_LISTED = 4


class _Shards(msgspec.Struct):
    weight_map: dict[str, str]


def own_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's tensors by name, of tied ones only the first, as safetensors and Hugging Face folders want."""
    return {name: model.state_dict()[name] for name in _aliases(model)}


def write_weights(model: torch.nn.Module, folder: Path) -> None:
    """Write the weights file into `folder`, and read its header again. Raises `Invalid` where they differ."""
    tensors = {name: tensor.contiguous() for name, tensor in own_tensors(model).items()}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    written = _read_file(folder / WEIGHTS_FILE, load=False)
    if written.keys() != tensors.keys():
        raise _broken(folder, f"holds {len(written)} tensors after writing {len(tensors)}")


def copy_model_files(source: Path, folder: Path) -> None:
    """Copy configuration and tokenizer from a model folder into another."""
    for name in MODEL_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def read_weights(folder: Path, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Read the weights in `folder` without touching `model`, whose architecture they must fit.

    Returns them by the names of `own_tensors`, in the type of the model. Raises `Invalid` where a file is missing or
    cut short, a name is missing or unknown, a shape differs, or a value is not finite.
    """
    found = _read_folder(folder)
    aliases = _aliases(model)
    wanted = own_tensors(model)
    unknown = found.keys() - wanted.keys() - {other for others in aliases.values() for other in others}
    missing = wanted.keys() - found.keys()
    if unknown or missing:
        raise _broken(folder, f"lacks {_some(missing)} and has unknown {_some(unknown)}")
    for name, others in aliases.items():
        for other in others & found.keys():
            if not torch.equal(found[other], found[name]):
                raise _broken(folder, f"{other} differs from {name}, to which the model ties it")
    return {name: _fitting(folder, name, found[name], tensor) for name, tensor in wanted.items()}


def set_weights(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy what `read_weights` returned into the model."""
    own = own_tensors(model)
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


class WeightsFolder:
    """The folder in which a trainer leaves `version-000012` and so on for the engines; the newest `keep` stay.

    The engines must see it under the same path.
    """

    def __init__(self, root: Path, model_files: Path, keep: int) -> None:
        """`model_files` is the folder that configuration and tokenizer are copied from."""
        self._root = root
        self._model_files = model_files
        self._keep = keep

    def write(self, model: torch.nn.Module, version: int) -> Path:
        """Write the model as one version; return its folder. Raises `Invalid` where what was written is broken."""
        folder = self._root / f"{_PREFIX}-{version:06d}"
        with atomic_folder(folder) as unfinished:
            copy_model_files(self._model_files, unfinished)
            write_weights(model, unfinished)
        return folder

    def prune(self) -> None:
        """Delete old versions. Not before the engines have loaded the new one."""
        keep_newest(self._root, _PREFIX, self._keep)


def _aliases(model: torch.nn.Module) -> dict[str, set[str]]:
    """Map the name of each tensor to the other names of the same storage."""
    first: dict[int, str] = {}
    names: dict[str, set[str]] = {}
    for name, tensor in model.state_dict().items():
        owner = first.setdefault(tensor.data_ptr(), name)
        names.setdefault(owner, set())
        if owner != name:
            names[owner].add(name)
    return names


def _read_folder(folder: Path) -> dict[str, torch.Tensor]:
    shards = folder / SHARDS_FILE
    if not shards.is_file():
        return _read_file(folder / WEIGHTS_FILE)
    try:
        files = set(msgspec.json.decode(shards.read_bytes(), type=_Shards).weight_map.values())
    except msgspec.MsgspecError as error:
        raise _broken(folder, f"{SHARDS_FILE} does not decode: {error}") from error
    return {name: tensor for file in sorted(files) for name, tensor in _read_file(folder / file).items()}


def _read_file(file: Path, *, load: bool = True) -> dict[str, torch.Tensor]:
    """Read a safetensors file; without `load` only its header, with empty tensors."""
    try:
        with safe_open(file, framework="pt") as tensors:
            return {name: tensors.get_tensor(name) if load else torch.empty(0) for name in tensors.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise _broken(file.parent, f"{file.name} does not read: {error}") from error


def _fitting(folder: Path, name: str, found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    if found.shape != wanted.shape:
        raise _broken(folder, f"{name} has shape {list(found.shape)}; the model has {list(wanted.shape)}")
    if found.is_floating_point() and not bool(torch.isfinite(found).all()):
        raise _broken(folder, f"{name} holds NaN or infinity")
    return found.to(wanted.dtype)


def _some(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:_LISTED])
    return f"{len(names)} names ({shown}{', ...' if len(names) > _LISTED else ''})" if names else "no name"


def _broken(folder: Path, what: str) -> Invalid:
    return Invalid(f"weights in {folder}: {what}", name="weights_path", value=str(folder), bound="a whole model folder")
