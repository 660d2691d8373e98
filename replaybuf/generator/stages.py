"""Stages between reward and append that add a column to a group: reference or teacher logprobs.

Each stage computes in micro-batches of its own size over many groups; `replaybuf.aggregation` joins the sizes. Groups
leave whole, in the order in which they came.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from replaybuf.aggregation import Aggregator, Window, chunks
from replaybuf.group import Float32s, Group, Int32s


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One rollout as a stage sees it: `prompt_ids` int32 [P], `completion_ids` int32 [C]."""

    prompt_ids: Int32s
    completion_ids: Int32s


class Stage(Protocol):
    """Computes one value per completion token, in nats, for the column it names."""

    column: Literal["ref_logprobs", "teacher_logprobs"]
    micro_batch: int
    """Rollouts per call."""

    async def compute(self, rollouts: Sequence[Rollout]) -> Sequence[Float32s]:
        """Return float32 [C] for each rollout. Raises `EngineFault` where it cannot."""


class Stages:
    """Runs stages over groups as whole windows fill.

    A group waits here until a window is full: whoever adds the last one must `flush`, or it stays.
    """

    def __init__(self, stages: Sequence[Stage], group_size: int) -> None:
        self._stages = tuple(stages)
        self._aggregator: Aggregator[Rollout] = Aggregator([group_size, *(stage.micro_batch for stage in stages)])
        self._groups: list[Group] = []

    def add(self, group: Group) -> tuple[list[Group], Window[Rollout]] | None:
        """Take in one group; return what is to be completed now, for `complete`."""
        self._groups.append(group)
        return self._taken(self._aggregator.add(_rollouts(group)))

    def flush(self) -> tuple[list[Group], Window[Rollout]] | None:
        """Return what is held, for `complete`; None where there is nothing."""
        return self._taken(self._aggregator.flush())

    async def complete(self, groups: Sequence[Group], window: Window[Rollout]) -> list[Group]:
        """Compute every stage's column. Raises what a stage raises, `Invalid` where one returns another number."""
        columns: dict[str, list[Float32s]] = {}
        for stage in self._stages:
            results = [r for chunk in chunks(window.samples, stage.micro_batch) for r in await stage.compute(chunk)]
            columns[stage.column] = [np.concatenate(parts) for parts in window.split(results)]
        added: list[dict[str, Any]] = [
            {name: values[i] for name, values in columns.items()} for i in range(len(groups))
        ]
        return [msgspec.structs.replace(group, **values) for group, values in zip(groups, added, strict=True)]

    def _taken(self, window: Window[Rollout] | None) -> tuple[list[Group], Window[Rollout]] | None:
        if window is None:
            return None
        groups, self._groups = self._groups, []
        return groups, window


def _rollouts(group: Group) -> list[Rollout]:
    prompts = np.split(group.prompt_ids, np.cumsum(group.prompt_lengths)[:-1])
    completions = np.split(group.completion_ids, np.cumsum(group.completion_lengths)[:-1])
    return [Rollout(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
