"""The publisher `folder`: writes the weights and leaves the loading to the engines."""

from __future__ import annotations

import logging
from typing import Any

from replaybuf_trainer.publishers.publisher import Confirm, Publisher, PublisherSetup, Weights
from replaybuf_trainer.publishers.weights_folders import WeightsFolders

logger = logging.getLogger(__name__)


class FolderPublisher(Publisher):
    """Writes a folder per version. Your engines must load it from the announced weights_uri."""

    takes_adapters = True

    def __init__(self, setup: PublisherSetup, options: Any) -> None:
        super().__init__(setup, options)
        self._adapter = ""
        self._folders = WeightsFolders(setup.weights_dir, setup.needed_versions)
        logger.warning(
            "weights are written to %s and announced before any engine has loaded them; "
            "your engines must load them from the announced weights_uri",
            setup.weights_dir,
        )

    def prepare(self, version: int, weights: Weights) -> None:
        """Stage the folder of a version. Raises `TrainingFault` for a full disk."""
        self._adapter = weights.adapter
        self._folders.write(version, weights)

    def commit(self, version: int, confirm: Confirm) -> str:
        """Give the folder its name, and delete old ones; return its address. Raises `ServiceUnavailable`, `Fenced`."""
        self._folders.complete(version, confirm, self._adapter)
        self._folders.prune(version, confirm, self._adapter)
        return self._folders.uri(version, self._adapter)

    def restore(self, version: int, confirm: Confirm, adapter: str = "") -> bool:
        """Return whether the folder of a version is still here; its address is announced already."""
        return self._folders.has(version, adapter)

    def figures(self) -> dict[str, Any]:
        """Return the size of what was written."""
        return {"published_bytes": self._folders.written_bytes}
