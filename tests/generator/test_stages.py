"""Stages add columns to whole groups, each in micro-batches of its own size."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

import numpy as np
import pytest

from replaybuf.errors import Invalid
from replaybuf.generator.stages import Rollout, Stage, Stages
from replaybuf.group import Admissible, Float32s, Group, check_group
from tests import builders


class Sums:
    """Stage: minus the sum of a rollout's completion ids, for each of its tokens; remembers its micro-batches."""

    column: Literal["ref_logprobs", "teacher_logprobs"]

    def __init__(self, column: Literal["ref_logprobs", "teacher_logprobs"], micro_batch: int, lose: int = 0) -> None:
        self.column = column
        self.micro_batch = micro_batch
        self.lose = lose
        self.seen: list[int] = []

    async def compute(self, rollouts: Sequence[Rollout]) -> Sequence[Float32s]:
        self.seen.append(len(rollouts))
        values = [np.full(len(r.completion_ids), -r.completion_ids.sum(), np.float32) for r in rollouts]
        return values[self.lose :]


def make_group(first: int) -> Group:
    """Two rollouts of different lengths."""
    return builders.group(
        builders.rollout(completion_ids=[first, first], inference_logprobs=[-1.0, -1.0]),
        builders.rollout(completion_ids=[first + 1], inference_logprobs=[-1.0]),
    )


def run_through(stages: list[Stage], groups: list[Group]) -> list[Group]:
    async def main() -> list[Group]:
        joined, done = Stages(stages, group_size=2), []
        for group in groups:
            taken = joined.add(group)
            if taken is not None:
                done += await joined.complete(*taken)
        tail = joined.flush()
        return done + (await joined.complete(*tail) if tail is not None else [])

    return asyncio.run(main())


def test_every_group_gets_its_own_columns_in_order() -> None:
    done = run_through(
        [Sums("ref_logprobs", 3), Sums("teacher_logprobs", 2)], [make_group(n) for n in (10, 20, 30, 40)]
    )
    assert [group.completion_ids.tolist() for group in done] == [[n, n, n + 1] for n in (10, 20, 30, 40)]
    for group in done:
        assert group.ref_logprobs is not None and group.teacher_logprobs is not None
        first = int(group.completion_ids[0])
        assert group.ref_logprobs.tolist() == [-2.0 * first, -2.0 * first, -(first + 1.0)]
        assert group.teacher_logprobs.tolist() == group.ref_logprobs.tolist()
        assert check_group(group, Admissible()) is None


def test_stages_compute_in_whole_micro_batches_until_the_tail() -> None:
    reference, teacher = Sums("ref_logprobs", 3), Sums("teacher_logprobs", 2)
    run_through([reference, teacher], [make_group(n) for n in range(4)])
    assert reference.seen == [3, 3, 2]
    assert teacher.seen == [2, 2, 2, 2]


def test_a_stage_that_loses_a_rollout_is_refused() -> None:
    with pytest.raises(Invalid, match="returned 5 results for 6 samples"):
        run_through([Sums("ref_logprobs", 6, lose=1)], [make_group(n) for n in range(3)])
