"""Stages that compute in a thread of this process: with a model folder, or with a function of the user.

A model is a plug-in of the group `replaybuf.logprobs`, called with its folder: the core does not import torch.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from replaybuf.client.producers.failures import redact
from replaybuf.errors import EngineFault, ReplaybufError, counted
from replaybuf.generator.stage.stages import Computed, Rollout, Stage
from replaybuf.generator.threads import Worker
from replaybuf.plugins import entry_points as plugins
from replaybuf.wire.answer.browse import StoredGroup
from replaybuf.wire.group import Float32s
from replaybuf.wire.late_columns import is_per_token

MODEL_PLUGIN = "torch"


class LogprobModel(Protocol):
    """A model in this process; `max_tokens`: of the longest rollout, None = any."""

    max_tokens: int | None

    def logprobs(self, rollouts: Sequence[Rollout]) -> Sequence[Float32s]:
        """Return the logprob of every completion token, float32 [C] in nats, for each rollout; called in one thread."""


@dataclasses.dataclass(eq=False)
class LocalStage(Stage):
    """Stage with a callable in a thread: one micro-batch at a time, each for at most `timeout_s`.

    A thread cannot be ended, so a micro-batch that takes longer ends the process. `source` names the model or function
    in messages and in the metadata of groups.
    """

    column: str
    source: str
    call: Callable[[Sequence[Rollout]], Any]
    micro_batch: int | None
    timeout_s: float
    max_tokens: int | None = None
    worker: Worker = dataclasses.field(default_factory=lambda: Worker([]))
    _turn: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)

    def record(self) -> dict[str, Any]:
        """Return the metadata of groups about this stage."""
        return {"model": self.source}

    async def compute(self, rollouts: Sequence[Rollout], least_version: int = 0) -> Computed:
        """Compute in the thread. Raises `EngineFault` (`raised`), `ReplaybufError` if it is late."""
        async with self._turn:
            try:
                async with asyncio.timeout(self.timeout_s) as limit:
                    return Computed(await asyncio.wrap_future(self.worker.do(lambda: self._values(rollouts))))
            except Exception as error:  # user code may raise anything, for example without memory
                tokens = sum(len(rollout) for rollout in rollouts)
                work = f"{self.source} with {counted(len(rollouts), 'rollout')}, {counted(tokens, 'token')},"
                if limit.expired():
                    detail = (
                        f"{work} did not finish within {self.timeout_s:g} s; use smaller micro-batches or more time"
                    )
                    raise ReplaybufError(detail, name="micro_batch", bound=self.timeout_s) from None
                raise EngineFault("model_raised", redact(f"{work} raised {error!r}"), name="model") from error

    def _values(self, rollouts: Sequence[Rollout]) -> list[Any]:
        dtype = np.float32 if is_per_token(self.column) else np.float64
        return [np.asarray(values, dtype) for values in self.call(rollouts)]


async def open_model(column: str, folder: Path, micro_batch: int, timeout_s: float) -> LocalStage:
    """Load a model folder in its thread. Raises `Invalid` if the folder holds none, `MissingExtra` without torch."""
    load, worker = plugins.load(plugins.LOGPROBS, MODEL_PLUGIN), Worker([])
    model: LogprobModel = await asyncio.wrap_future(worker.do(lambda: load(folder)))
    return LocalStage(column, str(folder), model.logprobs, micro_batch, timeout_s, model.max_tokens, worker)


def open_function(column: str, function: str, timeout_s: float) -> LocalStage:
    """Load the function MODULE:NAME, which gets one stored group per call. Raises `Invalid`."""
    compute: Callable[[StoredGroup | None], Any] = plugins.load_object(function)
    return LocalStage(column, function, lambda rollouts: compute(rollouts[0].group), None, timeout_s)
