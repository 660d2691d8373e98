"""Where the logprobs of given tokens come from: inference servers, or a model in this process.

Both are stages (`replaybuf.generator.stages`) for reference and teacher of a run, whose weights stay as they are. The
model is a plug-in of the group `replaybuf.logprobs`, called with its folder; the core knows no torch.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from replaybuf import plugins
from replaybuf.errors import EngineFault, EngineUnfit, Invalid, ReplaybufError
from replaybuf.generator.engines import Server, VllmEngine
from replaybuf.generator.fleet import Fleet
from replaybuf.generator.member import ServerStatus
from replaybuf.generator.stages import Rollout
from replaybuf.generator.threads import Worker
from replaybuf.group import Float32s, OptionalLogprobs

MODEL_PLUGIN = "torch"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogprobOptions:
    """Whose logprobs groups carry beside those of the policy.

    Parameters
    ----------
    ref_engine
        vLLM server of the reference model, which adds ref_logprobs; several with commas share the work.
    ref_model
        Model folder of the reference, computed here by torch instead.
    ref_served_name
        Name the reference servers must serve the reference by; by default the first they serve.
    ref_micro_batch
        Rollouts per call of the reference.
    teacher_engine
        vLLM server of a teacher, which adds teacher_logprobs; several with commas share the work.
    teacher_served_name
        Name the teacher's servers must serve it by; by default the first they serve.
    teacher_micro_batch
        Rollouts per call of the teacher.
    """

    ref_engine: str | None = None
    ref_model: Path | None = None
    ref_served_name: str | None = None
    ref_micro_batch: int = 8
    teacher_engine: str | None = None
    teacher_served_name: str | None = None
    teacher_micro_batch: int = 8

    def check(self) -> None:
        """Raise `Invalid` where options are out of bounds or contradict each other."""
        for name in ("ref_micro_batch", "teacher_micro_batch"):
            value = getattr(self, name)
            if value < 1:
                raise Invalid(f"{name} is {value}; at least 1 is needed", name=name, value=value, bound=1)
        if self.ref_engine is not None and self.ref_model is not None:
            raise Invalid("ref_engine and ref_model are both given; the reference is one model", name="ref_model")


class LogprobModel(Protocol):
    """A model in this process; `max_tokens`: longest rollout it takes, None = any."""

    max_tokens: int | None

    def logprobs(self, rollouts: Sequence[Rollout]) -> Sequence[Float32s]:
        """Return the logprob of every completion token, float32 [C] in nats, for each rollout. Called in one thread."""


class EngineStage:
    """Stage: asks servers that all serve one model; they fail, wait and come back as those of the policy do.

    With none up, a micro-batch waits up to `patience_s` seconds.
    """

    def __init__(
        self, column: OptionalLogprobs, servers: Sequence[VllmEngine], micro_batch: int, *, patience_s: float = 30.0
    ) -> None:
        self.column: OptionalLogprobs = column
        self.micro_batch = micro_batch
        self._servers = {server.url: server for server in servers}
        self._fleet = Fleet(servers, patience_s=patience_s)

    @property
    def max_tokens(self) -> int | None:
        """Longest rollout in tokens: vLLM wants room for one more."""
        longest = self._fleet.max_model_len
        return None if longest is None else longest - 1

    def record(self) -> dict[str, Any]:
        """Return what goes into the metadata of groups."""
        return {"engines": list(self._servers), "model": next(iter(self._servers.values())).model}

    async def prepare(self, timeout_s: float, policy: Sequence[Server]) -> None:
        """Wait for the servers. Raises as `Fleet.prepare`, `EngineUnfit` where one serves the policy itself."""
        await self._fleet.prepare(timeout_s)
        sampling = {(server.url, server.model) for server in policy}
        for server in self._servers.values():
            if (server.url, server.model) in sampling:
                detail = (
                    f"engine {server.url} serves {server.model!r} for {self.column} and for the policy, whose weights "
                    "change; another server or name is needed"
                )
                raise EngineUnfit("engine_unfit", detail, name="engine", value=server.url)

    async def compute(self, rollouts: Sequence[Rollout]) -> Sequence[Float32s]:
        """Ask one server for all; see `Stage.compute`."""
        return await self._fleet.ask(
            sum(len(rollout) for rollout in rollouts), lambda server: self._asked(server.url, rollouts)
        )

    async def wait_ready(self, timeout_s: float) -> None:
        """Return as soon as a server is up; see `Stage.wait_ready`."""
        await self._fleet.wait_ready(timeout_s)

    def status(self) -> tuple[ServerStatus, ...]:
        """Return how every server is doing."""
        return self._fleet.status()

    async def aclose(self) -> None:
        """Stop probing and close the connections."""
        await self._fleet.aclose()

    async def _asked(self, url: str, rollouts: Sequence[Rollout]) -> list[Float32s]:
        given = await self._servers[url].logprobs_of([rollout.token_ids for rollout in rollouts])
        values = [logprobs[len(rollout.prompt_ids) :] for logprobs, rollout in zip(given, rollouts, strict=True)]
        for logprobs, rollout in zip(values, rollouts, strict=True):
            lacking = np.flatnonzero(rollout.sampled & ~np.isfinite(logprobs))
            if len(lacking):
                at = int(lacking[0])
                detail = (
                    f"engine {url} gave no usable logprob of {len(lacking)} sampled tokens, the first is "
                    f"{rollout.completion_ids[at]} at {at} of the completion"
                )
                raise EngineFault("engine_bad_answer", detail, name="engine", value=url)
        return values


class ModelStage:
    """Stage: computes in a thread of this process, one micro-batch after another, each for `timeout_s` at most.

    A thread cannot be ended, so a micro-batch that takes longer ends `generate`.
    """

    max_tokens: int | None = None

    def __init__(self, column: OptionalLogprobs, folder: Path, micro_batch: int, timeout_s: float) -> None:
        self.column: OptionalLogprobs = column
        self.micro_batch = micro_batch
        self._folder = folder
        self._timeout_s = timeout_s
        self._worker = Worker([])
        self._turn = asyncio.Lock()
        self._model: LogprobModel | None = None

    def record(self) -> dict[str, Any]:
        """Return what goes into the metadata of groups."""
        return {"model": str(self._folder)}

    async def prepare(self) -> None:
        """Load the model. Raises `Invalid` where there is none in the folder, `MissingExtra` without torch."""
        load = plugins.load(plugins.LOGPROBS, MODEL_PLUGIN)
        model: LogprobModel = await asyncio.wrap_future(self._worker.do(lambda: load(self._folder)))
        self._model, self.max_tokens = model, model.max_tokens

    async def compute(self, rollouts: Sequence[Rollout]) -> Sequence[Float32s]:
        """Compute in the thread. Raises `EngineFault` (`model_raised`), `ReplaybufError` where it is late."""
        model = self._model
        if model is None:
            raise ReplaybufError("prepare comes before compute", name=self.column)
        async with self._turn:
            try:
                async with asyncio.timeout(self._timeout_s) as bound:
                    return await asyncio.wrap_future(self._worker.do(lambda: model.logprobs(rollouts)))
            except Exception as error:  # whatever the model raises: no memory, a kernel that is missing
                what = f"{self._folder} with {len(rollouts)} rollouts, {sum(len(r) for r in rollouts)} tokens,"
                if bound.expired():
                    detail = f"{what} is not done after {self._timeout_s:g} s; smaller micro-batches are needed"
                    raise ReplaybufError(detail, name="micro_batch", bound=self._timeout_s) from None
                raise EngineFault("model_raised", f"{what} raised {error!r}", name="model") from error

    async def wait_ready(self, timeout_s: float) -> None:
        """Return: it is there."""

    def status(self) -> tuple[ServerStatus, ...]:
        """Return nothing: it has no servers."""
        return ()


LogprobStage = EngineStage | ModelStage


async def open_stages(
    options: LogprobOptions,
    stack: AsyncExitStack,
    *,
    policy: Sequence[Server],
    timeout_s: float,
    start_timeout_s: float,
    api_key: str | None = None,
) -> list[LogprobStage]:
    """Make ready what `options` ask for; `stack` closes it.

    `policy`: the prepared servers that sample; `timeout_s` bounds one call of a stage. Raises `Invalid`,
    `MissingExtra`, `EngineAway` where a server is not up after `start_timeout_s`, `EngineUnfit`.
    """
    options.check()
    stages: list[LogprobStage] = []
    asked: tuple[tuple[OptionalLogprobs, str | None, str | None, int], ...] = (
        ("ref_logprobs", options.ref_engine, options.ref_served_name, options.ref_micro_batch),
        ("teacher_logprobs", options.teacher_engine, options.teacher_served_name, options.teacher_micro_batch),
    )
    if options.ref_model is not None:
        local = ModelStage("ref_logprobs", options.ref_model, options.ref_micro_batch, timeout_s)
        await local.prepare()
        stages.append(local)
    for column, addresses, name, micro_batch in asked:
        if addresses is not None:
            urls = [url.strip() for url in addresses.split(",")]
            servers = [VllmEngine(url, timeout_s=timeout_s, model=name, api_key=api_key) for url in urls]
            remote = EngineStage(column, servers, micro_batch)
            stack.push_async_callback(remote.aclose)
            await remote.prepare(start_timeout_s, policy)
            stages.append(remote)
    return stages
