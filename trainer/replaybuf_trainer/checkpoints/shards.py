"""Tensors of a checkpoint by torch.distributed.checkpoint: every rank writes and reads its own parts.

The files are safetensors with the place of each part in their header, by torch's `HuggingFaceStorageWriter`. torch's
other writer pickles. A plain tensor that all ranks have is written once. Any number of ranks can read the files; a
single process writes one file of whole tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from replaybuf_trainer.parallel.ranks import Ranks

Tensors = dict[str, torch.Tensor]
Failed = CheckpointException
"""A rank could not read or write; it has the errors of all ranks, and is no `Exception`."""
_ONE_FILE = "model-00001-of-00001.safetensors"


class _Writer(HuggingFaceStorageWriter):
    """Calls `complete` on the first rank after every rank has written and synced its file."""

    def __init__(self, folder: Path, complete: Callable[[], object]) -> None:
        super().__init__(path=str(folder), save_distributed=True)
        self._complete = complete

    def finish(self, metadata: Any, results: Any) -> None:
        """Complete the checkpoint; an error ends the save on every rank."""
        self._complete()


def save_in_background(folder: Path, tensors: Tensors, ranks: Ranks, complete: Callable[[], object]) -> Future[object]:
    """Copy tensors to CPU memory and write them in a thread.

    The future ends after `complete` has returned on the first rank, or with the first error, on all ranks alike.
    """
    if ranks.sharded:
        saving = async_save(tensors, storage_writer=_Writer(folder, complete), process_group=ranks.background)
        return cast("Future[object]", saving)
    copies = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}

    def write() -> None:
        save_file(copies, folder / _ONE_FILE)
        complete()

    executor = ThreadPoolExecutor(1, "checkpoint")
    done: Future[object] = executor.submit(write)
    executor.shutdown(wait=False)
    return done


def names_in(folder: Path) -> Collection[str]:
    """Return the names of all tensors in a folder. Raises what safetensors raises for broken files."""
    return HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata.keys()


def load_into(tensors: Tensors, folder: Path, ranks: Ranks) -> None:
    """Fill tensors in place from a folder. Raises `Failed`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # intended in a single process
        load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=not ranks.sharded)


def causes(error: BaseException) -> str:
    """Return an error, or those of all ranks, in one line."""
    if not isinstance(error, Failed):
        return str(error)
    return "; ".join(sorted({str(cause) for cause, _ in error.failures.values()}))
