"""The publisher `reload`: writes the weights, and every engine reads them from the folder.

A whole model is loaded by `reload_weights`, a LoRA adapter by name through `load_lora_adapter`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from replaybuf.errors import Invalid
from replaybuf_trainer.publishers.engine import Engine
from replaybuf_trainer.publishers.engines import Engines
from replaybuf_trainer.publishers.folder import VersionFolders
from replaybuf_trainer.publishers.publisher import Confirm, PublisherSetup


class FolderLoader:
    """Lets an engine read the weights of a whole model, or of a LoRA adapter, from a folder."""

    def __init__(self, folder: Path, adapter: str = "") -> None:
        self.adapter = adapter
        self._location = str(folder.resolve())

    def stage(self, engine: Engine) -> int | None:
        """Return None: the engine reads the folder itself."""
        return None

    def send(self, engine: Engine) -> None:
        """Replace the weights by those of the folder."""
        if self.adapter:
            named = {"lora_name": self.adapter, "lora_path": self._location, "load_inplace": True}
            engine.post("/v1/load_lora_adapter", named)
        else:
            engine.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": self._location}})

    def label(self, engine: Engine, version: int) -> None:
        """Set the version of the engine's weights."""
        engine.label(str(version), self.adapter)


class ReloadPublisher(VersionFolders):
    """Loads each version into all engines, and again into engines that restarted."""

    def __init__(self, setup: PublisherSetup, options: Any) -> None:
        """Check that there are engines. Raises `Invalid`."""
        super().__init__(setup, options)
        if not setup.engines:
            raise Invalid("publisher reload needs at least one --engine", name="engine", value=[])
        self._engines: Engines = Engines(setup.engines, setup.engine_timeout_s, setup.on_publish)

    def load(self, version: int, adapter: str, confirm: Confirm) -> str:
        """Load the folder into the engines."""
        loader = FolderLoader(self._folders.path(version, adapter), adapter)
        self._engines.switch(loader, version, confirm)
        return self._folders.uri(version, adapter)
