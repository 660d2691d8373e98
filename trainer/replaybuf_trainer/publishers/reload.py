"""The publisher `reload`: writes the weights, and every engine reads them from the folder.

A whole model is loaded by `reload_weights`, a LoRA adapter by name through `load_lora_adapter`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from replaybuf.errors import Invalid
from replaybuf_trainer.publishers.engine import Engine
from replaybuf_trainer.publishers.engines import Engines
from replaybuf_trainer.publishers.publisher import Confirm, Publisher, PublisherSetup, Weights
from replaybuf_trainer.publishers.weights_folders import WeightsFolders


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


class ReloadPublisher(Publisher):
    """Loads each version into all engines, and again into engines that restarted."""

    takes_adapters = True

    def __init__(self, setup: PublisherSetup, options: Any) -> None:
        """Check that there are engines. Raises `Invalid`."""
        super().__init__(setup, options)
        if not setup.engines:
            raise Invalid("publisher reload needs at least one --engine", name="engine", value=[])
        self._adapter = ""
        self._folders = WeightsFolders(setup.weights_dir, setup.needed_versions)
        self._engines = Engines(setup.engines, setup.engine_timeout_s, setup.on_publish)

    def prepare(self, version: int, weights: Weights) -> None:
        """Stage the folder of a version. Raises `TrainingFault` for a full disk."""
        self._adapter = weights.adapter
        self._folders.write(version, weights)

    def commit(self, version: int, confirm: Confirm) -> str:
        """Load the folder into the engines. Raises `ServiceUnavailable` if none takes it, and what `confirm` raises."""
        loader = FolderLoader(self._folders.path(version, self._adapter), self._adapter)
        self._folders.complete(version, confirm, self._adapter)
        self._engines.switch(loader, version, confirm)
        self._folders.prune(version, confirm, self._adapter)
        return self._folders.uri(version, self._adapter)

    def restore(self, version: int, confirm: Confirm, adapter: str = "") -> bool:
        """Load the folder of a version again, if it is still here. Raises as `commit`."""
        self._adapter = adapter
        if kept := self._folders.has(version, adapter):
            self.commit(version, confirm)
        return kept

    def watch(self, confirm: Confirm) -> None:
        """Load the published folder into engines that lack it, until `close`."""
        self._engines.watch(confirm)

    def retire(self, adapters: frozenset[str]) -> None:
        """Unload these adapters from the engines."""
        self._engines.retire(adapters)

    def close(self) -> None:
        """End the watch after its current load, and close the connections."""
        self._engines.close()

    def figures(self) -> dict[str, Any]:
        """Return what was written, the engines that are behind, and loads between two publications."""
        return {"published_bytes": self._folders.written_bytes} | self._engines.figures()
