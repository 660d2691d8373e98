"""Publishers that write a folder per version, and `folder` itself, which leaves the loading to the engines."""

from __future__ import annotations

import abc
import logging
from pathlib import Path
from typing import Any

from replaybuf_trainer.publishers.engines import EnginePublisher
from replaybuf_trainer.publishers.publisher import Confirm, PublisherSetup, Weights
from replaybuf_trainer.publishers.weights_folders import WeightsFolders

logger = logging.getLogger(__name__)


class VersionFolders(EnginePublisher):
    """Writes a folder per version, and keeps those that a resume may need."""

    takes_adapters = True

    def __init__(self, setup: PublisherSetup, options: Any) -> None:
        super().__init__(setup, options)
        self._adapter = ""
        self._folders = WeightsFolders(setup.weights_dir, setup.needed_versions)

    @abc.abstractmethod
    def load(self, version: int, adapter: str, confirm: Confirm) -> str:
        """Bring a complete folder to the engines; return the weights_uri to announce. Raises as `commit`."""

    def in_use(self, folder: Path) -> bool:
        """Return whether somebody reads the folder of an old version."""
        return False

    def prepare(self, version: int, weights: Weights) -> None:
        """Stage the folder of a version. Raises `TrainingFault` for a full disk."""
        self._adapter = weights.adapter
        self._folders.write(version, weights)

    def commit(self, version: int, confirm: Confirm) -> str:
        """Give the folder its name, load it, and delete old ones. Raises `ServiceUnavailable`, `Fenced`."""
        adapter = self._adapter
        self._folders.complete(version, confirm, adapter)
        uri = self.load(version, adapter, confirm)
        self._folders.prune(version, confirm, adapter, self.in_use)
        return uri

    def restore(self, version: int, confirm: Confirm, adapter: str = "") -> bool:
        """Load the folder of a version again, if it is still here. Raises as `commit`."""
        self._adapter = adapter
        if kept := self._folders.has(version, adapter):
            self.commit(version, confirm)
        return kept

    def figures(self) -> dict[str, Any]:
        """Return the size of what was written, and what is known of the engines."""
        return {"published_bytes": self._folders.written_bytes} | super().figures()


class FolderPublisher(VersionFolders):
    """Your engines must load the folders from the announced weights_uri."""

    def __init__(self, setup: PublisherSetup, options: Any) -> None:
        super().__init__(setup, options)
        logger.warning(
            "weights are written to %s and announced before any engine has loaded them; "
            "your engines must load them from the announced weights_uri",
            setup.weights_dir,
        )

    def load(self, version: int, adapter: str, confirm: Confirm) -> str:
        """Return the address of the folder."""
        return self._folders.uri(version, adapter)

    def restore(self, version: int, confirm: Confirm, adapter: str = "") -> bool:
        """Return whether the folder of a version is still here; its address is announced already."""
        return self._folders.has(version, adapter)
