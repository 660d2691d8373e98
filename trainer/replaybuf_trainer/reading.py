"""Batches as torch tensors: a reader that fetches the next one in the background, and an `IterableDataset` over it.

    with TensorReader(client, attached.epoch, attached.step, pin_memory=True) as reader:
        for batch in reader:
            for row in batch.to("cuda").micro_batches:
                row["input_ids"], row["position_ids"], row["loss_mask"], ...

All tensors of a batch are read-only views of one buffer: the body, or the page-locked copy that the reader's thread
made.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset, get_worker_info

from replaybuf.client.http_client import HttpClient
from replaybuf.client.reader import DEFAULTS, ReaderOptions, StepReader
from replaybuf.errors import Invalid, Malformed
from replaybuf.wire.batch import Batch, BatchMeta, MicroBatch, read_batch
from replaybuf.wire.plan import Body

logger = logging.getLogger(__name__)

_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.bool_): torch.bool,
}
_FIELDS = tuple(field.name for field in dataclasses.fields(MicroBatch))

# torch warns about read-only memory once per process. Here it is intended: trigger the warning and suppress it.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TensorBatch:
    """The batch of one step for one rank.

    `micro_batches`: the tensors of each, with the names, shapes and types of `wire.batch.MicroBatch`, without absent
    optional ones. `host`: the same as numpy views, also after `to`; `client.unpack` takes it.
    """

    host: Batch
    micro_batches: list[dict[str, torch.Tensor]]

    @property
    def meta(self) -> BatchMeta:
        """Metadata of the body."""
        return self.host.meta

    @property
    def adapters_completed(self) -> dict[str, int] | None:
        """Adapters whose own step this batch completes, with that step; None = the run has no adapters."""
        completed = self.meta.adapters_completed
        return None if completed is msgspec.UNSET else completed

    def parts(self, most: int) -> Iterator[tuple[str, list[dict[str, torch.Tensor]]]]:
        """Yield at most `most` micro-batches of one adapter at a time, with its name, "" without adapters."""
        rows = sorted(zip(self.meta.adapters, self.micro_batches, strict=True), key=lambda pair: pair[0])
        for adapter, pairs in itertools.groupby(rows, key=lambda pair: pair[0]):
            same = [row for _, row in pairs]
            for start in range(0, len(same), most):
                yield adapter, same[start : start + most]

    def to(self, device: torch.device | str, *, non_blocking: bool = True) -> TensorBatch:
        """Copy the tensors to a device; from page-locked memory the copies run in the background."""
        moved = [
            {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in row.items()}
            for row in self.micro_batches
        ]
        return TensorBatch(self.host, moved)


def read_tensors(body: Body, *, pin_memory: bool = False) -> TensorBatch:
    """Read a body into tensors that are views of it, or of a page-locked copy.

    Raises `Malformed` as `read_batch`, and for a tensor that torch cannot view because it is not aligned to its item
    size. The service aligns all tensors.
    """
    buffer = torch.frombuffer(body, dtype=torch.uint8) if len(body) else torch.empty(0, dtype=torch.uint8)
    if pin_memory:
        buffer = torch.empty(len(body), dtype=torch.uint8, pin_memory=True).copy_(buffer)
        host = read_batch(buffer.numpy().data)
    else:
        host = read_batch(body)
    # Views of the buffer, not of the arrays: so torch keeps page-locked memory until copies out of it are done.
    rows = [{name: _view(buffer, name, array) for name, array in _arrays(row)} for row in host.micro_batches]
    return TensorBatch(host, rows)


def _arrays(row: MicroBatch) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    for name in _FIELDS:
        array = getattr(row, name)
        if array is not None:
            yield name, array


def _view(buffer: torch.Tensor, name: str, array: npt.NDArray[Any]) -> torch.Tensor:
    dtype = _DTYPES[array.dtype]
    if not array.size:
        return torch.empty(0, dtype=dtype)
    start = array.__array_interface__["data"][0] - buffer.data_ptr()
    if start % array.itemsize:
        detail = f"tensor {name} starts at byte {start} of the body; torch needs a multiple of {array.itemsize}"
        raise Malformed(detail, name=name, value=start, bound=array.itemsize)
    return buffer[start : start + array.nbytes].view(dtype)


class TensorReader(StepReader[TensorBatch]):
    """Reader of tensors; `replaybuf.client.reader` documents its behaviour and errors.

    `pin_memory`: the reader's thread copies batches into page-locked memory. Without CUDA it logs a warning instead.
    """

    def __init__(
        self,
        client: HttpClient,
        epoch: int,
        step: int,
        options: ReaderOptions = DEFAULTS,
        *,
        pin_memory: bool = False,
    ) -> None:
        super().__init__(client, epoch, step, options)
        self.pin_memory = pin_memory and torch.cuda.is_available()
        if pin_memory and not self.pin_memory:
            logger.warning("pin_memory has no effect: torch sees no CUDA device")

    def read(self, body: Body) -> TensorBatch:
        """Read a body into tensors."""
        return read_tensors(body, pin_memory=self.pin_memory)


class BatchDataset(IterableDataset[TensorBatch]):
    """The batches of a reader, copied to `device`, for `DataLoader(dataset, batch_size=None, num_workers=0)`.

    One item is one step of one rank; a forward pass takes its micro-batches. The reader's thread already fetches ahead
    and workers would only add copies, so iteration raises `Invalid` if `num_workers` > 0.
    """

    def __init__(self, reader: TensorReader, device: torch.device | str | None = None) -> None:
        super().__init__()
        self._reader = reader
        self._device = device

    def __iter__(self) -> Iterator[TensorBatch]:
        if get_worker_info() is not None:
            raise _no_workers()
        if self._device is None:
            return iter(self._reader)
        return (batch.to(self._device) for batch in self._reader)

    def __getstate__(self) -> object:
        raise _no_workers()  # spawned workers receive the data set by pickle


def _no_workers() -> Invalid:
    return Invalid(
        "BatchDataset needs num_workers=0: its reader already fetches ahead in a thread", name="num_workers", bound=0
    )
