"""Marks of complete checkpoints of the Hugging Face `Trainer`.

The Trainer writes a checkpoint file by file, and each rank its own, so kill -9 leaves folders that look like
checkpoints. The mark `replaybuf.json` is renamed into place after the files of all ranks are on disk.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from replaybuf.errors import Invalid
from replaybuf.files import CONFIG_BYTES, read_bounded, sync, write_whole
from replaybuf.wire.decoding import prepared

MARK = "replaybuf.json"


class Mark(msgspec.Struct, frozen=True):
    """The run and step of a checkpoint, and the number of ranks that wrote it."""

    run: str
    step: int
    ranks: int


def mark_complete(folder: Path, mark: Mark) -> None:
    """Mark a checkpoint whose files are all on disk."""
    write_whole(folder / MARK, msgspec.json.encode(mark))


def unmark(folder: Path) -> None:
    """Remove the mark of a folder that is about to be written."""
    with contextlib.suppress(FileNotFoundError):
        (folder / MARK).unlink()
        sync(folder)  # else a power loss brings back the mark, with some of the new files


def is_marked(folder: Path) -> bool:
    """Return whether a checkpoint is complete."""
    return (folder / MARK).exists()


def read_mark(folder: Path) -> Mark:
    """Return the mark of a checkpoint. Raises `Invalid` if it has none."""
    try:
        return msgspec.json.decode(read_bounded(folder / MARK, CONFIG_BYTES), type=prepared(Mark))
    except (OSError, msgspec.MsgspecError) as error:
        raise Invalid(
            f"checkpoint {folder} has no {MARK}: it is incomplete, or another trainer wrote it. Resume from "
            "replaybuf_hf.newest_checkpoint(output_dir), or start from its model without resuming",
            name="resume_from_checkpoint",
            value=str(folder),
        ) from error


def newest_checkpoint(output_dir: str | Path) -> str | None:
    """Return the newest complete checkpoint of a Trainer's folder, None if there is none."""
    complete = [mark.parent for mark in Path(output_dir).glob(f"checkpoint-*/{MARK}")]
    newest = max(complete, key=lambda folder: int(folder.name.rpartition("-")[2]), default=None)
    return None if newest is None else str(newest)
