"""Start TransferQueue on this back end, and empty it for the next test."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transfer_queue
from omegaconf import OmegaConf

from replaybuf_transferqueue import BACKEND
from replaybuf_transferqueue.settings import Settings
from tests.valkeys import Valkey


def start_queue_on(valkey: Valkey, settings: Mapping[str, Any]) -> Any:
    """Start a queue, and end the one that runs."""
    transfer_queue.close()
    config = {
        "controller": {"polling_mode": True},
        "backend": {"storage_backend": BACKEND, BACKEND: {"url": valkey.url, "timeout_s": 20.0} | settings},
    }
    transfer_queue.init(OmegaConf.create(config))
    return transfer_queue


def empty_queue(folder: Path) -> None:
    """Clear all keys of the running queue, and save empty checkpoints, so that no kept one holds values."""
    for partition, keys in transfer_queue.kv_list().items():
        if keys:
            transfer_queue.kv_clear([*keys], partition)
    for number in range(Settings().keep_checkpoints):
        transfer_queue.save_checkpoint(folder / f"empty{number}")
