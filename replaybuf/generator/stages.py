"""Stages between reward and append that add a column to a group: reference or teacher logprobs.

Each stage computes in micro-batches of its own size over many groups; `replaybuf.aggregation` joins the sizes. Groups
leave whole, in the order in which they came; one of which a micro-batch failed leaves as that fault.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from replaybuf.aggregation import Aggregator, Window, chunks
from replaybuf.errors import EngineAway, EngineFault, EngineUnfit, Invalid
from replaybuf.generator.member import ServerStatus
from replaybuf.group import Bools, Float32s, Group, Int32s, OptionalLogprobs


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One rollout as a stage sees it: `prompt_ids` int32 [P], `completion_ids` int32 [C], `sampled` bool [C].

    What a stage returns for tokens that were not sampled counts for nothing: it becomes 0.
    """

    prompt_ids: Int32s
    completion_ids: Int32s
    sampled: Bools

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def token_ids(self) -> Int32s:
        """Prompt and completion, int32 [P + C]."""
        return np.concatenate([self.prompt_ids, self.completion_ids])


class Stage(Protocol):
    """Computes one value per completion token, in nats, for the column it names."""

    column: OptionalLogprobs
    micro_batch: int
    """Rollouts per call."""

    async def compute(self, rollouts: Sequence[Rollout]) -> Sequence[Float32s]:
        """Return float32 [C] for each rollout. Raises `EngineFault` where it cannot, within a bounded time."""

    async def wait_ready(self, timeout_s: float) -> None:
        """Return as soon as it can compute. Raises `EngineAway` after `timeout_s` seconds."""

    def status(self) -> tuple[ServerStatus, ...]:
        """Return how each of its servers is doing; none where it has none."""


class Stages:
    """Runs stages over groups as whole windows fill.

    A group waits here until a window is full: whoever adds the last one must `flush`, or it stays. `away`: why the last
    wait for a stage was in vain, as `<stage>_<reason>`.
    """

    def __init__(self, stages: Sequence[Stage], group_size: int) -> None:
        self.away: str | None = None
        self._stages = tuple(stages)
        self._aggregator: Aggregator[Rollout] = Aggregator([group_size, *(stage.micro_batch for stage in stages)])
        self._groups: list[Group] = []

    async def wait_ready(self, timeout_s: float) -> None:
        """Return as soon as every stage can compute. Raises `EngineAway` after `timeout_s` seconds for one of them."""
        for stage in self._stages:
            try:
                await stage.wait_ready(timeout_s)
            except EngineAway as error:
                self.away = _named(stage, error).reason
                raise
        self.away = None

    def status(self) -> dict[str, tuple[ServerStatus, ...]]:
        """Return how the servers of every stage are doing, by its column."""
        return {stage.column: stage.status() for stage in self._stages}

    def add(self, group: Group) -> tuple[list[Group], Window[Rollout]] | None:
        """Take in one group; return what is to be completed now, for `complete`."""
        self._groups.append(group)
        return self._taken(self._aggregator.add(_rollouts(group)))

    def flush(self) -> tuple[list[Group], Window[Rollout]] | None:
        """Return what is held, for `complete`; None where there is nothing."""
        return self._taken(self._aggregator.flush())

    async def complete(self, groups: Sequence[Group], window: Window[Rollout]) -> list[Group | EngineFault]:
        """Compute every stage's column; a group of which a micro-batch failed becomes that fault.

        The reason of a fault starts with the stage: `ref_engine_timeout`. Raises, in an exception group, `EngineUnfit`
        where only an operator can help, `Invalid` where a stage returns another number of rollouts or values.
        """
        done: list[Group | EngineFault] = list(groups)
        for stage in self._stages:
            micro_batches = list(chunks(window.samples, stage.micro_batch))
            async with asyncio.TaskGroup() as tasks:
                computing = [tasks.create_task(_computed(stage, rollouts)) for rollouts in micro_batches]
            results = window.split([value for task in computing for value in task.result()])
            done = [_with_column(group, stage.column, values) for group, values in zip(done, results, strict=True)]
        return done

    def _taken(self, window: Window[Rollout] | None) -> tuple[list[Group], Window[Rollout]] | None:
        if window is None:
            return None
        groups, self._groups = self._groups, []
        return groups, window


async def _computed(stage: Stage, rollouts: Sequence[Rollout]) -> Sequence[Float32s | EngineFault]:
    try:
        values = await stage.compute(rollouts)
    except EngineUnfit:
        raise
    except EngineFault as error:
        return [_named(stage, error)] * len(rollouts)
    returned, needed = [len(one) for one in values], [len(rollout.completion_ids) for rollout in rollouts]
    if returned != needed:
        detail = f"the stage of {stage.column} returned values of lengths {returned}; the completions have {needed}"
        raise Invalid(detail, name=stage.column, value=returned, bound=needed)
    return [np.where(rollout.sampled, one, np.float32(0)) for rollout, one in zip(rollouts, values, strict=True)]


def _named(stage: Stage, error: EngineFault) -> EngineFault:
    reason = f"{stage.column.removesuffix('_logprobs')}_{error.reason}"
    return EngineFault(reason, error.detail, name=error.name, value=error.value, bound=error.bound)


def _with_column(
    group: Group | EngineFault, column: OptionalLogprobs, values: Sequence[Float32s | EngineFault]
) -> Group | EngineFault:
    if isinstance(group, EngineFault):
        return group
    computed = []
    for value in values:
        if isinstance(value, EngineFault):
            return value
        computed.append(value)
    added: dict[str, Any] = {column: np.concatenate(computed)}
    return msgspec.structs.replace(group, **added)


def _rollouts(group: Group) -> list[Rollout]:
    prompts = np.split(group.prompt_ids, np.cumsum(group.prompt_lengths)[:-1])
    ends = np.cumsum(group.completion_lengths)[:-1]
    completions, sampled = np.split(group.completion_ids, ends), np.split(group.completion_mask, ends)
    return [Rollout(*columns) for columns in zip(prompts, completions, sampled, strict=True)]
