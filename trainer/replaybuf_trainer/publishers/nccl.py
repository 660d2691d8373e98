"""The publisher `nccl`: sends tensors from memory to the engines, by vLLM's weight transfer; writes no folder.

A load between pause and resume, checked against vLLM 0.31::

    start_weight_update ──► update_weights, with one broadcast per chunk ──► finish_weight_update (sets the version)

`prepare` copies the weights to the memory of the host, so that the watch can send them to a restarted engine while
the trainer changes its own. A checkpoint is what engines start from. NCCL itself was not measured; the same calls run
in tests over gloo.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, Any, Literal

import msgspec
import torch
from msgspec import Meta

from replaybuf.errors import Invalid, ServiceUnavailable
from replaybuf.wire.decoding import prepared
from replaybuf_trainer.publishers.engine import Engine
from replaybuf_trainer.publishers.engines import EnginePublisher, Engines
from replaybuf_trainer.publishers.publisher import Confirm, PublisherSetup, Weights
from replaybuf_trainer.publishers.tensor_group import Backend, InitInfo, TensorGroup, check_backend, open_group
from replaybuf_trainer.weight_chunks import as_bytes, chunk_ends

BUFFERS = 2
"""Chunks that vLLM's workers hold at a time, its default."""


class NcclOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the publisher nccl.

    - `backend`: gloo is for engines on the CPU
    - `host`: address of the trainer that engines can reach; only gloo uses it
    - `dtype`: type in which weights are sent; None = as they are
    - `buffer_bytes`: size of a chunk; the trainer holds one on the GPU, an engine two
    """

    backend: Backend = "nccl"
    host: str = "127.0.0.1"
    dtype: Literal["bfloat16", "float32"] | None = None
    buffer_bytes: Annotated[int, Meta(ge=1, le=1 << 34)] = 1 << 28


class _WorldSize(msgspec.Struct):
    world_size: Annotated[int, Meta(ge=1)]


class TensorLoader:
    """Sends the tensors of one version; keeps one group per engine in `groups`, which all versions share."""

    adapter = ""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        groups: dict[str, TensorGroup],
        options: NcclOptions,
        timeout_s: float,
    ) -> None:
        self._tensors = tensors
        self._groups = groups
        self._options = options
        self._timeout_s = timeout_s

    def stage(self, engine: Engine) -> int | None:
        """Return None: the tensors are sent while the engine is paused."""
        return None

    def send(self, engine: Engine) -> None:
        """Send all tensors to the workers of an engine. Raises `ServiceUnavailable`."""
        group = self._groups.pop(engine.url, None) or self._join(engine)
        self._start(engine)
        broadcasts = ThreadPoolExecutor(1, "weight-broadcast")
        try:
            sending = broadcasts.submit(self._broadcast, group)
            engine.post("/update_weights", {"update_info": self._update_info()}, attempts=1)
            _result(sending, engine, self._timeout_s)
        except BaseException:
            group.close()  # whatever else is in the way of a broadcast, the group cannot be used again
            raise
        finally:
            broadcasts.shutdown(wait=False)
        self._groups[engine.url] = group

    def label(self, engine: Engine, version: int) -> None:
        """Let the engine apply what it received, under its version."""
        engine.post("/finish_weight_update", {"weight_version": str(version)}, attempts=1)

    def _join(self, engine: Engine) -> TensorGroup:
        try:
            workers = msgspec.json.decode(
                engine.get("/get_world_size?include_dp=true"), type=prepared(_WorldSize)
            ).world_size
        except msgspec.MsgspecError as error:
            raise ServiceUnavailable(f"engine {engine.url} reports no world size: {error}", name="engine") from error
        packed = {"packed": True, "packed_buffer_size_bytes": self._options.buffer_bytes, "packed_num_buffers": BUFFERS}

        def join(info: InitInfo) -> None:
            engine.post("/init_weight_transfer_engine", {"init_info": info | packed}, attempts=1)

        try:
            return open_group(self._options.backend, self._options.host, workers, join, self._timeout_s)
        except (RuntimeError, TimeoutError) as error:
            raise _broken(engine, error) from error

    def _start(self, engine: Engine) -> None:
        """Begin an update, after the end of one that another trainer left open: all tensors come again."""
        try:
            engine.post("/start_weight_update", attempts=1)
        except ServiceUnavailable:
            with contextlib.suppress(ServiceUnavailable):
                engine.post("/finish_weight_update", {}, attempts=1)
            engine.post("/start_weight_update", attempts=1)

    def _broadcast(self, group: TensorGroup) -> None:
        tensors = list(self._tensors.values())
        for chunk in chunk_ends([tensor.nbytes for tensor in tensors], self._options.buffer_bytes):
            group.broadcast(torch.cat([as_bytes(tensor) for tensor in tensors[chunk]]))

    def _update_info(self) -> dict[str, Any]:
        return {
            "names": list(self._tensors),
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in self._tensors.values()],
            "shapes": [list(tensor.shape) for tensor in self._tensors.values()],
        }


class NcclPublisher(EnginePublisher):
    """Sends each version to all engines, and again to engines that restarted."""

    Options = NcclOptions

    def __init__(self, setup: PublisherSetup, options: NcclOptions) -> None:
        """Check that there are engines, and a GPU for nccl. Raises `Invalid`."""
        super().__init__(setup, options)
        check_backend(options.backend)
        if not setup.engines:
            raise Invalid("publisher nccl needs at least one --engine", name="engine", value=[])
        self._engines: Engines = Engines(setup.engines, setup.engine_timeout_s, setup.on_publish)
        self._groups: dict[str, TensorGroup] = {}
        self._staged: dict[str, torch.Tensor] = {}

    def prepare(self, version: int, weights: Weights) -> None:
        """Copy the weights to the memory of the host."""
        dtype = None if self.options.dtype is None else getattr(torch, self.options.dtype)
        self._staged = {name: tensor.detach().to("cpu", dtype, copy=True) for name, tensor in weights.tensors().items()}

    def commit(self, version: int, confirm: Confirm) -> None:
        """Send the copy to the engines. Raises `ServiceUnavailable` if none takes it, and `Fenced`."""
        loader = TensorLoader(self._staged, self._groups, self.options, self.setup.engine_timeout_s)
        self._engines.switch(loader, version, confirm)

    def close(self) -> None:
        """End the watch after its current load, and leave the groups."""
        super().close()
        for group in self._groups.values():
            group.close()

    def figures(self) -> dict[str, Any]:
        """Return what one engine gets, the engines that are behind, and loads between two publications."""
        return {"published_bytes": sum(tensor.nbytes for tensor in self._staged.values())} | super().figures()


def _result(sending: Future[None], engine: Engine, timeout_s: float) -> None:
    try:
        sending.result(timeout_s)
    except (RuntimeError, TimeoutError) as error:
        raise _broken(engine, error) from error


def _broken(engine: Engine, error: Exception) -> ServiceUnavailable:
    detail = f"the process group with engine {engine.url} broke: {error or type(error).__name__}"
    return ServiceUnavailable(detail, name="engine", value=engine.url)
