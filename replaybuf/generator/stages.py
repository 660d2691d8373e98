"""Stages between reward and append that add a column to a group: logprobs of reference, old policy or teacher.

Each stage computes in micro-batches of its own size over many groups; `aggregation` joins the sizes. Groups
leave whole, in the order in which they came; one of which a micro-batch failed leaves as that fault. What weights
compute that change meanwhile, they compute by one version for all groups of a window: none is a mix of two.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np

from replaybuf.errors import EngineFault, EngineUnfit, Invalid
from replaybuf.generator.aggregation import Aggregator, Window, chunks
from replaybuf.generator.fleet import TRIES, ServerStatus
from replaybuf.wire.group import Bools, Float32s, Group, Int32s, OptionalLogprobs


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


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """What a stage makes of rollouts: `values` float32 [C] of each, in nats.

    `policy_version`: of the weights that computed them all; None where weights stay as they are.
    """

    values: Sequence[Float32s]
    policy_version: int | None = None


class Stage(Protocol):
    """Computes one value per completion token, in nats, for the column it names."""

    column: OptionalLogprobs
    micro_batch: int
    """Rollouts per call."""

    @property
    def waiting(self) -> str | None:
        """Say why it cannot compute now, as far as is known; None where it can."""

    async def compute(self, rollouts: Sequence[Rollout], least_version: int = 0) -> Computed:
        """Compute a micro-batch; weights that follow the policy have `least_version` or a newer one.

        Raises `EngineFault` where it cannot, within a bounded time.
        """

    def learn_published(self, version: int) -> None:
        """Take in the version of the policy that is published now."""

    async def wait_ready(self, timeout_s: float) -> None:
        """Return as soon as it can compute. Raises `EngineAway` after `timeout_s` seconds."""

    def status(self) -> tuple[ServerStatus, ...]:
        """Return how each of its servers is doing; none where it has none."""


class Stages:
    """Runs stages over groups as whole windows fill.

    A group waits here until a window is full: whoever adds the last one must `flush`, or it stays.
    """

    def __init__(self, stages: Sequence[Stage], group_size: int) -> None:
        self._stages = tuple(stages)
        self._aggregator: Aggregator[Rollout] = Aggregator([group_size, *(stage.micro_batch for stage in stages)])
        self._groups: list[Group] = []

    @property
    def waiting(self) -> str | None:
        """Say which stage cannot compute, and why, as `<stage>_<reason>`; None where all can."""
        reasons = ((stage_name(stage.column), stage.waiting) for stage in self._stages)
        return next((f"{name}_{reason}" for name, reason in reasons if reason is not None), None)

    async def wait_ready(self, timeout_s: float) -> None:
        """Return as soon as every stage can compute. Raises `EngineAway` after `timeout_s` seconds for one of them."""
        for stage in self._stages:
            await stage.wait_ready(timeout_s)

    def learn_published(self, version: int) -> None:
        """Take in the version of the policy that is published now."""
        for stage in self._stages:
            stage.learn_published(version)

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
        least_version = max(group.policy_version for group in groups)
        for stage in self._stages:
            micro_batches = list(chunks(window.samples, stage.micro_batch))
            parts = await _by_one_version(stage, micro_batches, least_version)
            results = window.split([value for part in parts for value in part])
            done = [_with_column(group, stage.column, values) for group, values in zip(done, results, strict=True)]
        return done

    def _taken(self, window: Window[Rollout] | None) -> tuple[list[Group], Window[Rollout]] | None:
        if window is None:
            return None
        groups, self._groups = self._groups, []
        return groups, window


def stage_name(column: OptionalLogprobs) -> str:
    """Return what options and reasons of the stage that adds a column begin with."""
    return column.removesuffix("_logprobs")


_Value: TypeAlias = tuple[Float32s, int | None] | EngineFault
"""What became of one rollout: its values and the version that computed them, or why there are none."""


async def _by_one_version(
    stage: Stage, micro_batches: Sequence[Sequence[Rollout]], least_version: int
) -> list[list[_Value]]:
    """Compute micro-batches side by side; what an older version computed than another of them is asked for again.

    Where new weights come `TRIES` times over, micro-batches of the older ones fail.
    """
    parts: dict[int, Computed | EngineFault] = {}
    late: Sequence[int] = range(len(micro_batches))
    for _ in range(TRIES):
        async with asyncio.TaskGroup() as tasks:
            asked = {at: tasks.create_task(_computed(stage, micro_batches[at], least_version)) for at in late}
        parts |= {at: task.result() for at, task in asked.items()}
        least_version = max(least_version, *(_version(part) or 0 for part in parts.values()))
        late = [at for at, part in parts.items() if (version := _version(part)) is not None and version < least_version]
        if not late:
            break
    changed = EngineFault(
        "engine_version_changed",
        f"the weights changed {TRIES} times while micro-batches of one window were computed; the last version is "
        f"{least_version}",
        name="policy_version",
        value=least_version,
        bound=TRIES,
    )
    parts |= dict.fromkeys(late, _named(stage, changed))
    return [_values(parts[at], rollouts) for at, rollouts in enumerate(micro_batches)]


def _version(part: Computed | EngineFault) -> int | None:
    return part.policy_version if isinstance(part, Computed) else None


def _values(part: Computed | EngineFault, rollouts: Sequence[Rollout]) -> list[_Value]:
    if isinstance(part, EngineFault):
        return [part] * len(rollouts)
    masked = (np.where(one.sampled, values, np.float32(0)) for one, values in zip(rollouts, part.values, strict=True))
    return [(values, part.policy_version) for values in masked]


async def _computed(stage: Stage, rollouts: Sequence[Rollout], least_version: int) -> Computed | EngineFault:
    try:
        computed = await stage.compute(rollouts, least_version)
    except EngineUnfit:
        raise
    except EngineFault as error:
        return _named(stage, error)
    returned, needed = [len(one) for one in computed.values], [len(rollout.completion_ids) for rollout in rollouts]
    if returned != needed:
        detail = f"the stage of {stage.column} returned values of lengths {returned}; the completions have {needed}"
        raise Invalid(detail, name=stage.column, value=returned, bound=needed)
    return computed


def _named(stage: Stage, error: EngineFault) -> EngineFault:
    reason = f"{stage_name(stage.column)}_{error.reason}"
    return EngineFault(reason, error.detail, name=error.name, value=error.value, bound=error.bound)


def _with_column(group: Group | EngineFault, column: OptionalLogprobs, values: Sequence[_Value]) -> Group | EngineFault:
    """Add a column, and to what the metadata tell of it the version that computed it."""
    if isinstance(group, EngineFault):
        return group
    computed = []
    for value in values:
        if isinstance(value, EngineFault):
            return value
        computed.append(value)
    added: dict[str, Any] = {column: np.concatenate([logprobs for logprobs, _ in computed])}
    version = computed[0][1]  # that of the whole window
    if version is not None:
        told = group.metadata.get(column, {}) | {"policy_version": version}
        added["metadata"] = group.metadata | {column: told}
    return msgspec.structs.replace(group, **added)


def _rollouts(group: Group) -> list[Rollout]:
    prompts = np.split(group.prompt_ids, np.cumsum(group.prompt_lengths)[:-1])
    ends = np.cumsum(group.completion_lengths)[:-1]
    completions, sampled = np.split(group.completion_ids, ends), np.split(group.completion_mask, ends)
    return [Rollout(*columns) for columns in zip(prompts, completions, sampled, strict=True)]
