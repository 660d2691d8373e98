"""A process group of the trainer, rank 0, with the workers of one engine, ranks 1 and up.

Every engine has a group of its own, so an engine that dies breaks no other. vLLM is not imported. With nccl the engine
gets the id that torch creates for the group, in the field `nccl_unique_id_b64` that vLLM has from 0.30 on; torch keeps
it under the key "0" of the group's store. Both sides start with an all-reduce of one number, as vLLM's workers do.
With gloo, for the small engine on the CPU, the engine joins through the store of the trainer.
"""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # torch.distributed has it too, but not for type checkers

from replaybuf.errors import Invalid

Backend: TypeAlias = Literal["nccl", "gloo"]
InitInfo: TypeAlias = dict[str, Any]
ID_KEY = "0"


class TensorGroup:
    """An open group; a failed broadcast makes it unusable."""

    def __init__(self, group: Any, store: TCPStore, device: torch.device) -> None:
        self._group = group
        self._store = store
        self._device = device

    def broadcast(self, values: torch.Tensor) -> None:
        """Send a tensor to all workers and wait until it is sent. Raises `RuntimeError`."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([values.to(self._device)], options).wait()

    def close(self) -> None:
        """Leave the group without waiting for the workers; a broadcast in another thread fails."""
        with contextlib.suppress(RuntimeError):
            self._group.abort()


def check_backend(backend: Backend) -> None:
    """Raise `Invalid` if this process cannot use a backend."""
    if backend == "nccl" and not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise Invalid(
            "publisher nccl needs a GPU and NCCL in the trainer; for small engines on the CPU, give the option "
            '{"backend": "gloo"}',
            name="backend",
            value=backend,
        )


def open_group(
    backend: Backend, host: str, workers: int, join: Callable[[InitInfo], None], timeout_s: float
) -> TensorGroup:
    """Open a group while `join` lets the engine join it. Raises what `join` raises, and `RuntimeError`."""
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    world, open_in = 1 + workers, (_open_nccl if backend == "nccl" else _open_gloo)
    opening = ThreadPoolExecutor(1, "weight-transfer")
    try:
        # The constructor returns once the workers have joined, and they join once `join` has told them.
        group = opening.submit(open_in, store, world, timeout)
        info = {"rank_offset": 1, "world_size": world}
        join(info | (_nccl_id(store, host, timeout) if backend == "nccl" else _address(store, host)))
        return group.result(timeout_s)
    finally:
        opening.shutdown(wait=False)


def _open_gloo(store: TCPStore, world: int, timeout: timedelta) -> TensorGroup:
    return TensorGroup(dist.ProcessGroupGloo(store, 0, world, timeout), store, torch.device("cpu"))


def _open_nccl(store: TCPStore, world: int, timeout: timedelta) -> TensorGroup:
    device = torch.device("cuda", torch.cuda.current_device())
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    with _blocking_waits():
        group: Any = dist.ProcessGroupNCCL(store, 0, world, options)
    group.allreduce([torch.zeros(1, device=device)]).wait()
    return TensorGroup(group, store, device)


@contextlib.contextmanager
def _blocking_waits() -> Iterator[None]:
    """Let `wait` raise after the timeout. By default torch ends the whole process if a peer of a group is gone."""
    before = os.environ.get("TORCH_NCCL_BLOCKING_WAIT")
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    try:
        yield
    finally:
        del os.environ["TORCH_NCCL_BLOCKING_WAIT"]
        if before is not None:
            os.environ["TORCH_NCCL_BLOCKING_WAIT"] = before


def _nccl_id(store: TCPStore, host: str, timeout: timedelta) -> InitInfo:
    # A connection of its own: a `get` that waits holds the lock of the store that has to `set`.
    reader = TCPStore(host, store.port, is_master=False, timeout=timeout)
    return {"nccl_unique_id_b64": base64.b64encode(reader.get(ID_KEY)).decode()}


def _address(store: TCPStore, host: str) -> InitInfo:
    return {"master_address": host, "master_port": store.port}
