"""Batches as torch tensors: a reader that fetches the next one in the background, and an `IterableDataset` over it.

    with TensorReader(client, attached.epoch, attached.step, pin_memory=True) as reader:
        for batch in reader:
            for row in batch.to("cuda").micro_batches:
                row["input_ids"], row["position_ids"], row["loss_mask"], ...

All tensors of a batch are views of one buffer: the body as it came, or the page-locked copy of it that the reader's
thread made. They are not to be written to.
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset, get_worker_info

from replaybuf.client.client import Client
from replaybuf.client.direct import Body
from replaybuf.client.reader import DEFAULTS, ReaderOptions, StepReader
from replaybuf.errors import Invalid, Malformed
from replaybuf.wire.batch import Batch, BatchMeta, MicroBatch, read_batch

logger = logging.getLogger(__name__)

_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.bool_): torch.bool,
}
_FIELDS = tuple(field.name for field in dataclasses.fields(MicroBatch))

# torch warns of read-only memory once per process and then never again. Here it is meant, and said above.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TensorBatch:
    """The part of one step's batch that one rank trains.

    `micro_batches`: of each its tensors by the names, shapes and types of `wire.batch.MicroBatch`; optional ones
    are left out where there are none. `host`: the same as numpy views, also after `to`; `client.unpack` takes it.
    """

    host: Batch
    micro_batches: list[dict[str, torch.Tensor]]

    @property
    def meta(self) -> BatchMeta:
        """What the body says about itself."""
        return self.host.meta

    def to(self, device: torch.device | str, *, non_blocking: bool = True) -> TensorBatch:
        """Move the tensors to a device; from page-locked memory the copies run while the caller goes on."""
        moved = [
            {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in row.items()}
            for row in self.micro_batches
        ]
        return TensorBatch(self.host, moved)


def read_tensors(body: Body, *, pin_memory: bool = False) -> TensorBatch:
    """Read a body into tensors that are views of it, or of a page-locked copy.

    Raises `Malformed` as `read_batch`, and where a tensor does not begin at a multiple of its item's size, which torch
    cannot view. Those of the service do.
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
        told = f"tensor {name} begins at byte {start} of the body; torch needs a multiple of {array.itemsize}"
        raise Malformed(told, name=name, value=start, bound=array.itemsize)
    return buffer[start : start + array.nbytes].view(dtype)


class TensorReader(StepReader[TensorBatch]):
    """Reader of tensors; see `replaybuf.client.reader` for what it does and raises.

    `pin_memory`: batches come in page-locked memory, copied there by the reader's thread. Without CUDA there is none:
    the reader says so once, and batches come as they are.
    """

    def __init__(
        self,
        client: Client,
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
        """Read a body into views."""
        return read_tensors(body, pin_memory=self.pin_memory)


class BatchDataset(IterableDataset[TensorBatch]):
    """The batches of a reader, for `DataLoader(dataset, batch_size=None, num_workers=0)`; `device`: moved there.

    One item is one step of one rank; its micro-batches are what a forward pass takes. The reader fetches ahead in a
    thread of its own, so workers would only add copies: with `num_workers` > 0 iterating raises `Invalid`.
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
        raise _no_workers()  # workers that are spawned are sent the data set


def _no_workers() -> Invalid:
    return Invalid(
        "BatchDataset takes num_workers=0: its reader fetches ahead in a thread", name="num_workers", bound=0
    )
