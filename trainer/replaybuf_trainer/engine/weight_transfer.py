"""Weight transfer of the engine: the four calls of vLLM, over gloo on the CPU.

    init ──► start ──► update (receives tensors) ──► finish: the model gets them, under their version
               ▲─────────────────────────────────────┘

Unlike in vLLM, nothing of the model changes before `finish`, and what does not fit it is rejected before the transfer.
"""

from __future__ import annotations

import asyncio
import math
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from starlette.requests import Request
from torch._C._distributed_c10d import TCPStore  # torch.distributed has it too, but not for type checkers

from replaybuf.errors import Invalid, ServiceUnavailable
from replaybuf_trainer.engine.requests import FinishUpdate, InitTransfer, UpdateWeights, read, whole_number
from replaybuf_trainer.engine.served_models import ServedModel
from replaybuf_trainer.engine.weight_files import check_names, check_shapes
from replaybuf_trainer.engine.worker import Worker
from replaybuf_trainer.weight_chunks import chunk_ends, from_bytes

TIMEOUT = timedelta(seconds=60)
FILE = "of the transfer"


class WeightTransfer:
    """Handlers of the weight transfer. The base model of the engine is `base`."""

    def __init__(self, worker: Worker, base: ServedModel) -> None:
        self._worker = worker
        self._base = base
        self._group: Any = None
        self._buffer_bytes = 0
        self._received: dict[str, torch.Tensor] | None = None
        self._receiving = asyncio.Lock()

    async def world_size(self, _: Request) -> Any:
        """Report the number of workers."""
        return {"world_size": 1}

    async def init(self, request: Request) -> Any:
        """Join the group of a trainer."""
        info = (await read(request, InitTransfer)).init_info
        self._buffer_bytes = info.packed_buffer_size_bytes if info.packed else 0
        self._group = await asyncio.to_thread(
            _join, info.master_address, info.master_port, info.rank_offset, info.world_size
        )
        return {"message": "Weight transfer initialized"}

    async def start(self, _: Request) -> Any:
        """Begin an update."""
        if self._received is not None:
            raise ServiceUnavailable("a weight update is active; finish it first", name="update")
        self._received = {}
        return {"message": "Weight update started"}

    async def update(self, request: Request) -> Any:
        """Receive tensors. After an error the update has ended."""
        info = (await read(request, UpdateWeights)).update_info
        if self._received is None or self._group is None:
            raise ServiceUnavailable("no weight update is active; init and start come first", name="update")
        shapes, optional = self._worker.weight_shapes()
        try:
            check_shapes(FILE, dict(zip(info.names, map(tuple, info.shapes), strict=True)), shapes)
            async with self._receiving:
                self._received |= await asyncio.to_thread(self._receive, info.names, info.dtype_names, info.shapes)
            check_names(FILE, self._received, shapes, optional)
        except (RuntimeError, ValueError) as error:
            self._received = None
            raise ServiceUnavailable(f"the transfer failed: {error}", name="update") from error
        except Invalid:
            self._received = None
            raise
        return {"message": "Weights updated"}

    async def finish(self, request: Request) -> Any:
        """Let the model use what was received, and set its version."""
        asked: FinishUpdate = await read(request, FinishUpdate) if await request.body() else FinishUpdate()
        received, self._received = self._received, None
        if received is None:
            raise ServiceUnavailable("no weight update is active; start comes first", name="update")
        if received:
            await asyncio.wrap_future(self._worker.replace(received))
        if asked.weight_version is not None:
            version = whole_number("weight_version", asked.weight_version)
            await asyncio.wrap_future(self._worker.label(self._base, version))
        return {"message": "Weight update finished"}

    def _receive(self, names: list[str], dtype_names: list[str], shapes: list[list[int]]) -> dict[str, torch.Tensor]:
        dtypes = [getattr(torch, name) for name in dtype_names]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
        tensors: dict[str, torch.Tensor] = {}
        for chunk in chunk_ends(sizes, self._buffer_bytes):
            values = torch.empty(sum(sizes[chunk]), dtype=torch.uint8)
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            self._group.broadcast([values], options).wait()
            parts = torch.split(values, sizes[chunk])
            for name, part, shape, dtype in zip(names[chunk], parts, shapes[chunk], dtypes[chunk], strict=True):
                tensors[name] = from_bytes(part, shape, dtype)
        return tensors


def _join(host: str, port: int, rank: int, world: int) -> Any:
    try:
        store = TCPStore(host, port, is_master=False, timeout=TIMEOUT)
        return dist.ProcessGroupGloo(store, rank, world, TIMEOUT)
    except RuntimeError as error:
        detail = f"the group at {host}:{port} cannot be joined: {error}"
        raise ServiceUnavailable(detail, name="master_address", value=host) from error
