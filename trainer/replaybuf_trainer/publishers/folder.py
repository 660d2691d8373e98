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
        self._folders = WeightsFolders(setup.weights_dir)
        logger.warning(
            "weights are written to %s and announced before any engine has loaded them; "
            "your engines must load them from the announced weights_uri",
            setup.weights_dir,
        )

    def prepare(self, version: int, weights: Weights) -> None:
        """Write the folder of a version. Raises `TrainingFault` for a full disk."""
        self._adapter = weights.adapter
        self._folders.write(version, weights)

    def commit(self, version: int, confirm: Confirm) -> str:
        """Delete old folders; return the address of the new one. The announcement itself is fenced."""
        self._folders.prune(version, self._adapter)
        return self._folders.uri(version, self._adapter)

    def figures(self) -> dict[str, Any]:
        """Return the size of what was written."""
        return {"published_bytes": self._folders.written_bytes}
