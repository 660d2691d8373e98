"""Folders that appear whole or not at all, and the files in them. No torch: the helper of an engine imports this."""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from replaybuf.files import sync


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder and rename it to `folder` at the end, so that no reader sees half of it."""
    # Random: trainers in two containers may have the same process id.
    scratch = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    scratch.mkdir(parents=True)
    try:
        yield scratch
        sync_folder(scratch)
        shutil.rmtree(folder, ignore_errors=True)
        scratch.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def files_of(folder: Path) -> list[Path]:
    """Return every file below a folder, in order."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def numbered_folders(root: Path, prefix: str) -> dict[int, Path]:
    """Return the folders `PREFIX000012` by their number, lowest first.

    Other names are left out: `step-000012.old` was moved aside, and its owner wants to keep it.
    """
    name = re.compile(re.escape(prefix) + r"(\d{6,})")
    matches = ((name.fullmatch(path.name), path) for path in root.glob(f"{prefix}*"))
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def sync_folder(folder: Path) -> None:
    """Write a folder and everything in it through to the disk; a file is written alone."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)
