"""Folders that appear whole or not at all, and the files in them. No torch: the helper of an engine imports this."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder and rename it to `folder` at the end, so that no reader sees half of it."""
    # Random: trainers in two containers may have the same process id.
    scratch = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    scratch.mkdir(parents=True)
    try:
        yield scratch
        for path in [*scratch.rglob("*"), scratch]:
            sync(path)
        shutil.rmtree(folder, ignore_errors=True)
        scratch.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def files_of(folder: Path) -> list[Path]:
    """Return every file below a folder, in order."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def keep_newest(folder: Path, pattern: str, keep: int) -> None:
    """Delete all folders but the last `keep` by name."""
    for old in sorted(folder.glob(pattern))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    """Write a file or folder through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
