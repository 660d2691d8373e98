"""Folders of unfinished exports, and the lock that shows whether an export still runs.

An export writes into a hidden folder beside its target and locks a file in it. The system ends the lock with the
process, also at kill -9. The file holds the name of the run, and the folder's name gives the name of the cursor.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

LOCK = "lock"
LONGEST_OWNER = 256
"""More characters than the name of a run has."""


def make_scratch(target: Path, run: str) -> tuple[Path, IO[str]]:
    """Create the folder of an export; return it and its lock, which holds until it is closed."""
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    lock = (scratch / LOCK).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    lock.write(run)
    lock.flush()
    return scratch, lock


def cursor_of(scratch: Path) -> str:
    """Return the name of the cursor of an export."""
    return f"export-{scratch.name.rpartition('-')[2]}"


def remove_leftovers(target: Path, run: str, forget: Callable[[str], object]) -> None:
    """Remove what killed exports of a run to the same target left: `forget` gets the name of each cursor."""
    for scratch in target.parent.glob(f".{glob.escape(target.name)}-*"):
        with _locked(scratch / LOCK) as owner:
            if owner == run:
                forget(cursor_of(scratch))  # first: if this fails, the next export finds the folder again
                shutil.rmtree(scratch)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[str | None]:
    """Hold the lock of a killed export and yield its run; None if it still runs, or if this is not an export."""
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(path.open("r+"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            owner = lock.read(LONGEST_OWNER)
        except (OSError, UnicodeDecodeError):
            yield None
            return
        yield owner
