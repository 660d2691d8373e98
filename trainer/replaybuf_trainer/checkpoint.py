"""Checkpoints: a folder `step-000012`, written atomically and without pickle, to resume a trainer at step 12.

It holds a model folder `model/`, the moments of AdamW by parameter name and torch's random state in
`optimizer.safetensors`, and `state.json`. The learning rate is a function of the step. `torch.distributed.checkpoint`
would pickle its metadata.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file

from replaybuf.errors import Invalid
from replaybuf_trainer.weights import keep_newest, save_model, whole_folder

_NAME = re.compile(r"step-(\d{6,})")
_RANDOM_STATE = "random_state"


class TrainerState(msgspec.Struct, frozen=True):
    """`step`: number of steps done, the `resume_step` of an attach; `version`: policy version after them."""

    run: str
    step: int
    version: int


def save_checkpoint(
    folder: Path, model: Any, optimizer: torch.optim.Optimizer, tokenizer_dir: Path, state: TrainerState, keep: int
) -> Path:
    """Write the checkpoint of `state.step`, delete all but the `keep` newest, and return its folder."""
    path = folder / f"step-{state.step:06d}"
    with whole_folder(path) as scratch:
        save_model(model, tokenizer_dir, scratch / "model")
        save_file(
            _moments(model, optimizer) | {_RANDOM_STATE: torch.get_rng_state()}, scratch / "optimizer.safetensors"
        )
        (scratch / "state.json").write_bytes(msgspec.json.encode(state))
    keep_newest(folder, "step-*", keep)
    return path


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint, or None. A half-written checkpoint has another name."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)]
    return max(found, default=None, key=lambda path: int(path.name.partition("-")[2]))


def read_state(checkpoint: Path) -> TrainerState:
    """Read the state of a checkpoint. Raises `Invalid` if it does not decode."""
    try:
        return msgspec.json.decode((checkpoint / "state.json").read_bytes(), type=TrainerState)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Invalid(
            f"checkpoint {checkpoint} is broken: {error}", name="checkpoint", value=str(checkpoint)
        ) from error


def load_optimizer(checkpoint: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Load the moments of a checkpoint into `optimizer`, which holds the parameters of `model`, and the random state.

    Checkpoints of older releases have no random state; torch's own stays.
    """
    stored = load_file(checkpoint / "optimizer.safetensors")
    for name, parameter in model.named_parameters():
        moments = {key: stored[f"{key}.{name}"] for key in ("exp_avg", "exp_avg_sq") if f"{key}.{name}" in stored}
        if moments:
            optimizer.state[parameter] = {"step": stored[f"step.{name}"].clone(), **moments}
    if _RANDOM_STATE in stored:
        torch.set_rng_state(stored[_RANDOM_STATE])


def _moments(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{key}.{name}": value.detach().clone()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
