"""A back end for comparison: one file per sample and field, written beside its place and renamed, without fsync."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transfer_queue.storage.bootstrap.provider import StorageBootstrapProvider
from transfer_queue.storage.clients.base import StorageClientFactory, StorageKVClient
from transfer_queue.storage.managers.base import KVStorageManager, StorageManagerFactory

from replaybuf_transferqueue.values import decode, encode

FILES = "Files"


@StorageClientFactory.register("FilesClient")
class FilesClient(StorageKVClient):  # type: ignore[misc]
    """Values in files of one folder."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.folder = Path(config["folder"])

    def put(self, keys: list[str], values: list[Any]) -> None:
        """Write each value beside its place, then rename it."""
        for key, value in zip(keys, values, strict=True):
            path = self.folder / key
            fresh = path.with_suffix(f".{os.getpid()}")
            fresh.write_bytes(encode(value, key))
            fresh.rename(path)

    def get(
        self, keys: list[str], shapes: Any = None, dtypes: Any = None, custom_backend_meta: Any = None
    ) -> list[Any]:
        """Read the files."""
        return [decode((self.folder / key).read_bytes(), key) for key in keys]

    def clear(self, keys: list[str], custom_backend_meta: Any = None) -> None:
        """Delete the files."""
        for key in keys:
            (self.folder / key).unlink(missing_ok=True)


@StorageManagerFactory.register(FILES)
class FilesManager(KVStorageManager):  # type: ignore[misc]
    """The files behind TransferQueue's own manager."""

    def __init__(self, controller_info: Any, config: Any, zmq_context: Any = None) -> None:
        super().__init__(controller_info, {**config, "client_name": "FilesClient"}, zmq_context)


@StorageBootstrapProvider.register_provider(FILES)  # type: ignore[untyped-decorator]
def start(conf: Any) -> dict[str, Any]:
    """Make the folder."""
    Path(conf.backend[FILES].folder).mkdir(parents=True, exist_ok=True)
    return {"folder": conf.backend[FILES].folder}
