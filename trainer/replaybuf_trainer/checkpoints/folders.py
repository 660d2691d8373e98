"""Checkpoint folders: `step-000012` resumes a trainer at step 12, is complete or absent, and holds no pickle.

::

    step-000012/
      model/        model folder for engines: config, whole weights as safetensors, tokenizer; of a run with
                    adapters, adapters/NAME/ as PEFT folders instead
      state/        parameters, moments and random states, sharded: one safetensors file per rank
      state.json    run, step, version, and name and size of every file; written last

The folder has another name until state.json is on disk. Checkpoints of the first releases have `optimizer.safetensors`
instead of `state/`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

import msgspec

from replaybuf.errors import Invalid
from replaybuf_trainer.checkpoints.adapters import AdapterOrigin
from replaybuf_trainer.weights import keep_newest, sync

STATE_FOLDER = "state"
STATE_FILE = "state.json"
_NAME = re.compile(r"step-(\d{6,})")


class TrainerState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`step`: number of steps done, the `resume_step` of an attach; `version`: policy version after them.

    `ranks`: number of processes that wrote it; `files`: bytes of every file by its path; `lora`: None = whole weights.
    """

    run: str
    step: int
    version: int
    ranks: int = 1
    files: dict[str, int] = {}
    lora: AdapterOrigin | None = None


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint, or None. A half-written checkpoint has another name."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)]
    return max(found, default=None, key=lambda path: int(path.name.partition("-")[2]))


def read_state(checkpoint: Path) -> TrainerState:
    """Read the state of a checkpoint. Raises `Invalid` if it does not decode, or a file is missing or cut short."""
    try:
        state = msgspec.json.decode((checkpoint / STATE_FILE).read_bytes(), type=TrainerState)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise broken(checkpoint, str(error)) from error
    for name, size in state.files.items():
        path = checkpoint / name
        if not path.is_file():
            raise broken(checkpoint, f"{name} is missing")
        if path.stat().st_size != size:
            raise broken(checkpoint, f"{name} has {path.stat().st_size} bytes instead of {size}")
    return state


def broken(checkpoint: Path, why: str) -> Invalid:
    """Return the error for a checkpoint that cannot be resumed."""
    return Invalid(
        f"checkpoint {checkpoint} is broken: {why}; delete it to resume from the one before",
        name="checkpoint",
        value=str(checkpoint),
    )


def new_scratch(folder: Path, step: int) -> Path:
    """Create the folder in which a checkpoint is written; delete what killed trainers left."""
    for old in folder.glob(".step-*"):
        shutil.rmtree(old, ignore_errors=True)
    scratch = folder / f".step-{step:06d}.{os.getpid()}"
    (scratch / STATE_FOLDER).mkdir(parents=True)
    return scratch


def complete(scratch: Path, state: TrainerState, keep: int) -> Path:
    """Sync a written checkpoint, give it its name, and delete all but the `keep` newest; return its folder."""
    files = [path for path in sorted(scratch.rglob("*")) if path.is_file()]
    sizes = {str(path.relative_to(scratch)): path.stat().st_size for path in files}
    (scratch / STATE_FILE).write_bytes(msgspec.json.encode(msgspec.structs.replace(state, files=sizes)))
    for path in [*scratch.rglob("*"), scratch]:
        sync(path)
    final = scratch.with_name(f"step-{state.step:06d}")
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(final)
    scratch.rename(final)
    sync(final.parent)
    keep_newest(final.parent, "step-*", keep)
    return final
