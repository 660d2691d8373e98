"""The folder of published weights: `v000012` is version 12, complete or not there at all. Adapters have subfolders.

::

    write(12)                          complete(12)
    .staged-x7k2/v000012  ──► the service says that this trainer has the run ──► v000012
                                                                    │
                                                                    └── the same bytes are there: they stay
"""

from __future__ import annotations

import contextlib
import filecmp
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from replaybuf.files import sync
from replaybuf_trainer.faults import TrainingFault
from replaybuf_trainer.folders import files_of, numbered_folders
from replaybuf_trainer.ownership import delete_listed
from replaybuf_trainer.publishers.publisher import Confirm, NeededVersions, Weights, no_versions

logger = logging.getLogger(__name__)

KEPT = 3
STAGED = ".staged-"


class WeightsFolders:
    """Writes a folder per version and deletes all but the newest `KEPT` up to the present version, and needed ones.

    Versions above it are of a history that a rewind has ended, so they go too. `written_bytes`: size of the last one.
    """

    def __init__(self, root: Path, needed_versions: NeededVersions = no_versions) -> None:
        self.written_bytes = 0
        self._needed_versions = needed_versions
        self._root = root
        self._staged: Path | None = None

    def path(self, version: int, adapter: str = "") -> Path:
        """Return the folder of a version."""
        return self._root / adapter / f"v{version:06d}"

    def has(self, version: int, adapter: str = "") -> bool:
        """Return whether a version is here, complete."""
        return self.path(version, adapter).is_dir()

    def uri(self, version: int, adapter: str = "") -> str:
        """Return the weights_uri of a version."""
        return self.path(version, adapter).resolve().as_uri()

    def write(self, version: int, weights: Weights) -> Path:
        """Stage a version; return its folder, which has another name until `complete`.

        Raises `TrainingFault` if the disk does not take it; older versions stay then.
        """
        folder = self.path(version, weights.adapter)
        with self._faults_of(version, folder):
            if self._staged is not None:  # of a publication that another one has overtaken
                shutil.rmtree(self._staged.parent, ignore_errors=True)
            folder.parent.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=STAGED, dir=folder.parent))
            try:
                weights.save_weights(scratch / folder.name)
            except BaseException:
                shutil.rmtree(scratch, ignore_errors=True)
                raise
        self._staged = scratch / folder.name
        self.written_bytes = sum(path.stat().st_size for path in files_of(self._staged))
        return self._staged

    def complete(self, version: int, confirm: Confirm, adapter: str = "") -> None:
        """Give a staged version its name. Do nothing if it has it already.

        The same bytes stay where they are, because engines may be reading them. Other bytes are replaced: a rewind
        publishes their number again. Raises `Fenced`, `ServiceUnavailable`, and `TrainingFault` as `write` does.
        """
        folder, staged = self.path(version, adapter), self._staged
        if staged is None or staged.parent.parent / staged.name != folder:  # `restore` completes nothing
            return
        with self._faults_of(version, folder):
            same = folder.is_dir() and _same_files(staged, folder)
            confirm()
            if not same:
                if folder.is_dir():
                    logger.warning("version %d replaces other weights in %s", version, folder)
                    shutil.rmtree(folder)
                staged.rename(folder)
                sync(folder.parent)
        shutil.rmtree(staged.parent, ignore_errors=True)
        self._staged = None

    def prune(
        self, version: int, confirm: Confirm, adapter: str = "", in_use: Callable[[Path], bool] = lambda _: False
    ) -> None:
        """Delete what is not needed once `version` is published; up to `KEPT` older versions stay while in use.

        Raises `Fenced`. Deletes nothing if the service cannot be asked who has the run.
        """
        root = self._root / adapter
        versions = numbered_folders(root, "v")
        older = [number for number in versions if number <= version]
        used = [number for number in older[:-KEPT] if in_use(versions[number])]
        kept = {*older[-KEPT:], *used[-KEPT:], *(set(older) & set(self._needed_versions(adapter)))}
        old = [path for number, path in versions.items() if number not in kept]
        of_killed_trainers = root.glob(f"{STAGED}*")
        delete_listed([*old, *of_killed_trainers], confirm)

    @contextlib.contextmanager
    def _faults_of(self, version: int, folder: Path) -> Iterator[None]:
        """Raise `TrainingFault` for errors of the disk."""
        try:
            yield
        except OSError as error:
            raise TrainingFault(
                f"the weights of version {version} cannot be written to {folder}: {error}; free some space or set "
                "--weights-dir, then start the trainer again",
                name="weights_dir",
                value=str(self._root),
            ) from error


def _same_files(staged: Path, folder: Path) -> bool:
    """Return whether two folders have the same files with the same bytes."""
    names = [{path.relative_to(root) for path in files_of(root)} for root in (staged, folder)]
    return names[0] == names[1] and all(filecmp.cmp(staged / name, folder / name, shallow=False) for name in names[0])
