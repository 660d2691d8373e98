"""Checkpoint folders on their way to disk; `replaybuf.wire.model.checkpoints` is their format, and reads them."""

from __future__ import annotations

import logging
import secrets
import shutil
from pathlib import Path

import msgspec

from replaybuf.errors import Invalid
from replaybuf.files import sync
from replaybuf.wire.model.checkpoints import (
    STATE_FILE,
    STATE_FOLDER,
    TrainerState,
    decode_state,
    file_digest,
    list_checkpoints,
)
from replaybuf_trainer.folders import files_of, numbered_folders, sync_folder
from replaybuf_trainer.ownership import Confirm, delete_listed, may_delete

logger = logging.getLogger(__name__)


def needed_versions(folder: Path, adapter: str) -> set[int]:
    """Return the published versions of an adapter whose weights a resume at one of the checkpoints needs."""
    versions = set()
    for checkpoint in list_checkpoints(folder):
        try:
            state = decode_state(checkpoint)
        except Invalid as error:  # deleted meanwhile, or nobody can resume there
            logger.debug("no version is kept for checkpoint %s: %s", checkpoint, error.detail)
            continue
        if adapter in state.needed_versions:
            versions.add(state.needed_versions[adapter])
    return versions


def new_scratch(folder: Path, step: int, confirm: Confirm) -> Path:
    """Create the folder in which a checkpoint is written; delete what killed trainers left. Raises `Fenced`."""
    delete_listed([*folder.glob(".step-*")], confirm)
    # Random: trainers in two containers may have the same process id.
    scratch = folder / f".step-{step:06d}.{secrets.token_hex(4)}"
    (scratch / STATE_FOLDER).mkdir(parents=True)
    return scratch


def complete(scratch: Path, state: TrainerState, keep: int, confirm: Confirm) -> Path:
    """Sync a written checkpoint, give it its name, and keep the `keep` newest up to its step; return its folder.

    Checkpoints of later steps stay and do not count: they are of a history that a resume has ended. Raises `Fenced`.
    If the service cannot be asked who has the run, nothing is deleted, and a checkpoint of the same step is a
    `FileExistsError`.
    """
    names = [str(path.relative_to(scratch)) for path in files_of(scratch)]
    sizes = {name: (scratch / name).stat().st_size for name in names}
    digests = {name: file_digest(scratch / name) for name in names}
    whole = msgspec.structs.replace(state, files=sizes, digests=digests)
    (scratch / STATE_FILE).write_bytes(msgspec.json.encode(whole))
    sync_folder(scratch)
    final = scratch.with_name(f"step-{state.step:06d}")
    owns_run = may_delete(confirm)
    if final.exists():
        if not owns_run:
            raise FileExistsError(f"{final} is there, and the service cannot be asked whether it may be replaced")
        shutil.rmtree(final)
    scratch.rename(final)
    sync(final.parent)
    checkpoints = numbered_folders(final.parent, "step-")
    delete_listed([path for step, path in checkpoints.items() if step <= state.step][:-keep], confirm)
    return final
