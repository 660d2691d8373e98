"""One or several stages, each of which adds a column to groups: in the generator, or in `replaybuf stage`.

Columns are those of the reference, of the old policy, of a teacher, or of a function. Each stage computes in
micro-batches of its own size over many groups; `aggregation` reconciles the sizes. Groups leave whole and in order. A
group with a failed micro-batch leaves as that fault. If weights change meanwhile, one version computes all groups of a
window.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import msgspec
import numpy as np

from replaybuf.errors import EngineFault, EngineUnfit
from replaybuf.generator.fleet import TRIES, ServerStatus
from replaybuf.generator.stage.aggregation import Aggregator, Window
from replaybuf.wire.answer.browse import StoredGroup
from replaybuf.wire.group import Bools, Group, Int32s
from replaybuf.wire.late_columns import is_per_token

G = TypeVar("G")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One rollout for a stage: `prompt_ids` int32 [P], `completion_ids` int32 [C], `sampled` bool [C].

    Values of tokens that were not sampled are replaced by 0. `group`: its stored group, for functions.
    """

    prompt_ids: Int32s
    completion_ids: Int32s
    sampled: Bools
    group: StoredGroup | None = None

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def token_ids(self) -> Int32s:
        """Prompt and completion, int32 [P + C]."""
        return np.concatenate([self.prompt_ids, self.completion_ids])


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """Values of a stage for rollouts: float32 [C] of each, in nats; of a column without values per token one number.

    `policy_version`: of the weights that computed all of them; None if the weights never change.
    """

    values: Sequence[Any]
    policy_version: int | None = None


class Stage(Protocol):
    """Computes its column: a value per completion token, or one per rollout. The defaults are those without servers."""

    column: str
    micro_batch: int | None
    """Rollouts per call; None = those of one group."""

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


Columns: TypeAlias = dict[str, Computed]
"""Columns of one group, by name."""


class Stages(Aggregator[G, Rollout]):
    """Runs stages over groups as windows fill; `G` is what the caller knows a group by."""

    def __init__(self, stages: Sequence[Stage], group_size: int = 1) -> None:
        super().__init__([group_size, *(stage.micro_batch or 1 for stage in stages)])
        self._stages = tuple(stages)

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

    async def compute(self, window: Window[G, Rollout], least_version: int = 0) -> list[Columns | EngineFault]:
        """Compute every stage's column for each group; a group with a failed micro-batch becomes that fault.

        The reason of a fault starts with the stage: `ref_engine_timeout`. Raises, in an exception group, `EngineUnfit`
        if only an operator can help, and what a stage raises that is not an `EngineFault`.
        """
        groups: list[Columns | EngineFault] = [{} for _ in window.groups]
        for stage in self._stages:
            micro_batches = window.micro_batches(stage.micro_batch)
            values, version = await _compute_by_one_version(stage, micro_batches, least_version)
            of_groups = window.split(values)
            groups = [_with_column(*pair, stage.column, version) for pair in zip(groups, of_groups, strict=True)]
        return groups


def with_columns(group: Group, columns: Columns) -> Group:
    """Return the group with logprobs of stages, and the versions that computed them in its metadata."""
    versions = {name: column.policy_version for name, column in columns.items() if column.policy_version is not None}
    records = {name: group.metadata.get(name, {}) | {"policy_version": version} for name, version in versions.items()}
    fields: dict[str, Any] = {name: np.concatenate(column.values) for name, column in columns.items()}
    return msgspec.structs.replace(group, **fields, metadata=group.metadata | records)


def count_tokens(rollouts: Sequence[Rollout]) -> int:
    """Return the tokens of rollouts, with their prompts."""
    return sum(len(rollout) for rollout in rollouts)


def stage_name(column: str) -> str:
    """Return the prefix of a stage's options and fault reasons, such as `ref`."""
    return column.removesuffix("_logprobs")


_Value: TypeAlias = Any | EngineFault
"""Value of one rollout, or the fault of its micro-batch."""


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
            computing = {at: tasks.create_task(_compute(stage, micro_batches[at], least_version)) for at in late}
        parts |= {at: task.result() for at, task in computing.items()}
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
    return [np.where(rollout.sampled, values, np.float32(0)) if np.ndim(values) else values for rollout, values in rows]


async def _compute(stage: Stage, rollouts: Sequence[Rollout], least_version: int) -> Computed | EngineFault:
    try:
        computed = await stage.compute(rollouts, least_version)
        _check_shapes(stage.column, computed.values, rollouts)
    except EngineUnfit:
        raise
    except EngineFault as error:
        return _fault_of(stage, error)
    return computed


def _check_shapes(column: str, values: Sequence[Any], rollouts: Sequence[Rollout]) -> None:
    if len(values) != len(rollouts):
        detail = f"the stage of {column} returned values of {len(values)} rollouts; it got {len(rollouts)}"
        raise EngineFault("bad_values", detail, name=column, value=len(values), bound=len(rollouts))
    for number, (returned, rollout) in enumerate(zip(values, rollouts, strict=True)):
        shape, needed = np.shape(returned), (len(rollout.completion_ids),) if is_per_token(column) else ()
        if shape != needed:
            unit = "one value per completion token" if is_per_token(column) else "one number"
            detail = f"the stage of {column} returned the shape {shape} for rollout {number}; needed: {needed}, {unit}"
            raise EngineFault("bad_values", detail, name=column, value=shape, bound=needed)


def _fault_of(stage: Stage, error: EngineFault) -> EngineFault:
    reason = f"{stage_name(stage.column)}_{error.reason}"
    fault = EngineFault(reason, error.detail, name=error.name, value=error.value, bound=error.bound)
    fault.__cause__ = error.__cause__  # the traceback of user code is shown to people
    return fault


def _with_column(
    group: Columns | EngineFault, values: Sequence[_Value], column: str, version: int | None
) -> Columns | EngineFault:
    fault = next((value for value in values if isinstance(value, EngineFault)), None)
    if isinstance(group, EngineFault):
        return group
    return fault or group | {column: Computed(values, version)}


def rollouts_of(group: Group) -> list[Rollout]:
    """Split a group into its rollouts."""
    prompts = np.split(group.prompt_ids, np.cumsum(group.prompt_lengths)[:-1])
    ends = np.cumsum(group.completion_lengths)[:-1]
    completions, sampled = np.split(group.completion_ids, ends), np.split(group.completion_mask, ends)
    return [Rollout(*columns) for columns in zip(prompts, completions, sampled, strict=True)]
