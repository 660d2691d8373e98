"""The folder of published weights: `v000012` is version 12, complete or not there at all. Adapters have subfolders."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from replaybuf_trainer.faults import TrainingFault
from replaybuf_trainer.publishers.publisher import Weights

KEPT = 3
_NAME = re.compile(r"v(\d{6,})")


class WeightsFolders:
    """Writes a folder per version and deletes all but the newest `KEPT` up to the present version.

    Versions above it are of a history that a rewind has ended, so they go too. `written_bytes`: size of the last one.
    """

    def __init__(self, root: Path) -> None:
        self.written_bytes = 0
        self._root = root

    def path(self, version: int, adapter: str = "") -> Path:
        """Return the folder of a version."""
        return self._root / adapter / f"v{version:06d}"

    def uri(self, version: int, adapter: str = "") -> str:
        """Return the weights_uri of a version."""
        return self.path(version, adapter).resolve().as_uri()

    def write(self, version: int, weights: Weights) -> Path:
        """Write a version. Raises `TrainingFault` if the disk does not take it; older versions stay then."""
        folder = self.path(version, weights.adapter)
        try:
            weights.save_weights(folder)
        except OSError as error:
            raise TrainingFault(
                f"the weights of version {version} cannot be written to {folder}: {error}; free some space or set "
                "--weights-dir, then start the trainer again",
                name="weights_dir",
                value=str(self._root),
            ) from error
        self.written_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        return folder

    def prune(self, version: int, adapter: str = "") -> None:
        """Delete what is not needed once `version` is published."""
        folders = (self._root / adapter).glob("v*")
        found = {int(name[1]): path for path in folders if (name := _NAME.fullmatch(path.name))}
        kept = sorted(number for number in found if number <= version)[-KEPT:]
        for number, path in found.items():
            if number not in kept:
                shutil.rmtree(path, ignore_errors=True)
