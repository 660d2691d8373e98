"""Bring all acknowledged samples back after a crash."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import transfer_queue
from transfer_queue import BatchMeta, TransferQueueClient

from replaybuf.errors import Conflict
from replaybuf_transferqueue.manager import ReplaybufStorageManager
from replaybuf_transferqueue.records import Later, Restored
from replaybuf_transferqueue.settings import BACKEND

logger = logging.getLogger(__name__)


def restore(checkpoint_dir: str | Path | None = None, later: Literal["keep", "drop"] = "keep") -> Restored:
    """Load a checkpoint of TransferQueue, or none, and with `later="keep"` every sample that was put after it.

    Call it after `transfer_queue.init()`, in place of `transfer_queue.load_checkpoint()`. Samples with missing values
    are left out and reported. A sample that was put later comes back with the key and the tag of its put, under an
    index of its own; a tag that was changed without a put is not in the store.
    """
    client = transfer_queue.get_client()
    manager = client.storage_manager
    if not isinstance(manager, ReplaybufStorageManager):
        raise Conflict(
            f"the storage back end is {type(manager).__name__}; restore needs {BACKEND}", name="storage_backend"
        )
    folder = None if checkpoint_dir is None else Path(checkpoint_dir)
    if folder is not None and not folder.exists() and folder.with_name(f"{folder.name}.old").exists():
        # A save was killed between its two renames.
        folder = folder.with_name(f"{folder.name}.old")
    restored = asyncio.run(manager.fit(None if folder is None else str(folder)))
    store, adopted = manager.storage_client.store, list(restored.adopted)
    if later == "keep":
        for group in _reported_together(restored.later):
            indexes = _report(client, manager, group)
            adopted += [(piece, index) for sample, index in zip(group, indexes, strict=True) for piece in sample.pieces]
        restored = msgspec.structs.replace(restored, kept=True)
    store.adopt(adopted)
    store.retire(set(restored.unnamed) - {piece for piece, _ in adopted})
    if restored.missing:
        lost = BatchMeta(
            [sample.index for sample in restored.missing], [sample.partition for sample in restored.missing]
        )
        client.clear_samples(lost)
    logger.info("%s", restored)
    return restored


def _reported_together(later: Sequence[Later]) -> list[list[Later]]:
    in_order = sorted(later, key=lambda sample: sample.shape_of_put)
    return [list(group) for _, group in itertools.groupby(in_order, key=lambda sample: sample.shape_of_put)]


def _report(client: TransferQueueClient, manager: ReplaybufStorageManager, group: Sequence[Later]) -> list[int]:
    """Give samples with the same fields to the controller; return their indexes."""
    partition, is_new, fields = group[0].shape_of_put
    if is_new:
        meta = client.get_meta(list(fields), len(group), partition, mode="insert")
        indexes: list[int] = meta.global_indexes
    else:
        keys = [sample.key for sample in group if sample.key is not None]
        known = client.kv_retrieve_meta(keys, partition, create=True).global_indexes if keys else []
        by_key = dict(zip(keys, known, strict=True))
        indexes = [sample.index if sample.key is None else by_key[sample.key] for sample in group]  # type: ignore[misc]
    names = {index: sample.names for sample, index in zip(group, indexes, strict=True)}
    asyncio.run(manager.notify_data_update(partition, indexes, _schema(group, fields), names))
    tagged = BatchMeta(indexes, [partition] * len(indexes), custom_meta=[sample.tag for sample in group])
    client.set_custom_meta(tagged)
    return indexes


def _schema(group: Sequence[Later], fields: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Describe fields as TransferQueue's `extract_field_schema` does."""
    schema = {}
    for name in fields:
        column = [sample.fields[name] for sample in group]
        shapes = {field.shape for field in column}
        first = column[0]
        is_tensor = all(field.dtype is not None for field in column)
        is_nested = is_tensor and (len(shapes) > 1 or first.is_nested)
        schema[name] = {
            "dtype": getattr(torch, str(first.dtype).removeprefix("torch.")) if is_tensor else None,
            "shape": torch.Size(first.shape) if is_tensor and first.shape is not None else None,
            "is_nested": is_nested,
            "is_non_tensor": not is_tensor,
        } | ({"per_sample_shapes": [field.shape for field in column]} if is_nested else {})
    return schema
