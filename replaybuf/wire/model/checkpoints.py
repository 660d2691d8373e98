"""Checkpoint folders: `step-000012` resumes a trainer at step 12, is complete or absent, and holds no pickle.

::

    step-000012/
      model/        model folder for engines: config, whole weights as safetensors, tokenizer; of a run with
                    adapters, adapters/NAME/ as PEFT folders instead
      state/        parameters, moments and random states, sharded: one safetensors file per rank
      state.json    run, step, version, and name, size and crc32c of every file; written last

The folder has another name until state.json is on disk.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from pathlib import Path

import crc32c
import msgspec

from replaybuf.errors import Invalid, counted
from replaybuf.files import STATE_BYTES, read_bounded
from replaybuf.wire.decoding import prepared

logger = logging.getLogger(__name__)

MODEL_FOLDER = "model"
STATE_FOLDER = "state"
STATE_FILE = "state.json"
_NAME = re.compile(r"step-(\d{6,})")
_READ_BYTES = 1 << 24


class AdapterOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the adapters, and path and fingerprint of the model folder that they were trained on."""

    rank: int
    alpha: float
    targets: list[str]
    model: str
    fingerprint: str


class TrainerState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`step`: number of steps done, the `resume_step` of an attach; `version`: policy version after them.

    `needed_versions`: by adapter, the published version whose weights a resume cannot write again, because the step is
    between two publications. `ranks`: number of processes that wrote it; `files`: bytes of every file by its path;
    `digests`: crc32c of each, empty in older checkpoints; `lora`: None = whole weights.
    """

    run: str
    step: int
    version: int
    needed_versions: dict[str, int] = {}
    ranks: int = 1
    files: dict[str, int] = {}
    digests: dict[str, str] = {}
    lora: AdapterOrigin | None = None


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, oldest step first. A half-written checkpoint has another name."""
    named = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(named, key=lambda path: int(path.name.partition("-")[2]))


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint, or None."""
    return next(reversed(list_checkpoints(folder)), None)


def read_state(checkpoint: Path) -> TrainerState:
    """Read the state of a checkpoint.

    Raises `Invalid` if it does not decode, a file is missing or cut short, or a folder has a file that is not listed.
    """
    state = decode_state(checkpoint)
    for name, size in state.files.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise broken(checkpoint, f"{STATE_FILE} names {name!r}, which is outside the checkpoint")
        path = checkpoint / name
        if not path.is_file():
            raise broken(checkpoint, f"{name} is missing")
        if path.stat().st_size != size:
            raise broken(checkpoint, f"{name} has {counted(path.stat().st_size, 'byte')} instead of {size}")
    if unlisted := _find_unlisted(checkpoint, state):
        raise broken(checkpoint, f"{unlisted.relative_to(checkpoint)} is not one of its files, and it would be loaded")
    return state


def decode_state(checkpoint: Path) -> TrainerState:
    """Read the state of a checkpoint, and none of its other files. Raises `Invalid` if it does not decode."""
    try:
        return msgspec.json.decode(read_bounded(checkpoint / STATE_FILE, STATE_BYTES), type=prepared(TrainerState))
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise broken(checkpoint, str(error)) from error


def _find_unlisted(checkpoint: Path, state: TrainerState) -> Path | None:
    """Return a file beside those that were written: a loader reads whole folders. Older checkpoints have no list."""
    if not state.files:
        return None
    listed = {checkpoint / name for name in state.files}
    folders = {path.parent for path in listed} | {checkpoint / STATE_FOLDER}
    present = {path for folder in folders if folder.is_dir() for path in folder.iterdir() if path.is_file()}
    return min(present - listed - {checkpoint / STATE_FILE}, default=None)


def check_digests(checkpoint: Path, state: TrainerState, names: Iterable[str] | None = None) -> None:
    """Read every file, or those of `names`. Raises `Invalid` for other bytes than were written.

    Logs a checkpoint without digests.
    """
    if not state.digests:
        logger.warning("checkpoint %s has no digests: only the sizes of its files are checked", checkpoint)
        return
    for name in state.files if names is None else names:
        written = state.digests.get(name, "none")
        try:
            digest = file_digest(checkpoint / name)
        except OSError as error:
            raise broken(checkpoint, f"{name}: {error}") from error
        if digest != written:
            raise broken(checkpoint, f"the crc32c of {name} is {digest}; {written} was written")


def file_digest(path: Path) -> str:
    """Return the crc32c of a file in hexadecimal. Raises `OSError`."""
    value = 0
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            value = crc32c.crc32c(piece, value)
    return f"{value:08x}"


def broken(checkpoint: Path, why: str) -> Invalid:
    """Return the error for a checkpoint that cannot be resumed."""
    detail = f"checkpoint {checkpoint} is broken: {why}; delete it to resume from the one before"
    return Invalid(detail, name="checkpoint", value=str(checkpoint))
