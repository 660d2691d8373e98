"""Stages that compute logprobs of given tokens, with inference servers or a model in this process.

The weights of reference and teacher never change; servers of the policy get its weights like those that sample.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from replaybuf.errors import EngineAway, EngineFault, EngineUnfit, Invalid, counted
from replaybuf.generator.engines import Server, VllmEngine
from replaybuf.generator.fleet import BEHIND, RETRY_PAUSE_S, Fleet, ServerStatus, stale_fault
from replaybuf.generator.fleet.publication import ahead, stale
from replaybuf.generator.stage.local import LocalStage, open_model
from replaybuf.generator.stage.stages import Computed, Rollout, Stage, count_tokens, stage_name
from replaybuf.option_types import OptionGroup, Positive, about, group_option
from replaybuf.wire.group import OPTIONAL_LOGPROBS, OptionalLogprobs

logger = logging.getLogger(__name__)


class StageOptions(OptionGroup, frozen=True, kw_only=True):
    """How a stage calls its model."""

    served_name: Annotated[str | None, about("Name of the model on its servers.")] = None
    micro_batch: Annotated[Positive, about("Rollouts per request.")] = 8


@group_option
class StagesOptions(OptionGroup, frozen=True, kw_only=True):
    """Calls of the models of logprobs, such as {"ref": {"served_name": "base", "micro_batch": 16}}."""

    ref: Annotated[
        StageOptions,
        about("served_name: model on the servers (default: their first). micro_batch: rollouts per call (8)."),
    ] = StageOptions()
    old: Annotated[StageOptions, about("The same. Default of served_name: the policy that samples.")] = StageOptions()
    teacher: Annotated[StageOptions, about("The same as for ref.")] = StageOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogprobOptions:
    """Sources of logprobs in addition to those of the sampling engines."""

    ref_engine: str | None = None
    """vLLM server of the reference model; adds ref_logprobs to groups. Separate several servers by commas."""
    ref_model: Path | None = None
    """Model folder of the reference model; use it instead of ref_engine. torch computes ref_logprobs in this
    process."""
    old_engine: str | None = None
    """vLLM server of the policy; adds old_logprobs of one weight version to each group. The trainer must load the
    weights into it. Separate several servers by commas. A sampling engine is allowed."""
    teacher_engine: str | None = None
    """vLLM server of a teacher model; adds teacher_logprobs to groups. Separate several servers by commas."""
    logprob_options: StagesOptions = dataclasses.field(default_factory=StagesOptions)

    def check(self) -> None:
        """Raise `Invalid` if options are out of bounds or contradict each other."""
        for column in OPTIONAL_LOGPROBS:
            for url in self.servers(column):
                if not url.startswith(("http://", "https://")):
                    name = f"{stage_name(column)}_engine"
                    detail = f"{name} is {url!r}; it must be the address of a vLLM server: http://HOST:PORT"
                    raise Invalid(detail, name=name, value=url)
        if self.ref_engine is not None and self.ref_model is not None:
            raise Invalid("ref_engine and ref_model are both set; set one of them", name="ref_model")

    def servers(self, column: OptionalLogprobs) -> list[str]:
        """Return the addresses of the servers of a column."""
        addresses: str | None = getattr(self, f"{stage_name(column)}_engine")
        return [] if addresses is None else [url.strip() for url in addresses.split(",")]


class EngineStage(Stage):
    """Stage with servers of one model that never changes; their faults are handled as those of servers that sample.

    If no server is up, a micro-batch waits up to `patience_s` seconds.
    """

    def __init__(
        self, column: OptionalLogprobs, servers: Sequence[VllmEngine], micro_batch: int, *, patience_s: float = 30.0
    ) -> None:
        self.column: OptionalLogprobs = column
        self.micro_batch = micro_batch
        self._servers = {server.url: server for server in servers}
        self._patience_s = patience_s
        self._fleet = Fleet(servers, patience_s=patience_s)

    @property
    def max_tokens(self) -> int | None:
        """Longest rollout in tokens: vLLM needs space for one more."""
        longest = self._fleet.max_model_len
        return None if longest is None else longest - 1

    def record(self) -> dict[str, Any]:
        """Return the metadata of groups about this stage."""
        return {"engines": list(self._servers), "model": next(iter(self._servers.values())).model}

    async def prepare(self, timeout_s: float, policy: Sequence[Server]) -> None:
        """Wait for the servers. Raises as `Fleet.prepare`, `EngineUnfit` if one serves the policy itself."""
        await self._fleet.prepare(timeout_s)
        sampling = {(server.url, server.model) for server in policy}
        for server in self._servers.values():
            if (server.url, server.model) in sampling:
                detail = (
                    f"engine {server.url} serves {server.model!r} for {self.column} and for the policy, whose weights "
                    "change; use another server or served name"
                )
                raise EngineUnfit("engine_unfit", detail, name="engine", value=server.url)

    @property
    def waiting(self) -> str | None:
        """Reason why no server is up; None if one is."""
        return self._fleet.waiting

    async def compute(self, rollouts: Sequence[Rollout], least_version: int = 0) -> Computed:
        """Compute all with one server; see `Stage.compute`."""
        return await self._fleet.ask(count_tokens(rollouts), lambda server: self._compute(server.url, rollouts))

    async def wait_ready(self, timeout_s: float) -> None:
        """Return as soon as a server is up; see `Stage.wait_ready`."""
        await self._fleet.wait_ready(timeout_s)

    def status(self) -> tuple[ServerStatus, ...]:
        """Return the status of every server."""
        return self._fleet.status()

    async def aclose(self) -> None:
        """Stop probing and close the connections."""
        await self._fleet.aclose()

    async def _compute(self, url: str, rollouts: Sequence[Rollout]) -> Computed:
        rows = await self._servers[url].logprobs_of([rollout.token_ids for rollout in rollouts])
        values = [logprobs[len(rollout.prompt_ids) :] for logprobs, rollout in zip(rows, rollouts, strict=True)]
        for logprobs, rollout in zip(values, rollouts, strict=True):
            lacking = np.flatnonzero(rollout.sampled & ~np.isfinite(logprobs))
            if len(lacking):
                at = int(lacking[0])
                detail = (
                    f"engine {url} returned no finite logprob for {counted(len(lacking), 'sampled token')}; the "
                    f"first is {rollout.completion_ids[at]} at {at} of the completion"
                )
                raise EngineFault("engine_bad_answer", detail, name="engine", value=url)
        return Computed(values)


class PolicyStage(EngineStage):
    """Stage with servers that get the policy's weights: each micro-batch is computed by one version.

    The version is read before and after a micro-batch; if it changed meanwhile, the micro-batch is computed again. A
    server with an older version than the published one is suspended until it has it, like one that samples. A server
    with the published version, but an older one than the rollouts, will get it soon: at most `patience_s` seconds.
    """

    _published: int | None = None

    async def prepare(self, timeout_s: float, policy: Sequence[Server]) -> None:
        """Wait for the servers. Raises as `Fleet.prepare`, `EngineUnfit` if one does not report its version."""
        await self._fleet.prepare(timeout_s)
        for server in self._servers.values():
            await self._version_of(server)

    async def compute(self, rollouts: Sequence[Rollout], least_version: int = 0) -> Computed:
        """Compute all with one server, by `least_version` or a newer one; see `Stage.compute`."""
        clock = asyncio.get_running_loop().time
        ends_s = clock() + self._patience_s
        while True:
            try:
                return await self._fleet.ask(
                    count_tokens(rollouts), lambda server: self._by_one_version(server.url, rollouts, least_version)
                )
            except EngineAway as error:
                if error.reason != BEHIND or clock() >= ends_s:
                    raise
                logger.info("%s: waiting for new weights: %s", self.column, error)
            await asyncio.sleep(RETRY_PAUSE_S)

    def learn_published(self, version: int) -> None:
        """Suspend servers without this version; see `Fleet.learn_published`."""
        self._published = version
        self._fleet.learn_published(version)

    async def _by_one_version(self, url: str, rollouts: Sequence[Rollout], least_version: int) -> Computed:
        server = self._servers[url]
        before = await self._version_of(server)
        if stale(before, self._published) or ahead(before, self._published):
            raise stale_fault(url, f"version {before}", self._published)
        if before < least_version:
            detail = f"engine {url} has version {before}; the rollouts were sampled by {least_version}"
            raise EngineAway(BEHIND, detail, name="engine", value=url, bound=least_version)
        computed = await self._compute(url, rollouts)
        after = await self._version_of(server)
        if after != before:
            detail = f"engine {url} had version {before} before it computed and {after} after"
            raise EngineAway("engine_version_changed", detail, name="engine", value=url)
        return Computed(computed.values, after)

    async def _version_of(self, server: VllmEngine) -> int:
        version = await server.loaded_version()
        if version is None:
            how = "start vLLM with VLLM_SERVER_DEV_MODE=1"
            detail = f"engine {server.url} reports no policy version, which {self.column} need; {how}"
            raise EngineUnfit("engine_unfit", detail, name="engine", value=server.url)
        return version


LogprobStage = EngineStage | LocalStage


async def open_stages(
    options: LogprobOptions,
    stack: AsyncExitStack,
    *,
    policy: Sequence[Server],
    timeout_s: float,
    start_timeout_s: float,
    api_key: str | None = None,
) -> list[LogprobStage]:
    """Open the stages of checked `options`, in the order in which groups pass them; `stack` closes them.

    `policy`: the prepared servers that sample; `timeout_s` limits one call of a stage. Raises `Invalid`,
    `MissingExtra`, `EngineAway` if a server is not up after `start_timeout_s`, `EngineUnfit`.
    """
    stages: list[LogprobStage] = []
    if options.ref_model is not None:
        micro_batch = options.logprob_options.ref.micro_batch
        stages.append(await open_model("ref_logprobs", options.ref_model, micro_batch, timeout_s))
    for column in OPTIONAL_LOGPROBS:
        urls = options.servers(column)
        if not urls:
            continue
        how: StageOptions = getattr(options.logprob_options, stage_name(column))
        name, of_policy = how.served_name, column == "old_logprobs"
        if of_policy and name is None:
            name = next((server.model for server in policy), None)
        servers = [VllmEngine(url, timeout_s=timeout_s, model=name, api_key=api_key) for url in urls]
        remote = (PolicyStage if of_policy else EngineStage)(column, servers, how.micro_batch)
        stack.push_async_callback(remote.aclose)
        await remote.prepare(start_timeout_s, policy)
        stages.append(remote)
    return stages
