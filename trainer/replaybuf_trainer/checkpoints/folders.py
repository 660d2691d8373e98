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
import secrets
import shutil
from pathlib import Path

import crc32c
import msgspec

from replaybuf.errors import Invalid, counted
from replaybuf.wire.decoding import prepared
from replaybuf.wire.files import STATE_BYTES, read_bounded
from replaybuf_trainer.checkpoints.adapters import AdapterOrigin
from replaybuf_trainer.folders import files_of, keep_newest, sync
from replaybuf_trainer.ownership import Confirm, may_delete

logger = logging.getLogger(__name__)

STATE_FOLDER = "state"
STATE_FILE = "state.json"
_NAME = re.compile(r"step-(\d{6,})")
_READ_BYTES = 1 << 24


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


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint, or None. A half-written checkpoint has another name."""
    return max(_checkpoints(folder), default=None, key=lambda path: int(path.name.partition("-")[2]))


def needed_versions(folder: Path, adapter: str) -> set[int]:
    """Return the published versions of an adapter whose weights a resume at one of the checkpoints needs."""
    versions = set()
    for checkpoint in _checkpoints(folder):
        try:
            state = _decode_state(checkpoint)
        except Invalid as error:  # deleted meanwhile, or nobody can resume there
            logger.debug("no version is kept for checkpoint %s: %s", checkpoint, error.detail)
            continue
        if adapter in state.needed_versions:
            versions.add(state.needed_versions[adapter])
    return versions


def read_state(checkpoint: Path) -> TrainerState:
    """Read the state of a checkpoint.

    Raises `Invalid` if it does not decode, a file is missing or cut short, or a folder has a file that is not listed.
    """
    state = _decode_state(checkpoint)
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


def _checkpoints(folder: Path) -> list[Path]:
    return [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)]


def _decode_state(checkpoint: Path) -> TrainerState:
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


def check_digests(checkpoint: Path, state: TrainerState) -> None:
    """Read every file. Raises `Invalid` for other bytes than were written. Log a checkpoint without digests."""
    if not state.digests:
        logger.warning("checkpoint %s has no digests: only the sizes of its files are checked", checkpoint)
        return
    for name in state.files:
        written = state.digests.get(name, "none")
        try:
            digest = _digest(checkpoint / name)
        except OSError as error:
            raise broken(checkpoint, f"{name}: {error}") from error
        if digest != written:
            raise broken(checkpoint, f"the crc32c of {name} is {digest}; {written} was written")


def _digest(path: Path) -> str:
    value = 0
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            value = crc32c.crc32c(piece, value)
    return f"{value:08x}"


def broken(checkpoint: Path, why: str) -> Invalid:
    """Return the error for a checkpoint that cannot be resumed."""
    return Invalid(
        f"checkpoint {checkpoint} is broken: {why}; delete it to resume from the one before",
        name="checkpoint",
        value=str(checkpoint),
    )


def new_scratch(folder: Path, step: int, confirm: Confirm) -> Path:
    """Create the folder in which a checkpoint is written; delete what killed trainers left. Raises `Fenced`."""
    if may_delete(confirm):
        for old in folder.glob(".step-*"):
            shutil.rmtree(old, ignore_errors=True)
    # Random: trainers in two containers may have the same process id.
    scratch = folder / f".step-{step:06d}.{secrets.token_hex(4)}"
    (scratch / STATE_FOLDER).mkdir(parents=True)
    return scratch


def complete(scratch: Path, state: TrainerState, keep: int, confirm: Confirm) -> Path:
    """Sync a written checkpoint, give it its name, and delete all but the `keep` newest; return its folder.

    Raises `Fenced`. If the service cannot be asked who has the run, nothing is deleted, and a checkpoint of the same
    step is a `FileExistsError`.
    """
    names = [str(path.relative_to(scratch)) for path in files_of(scratch)]
    sizes = {name: (scratch / name).stat().st_size for name in names}
    digests = {name: _digest(scratch / name) for name in names}
    whole = msgspec.structs.replace(state, files=sizes, digests=digests)
    (scratch / STATE_FILE).write_bytes(msgspec.json.encode(whole))
    for path in [*scratch.rglob("*"), scratch]:
        sync(path)
    final = scratch.with_name(f"step-{state.step:06d}")
    owns_run = may_delete(confirm)
    if final.exists():
        if not owns_run:
            raise FileExistsError(f"{final} is there, and the service cannot be asked whether it may be replaced")
        shutil.rmtree(final)
    scratch.rename(final)
    sync(final.parent)
    if owns_run:
        keep_newest(final.parent, "step-*", keep)
    return final
