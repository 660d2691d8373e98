"""Folder of an export: files by table and step, and a manifest with a checksum of each, written last.

::

    DIR/manifest.json   DIR/groups/step=3/part-00000.parquet   DIR/rollouts/...   DIR/ledger/...

Rows without a step are in `step=-1`, because pandas reads no null partition beside others. A part number names
the page that the rows came with: parts in ascending order hold the groups in the order of storing.

An unfinished export is a hidden folder beside its target with a locked file in it. The system ends the lock with the
process, also at kill -9. The file holds the name of the run, and the folder's name gives the name of the cursor.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import msgspec

from replaybuf.client.exports.tables import TABLES, pyarrow, schema_of
from replaybuf.errors import Conflict

FORMAT = 1
MANIFEST = "manifest.json"
NO_STEP = -1
LOCK = "lock"
LONGEST_OWNER = 256
"""More characters than the name of a run has."""


class FileEntry(msgspec.Struct, frozen=True):
    """One file: its rows and the SHA-256 of its bytes."""

    rows: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What an export holds. `rows` by table; `without_rollouts`: groups whose bytes were freed before.

    `trimmed_groups`, `trimmed_entries`: left out, because their history was trimmed. `steps`: ids of the groups of each
    acked or assembled step of the surviving history, in training order.
    """

    format: int
    run: str
    generation: int
    step: int
    config: dict[str, Any]
    rows: dict[str, int]
    without_rollouts: int
    trimmed_groups: int
    trimmed_entries: int
    steps: dict[int, list[str]]
    files: dict[str, FileEntry]


class ExportWriter:
    """Writes an export of a run into a temporary folder beside `target`; `finish` moves it there at once.

    `cursor`: the name of the cursor that this export reads.
    """

    def __init__(self, target: Path, run: str) -> None:
        if target.exists():
            raise Conflict(f"{target} exists; export to a folder that does not", name="to", value=str(target))
        pyarrow()
        target.parent.mkdir(parents=True, exist_ok=True)
        self._target = target
        self._scratch, self._lock = make_scratch(target, run)
        self.cursor = cursor_of(self._scratch)
        self.files: dict[str, FileEntry] = {}
        self.rows = dict.fromkeys(TABLES, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._lock.close()

    def write(self, table: str, part: int, rows: Mapping[int | None, Sequence[dict[str, Any]]]) -> None:
        """Write the rows of one page, by step."""
        pa = pyarrow()
        for step, several in rows.items():
            name = f"{table}/step={NO_STEP if step is None else step}/part-{part:06}.parquet"
            path = self._scratch / name
            path.parent.mkdir(parents=True, exist_ok=True)
            pa.parquet.write_table(pa.Table.from_pylist(list(several), schema=schema_of(table)), path)
            self.files[name] = FileEntry(len(several), checksum(path))
            self.rows[table] += len(several)

    def finish(self, manifest: Manifest) -> None:
        """Write the manifest and move the folder to its place."""
        with (self._scratch / MANIFEST).open("wb") as stream:
            stream.write(msgspec.json.format(msgspec.json.encode(manifest)))
            stream.flush()
            os.fsync(stream.fileno())
        (self._scratch / LOCK).unlink()
        self._scratch.chmod(0o755)
        self._scratch.rename(self._target)


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


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
