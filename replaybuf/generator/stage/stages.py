"""Stages between reward and append, each of which adds a column of logprobs to groups.

Columns are those of the reference, of the old policy or of a teacher. Each stage computes in micro-batches of its own
size over many groups; `aggregation` reconciles the sizes. Groups leave whole and in order. A group with a failed
micro-batch leaves as that fault. If weights change meanwhile, all groups of a window are computed by one version.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np

from replaybuf.errors import EngineFault, EngineUnfit, Invalid
from replaybuf.generator.fleet import TRIES, ServerStatus
from replaybuf.generator.stage.aggregation import Aggregator, Window, chunks
from replaybuf.wire.group import Bools, Float32s, Group, Int32s, OptionalLogprobs


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One rollout for a stage: `prompt_ids` int32 [P], `completion_ids` int32 [C], `sampled` bool [C].

    Values of tokens that were not sampled are replaced by 0.
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
    """Values of a stage for rollouts: float32 [C] of each, in nats.

    `policy_version`: of the weights that computed all of them; None if the weights never change.
    """

    values: Sequence[Float32s]
    policy_version: int | None = None


class Stage(Protocol):
    """Computes one value per completion token, in nats, for its column. The defaults are those without servers."""

    column: OptionalLogprobs
    micro_batch: int
    """Rollouts per call."""

    @property
    def waiting(self) -> str | None:
        """Reason why it cannot compute now, if that is known; None if it can."""
        return None

    async def compute(self, rollouts: Sequence[Rollout], least_version: int = 0) -> Computed:
        """Compute a micro-batch; weights that follow the policy have `least_version` or a newer one.

        Raises `EngineFault` within a bounded time.
        """

    def learn_published(self, version: int) -> None:
        """Record the published version of the policy."""
        return

    async def wait_ready(self, timeout_s: float) -> None:
        """Return as soon as it can compute. Raises `EngineAway` after `timeout_s` seconds."""
        return

    def status(self) -> tuple[ServerStatus, ...]:
        """Return the status of each of its servers."""
        return ()


class Stages:
    """Runs stages over groups as windows fill.

    A group waits here until a window is full; call `flush` after the last group.
    """

    def __init__(self, stages: Sequence[Stage], group_size: int) -> None:
        self._stages = tuple(stages)
        self._aggregator: Aggregator[Rollout] = Aggregator([group_size, *(stage.micro_batch for stage in stages)])
        self._groups: list[Group] = []

    @property
    def waiting(self) -> str | None:
        """Reason of the first stage that cannot compute, as `<stage>_<reason>`; None if all can."""
        reasons = ((stage_name(stage.column), stage.waiting) for stage in self._stages)
        return next((f"{name}_{reason}" for name, reason in reasons if reason is not None), None)

    async def wait_ready(self, timeout_s: float) -> None:
        """Return as soon as every stage can compute. Raises `EngineAway` after `timeout_s` seconds for one of them."""
        for stage in self._stages:
            await stage.wait_ready(timeout_s)

    def learn_published(self, version: int) -> None:
        """Record the published version of the policy."""
        for stage in self._stages:
            stage.learn_published(version)

    def status(self) -> dict[str, tuple[ServerStatus, ...]]:
        """Return the status of the servers of every stage, by its column."""
        return {stage.column: stage.status() for stage in self._stages}

    def add(self, group: Group) -> tuple[list[Group], Window[Rollout]] | None:
        """Add one group; return the arguments of `complete` if a window is full."""
        self._groups.append(group)
        return self._leave(self._aggregator.add(_rollouts(group)))

    def flush(self) -> tuple[list[Group], Window[Rollout]] | None:
        """Return everything held, as arguments of `complete`; None if that is nothing."""
        return self._leave(self._aggregator.flush())

    async def complete(self, groups: Sequence[Group], window: Window[Rollout]) -> list[Group | EngineFault]:
        """Compute every stage's column; a group with a failed micro-batch becomes that fault.

        The reason of a fault starts with the stage: `ref_engine_timeout`. Raises, in an exception group, `EngineUnfit`
        if only an operator can help, `Invalid` if a stage returns another number of rollouts or values.
        """
        done: list[Group | EngineFault] = list(groups)
        least_version = max(group.policy_version for group in groups)
        for stage in self._stages:
            micro_batches = list(chunks(window.samples, stage.micro_batch))
            values, version = await _compute_by_one_version(stage, micro_batches, least_version)
            done = [
                _with_column(group, stage.column, of_group, version)
                for group, of_group in zip(done, window.split(values), strict=True)
            ]
        return done

    def _leave(self, window: Window[Rollout] | None) -> tuple[list[Group], Window[Rollout]] | None:
        if window is None:
            return None
        groups, self._groups = self._groups, []
        return groups, window


def stage_name(column: OptionalLogprobs) -> str:
    """Return the prefix of a stage's options and fault reasons, such as `ref`."""
    return column.removesuffix("_logprobs")


_Value: TypeAlias = Float32s | EngineFault
"""Values of one rollout, or the fault of its micro-batch."""


async def _compute_by_one_version(
    stage: Stage, micro_batches: Sequence[Sequence[Rollout]], least_version: int
) -> tuple[list[_Value], int | None]:
    """Compute micro-batches side by side, and again those of an older version than another of them.

    Returns the values of each rollout, and the version that computed them. If new weights come `TRIES` times,
    micro-batches of the older ones fail.
    """
    parts: dict[int, Computed | EngineFault] = {}
    late: Sequence[int] = range(len(micro_batches))
    for _ in range(TRIES):
        async with asyncio.TaskGroup() as tasks:
            asked = {at: tasks.create_task(_compute(stage, micro_batches[at], least_version)) for at in late}
        parts |= {at: task.result() for at, task in asked.items()}
        versions = {
            at: part.policy_version
            for at, part in parts.items()
            if isinstance(part, Computed) and part.policy_version is not None
        }
        least_version = max([least_version, *versions.values()])
        late = [at for at, version in versions.items() if version < least_version]
        if not late:
            break
    changed = EngineFault(
        "engine_version_changed",
        f"the weights changed {TRIES} times while the micro-batches of one window were computed; the last version is "
        f"{least_version}",
        name="policy_version",
        value=least_version,
        bound=TRIES,
    )
    parts |= dict.fromkeys(late, _fault_of(stage, changed))
    values = [value for at, rollouts in enumerate(micro_batches) for value in _values(parts[at], rollouts)]
    return values, least_version if versions else None


def _values(part: Computed | EngineFault, rollouts: Sequence[Rollout]) -> list[_Value]:
    if isinstance(part, EngineFault):
        return [part] * len(rollouts)
    rows = zip(rollouts, part.values, strict=True)
    return [np.where(rollout.sampled, values, np.float32(0)) for rollout, values in rows]


async def _compute(stage: Stage, rollouts: Sequence[Rollout], least_version: int) -> Computed | EngineFault:
    try:
        computed = await stage.compute(rollouts, least_version)
    except EngineUnfit:
        raise
    except EngineFault as error:
        return _fault_of(stage, error)
    returned, needed = [len(one) for one in computed.values], [len(rollout.completion_ids) for rollout in rollouts]
    if returned != needed:
        detail = f"the stage of {stage.column} returned values of lengths {returned}; the completions have {needed}"
        raise Invalid(detail, name=stage.column, value=returned, bound=needed)
    return computed


def _fault_of(stage: Stage, error: EngineFault) -> EngineFault:
    reason = f"{stage_name(stage.column)}_{error.reason}"
    return EngineFault(reason, error.detail, name=error.name, value=error.value, bound=error.bound)


def _with_column(
    group: Group | EngineFault, column: OptionalLogprobs, values: Sequence[_Value], version: int | None
) -> Group | EngineFault:
    """Add a column, and the version that computed it to the metadata; or return the first fault."""
    computed = [value for value in values if not isinstance(value, EngineFault)]
    if isinstance(group, EngineFault):
        return group
    if len(computed) < len(values):
        return next(value for value in values if isinstance(value, EngineFault))
    added: dict[str, Any] = {column: np.concatenate(computed)}
    if version is not None:
        recorded = group.metadata.get(column, {}) | {"policy_version": version}
        added["metadata"] = group.metadata | {column: recorded}
    return msgspec.structs.replace(group, **added)


def _rollouts(group: Group) -> list[Rollout]:
    prompts = np.split(group.prompt_ids, np.cumsum(group.prompt_lengths)[:-1])
    ends = np.cumsum(group.completion_lengths)[:-1]
    completions, sampled = np.split(group.completion_ids, ends), np.split(group.completion_mask, ends)
    return [Rollout(*columns) for columns in zip(prompts, completions, sampled, strict=True)]
