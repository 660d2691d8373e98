"""Folders that are either complete or not there, even after a crash in the middle of writing.

::

    DIR/.new-NAME/ ──(fsync files, fsync folder)──rename──> DIR/NAME/ ──(fsync DIR)──> durable

A name that starts with `.new-` is never picked by any reader; `sweep` deletes what a crash left.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

_UNFINISHED = ".new-"
_DOOMED = ".old-"


@contextlib.contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Lend an empty folder to write into; it becomes `folder` when the block ends, and vanishes when it raises.

    A folder that stands there already is replaced.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.parent / f"{_UNFINISHED}{folder.name}"
    _delete(unfinished)
    unfinished.mkdir()
    try:
        yield unfinished
        for file in unfinished.iterdir():
            _sync(file)
        _sync(unfinished)
        _delete(folder)
        unfinished.rename(folder)
    except BaseException:
        _delete(unfinished)
        raise
    _sync(folder.parent)


def numbered(parent: Path, prefix: str) -> list[tuple[int, Path]]:
    """List the complete folders `PREFIX-NUMBER` in `parent`, ascending by number."""
    if not parent.is_dir():
        return []
    pattern = re.compile(rf"{re.escape(prefix)}-(\d+)")
    found = [(re.fullmatch(pattern, path.name), path) for path in parent.iterdir() if path.is_dir()]
    return sorted((int(match[1]), path) for match, path in found if match)


def keep_newest(parent: Path, prefix: str, keep: int) -> None:
    """Delete all but the `keep` >= 1 folders `PREFIX-NUMBER` with the highest numbers."""
    for _, path in numbered(parent, prefix)[:-keep]:
        _delete(path)


def sweep(parent: Path) -> None:
    """Delete what a crash left half-written or half-deleted in `parent`. One process at a time owns `parent`."""
    if parent.is_dir():
        for path in parent.iterdir():
            if path.name.startswith((_UNFINISHED, _DOOMED)):
                shutil.rmtree(path)


def _delete(folder: Path) -> None:
    # Renamed first: a crash in the middle must not leave a folder that looks whole.
    if folder.exists():
        doomed = folder.parent / f"{_DOOMED}{folder.name.removeprefix(_UNFINISHED)}"
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
