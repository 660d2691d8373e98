"""Stages add columns to whole groups, each in micro-batches of its own size."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from replaybuf.errors import EngineAway, EngineFault, EngineUnfit
from replaybuf.generator.fleet import ServerStatus
from replaybuf.generator.stage.aggregation import Window
from replaybuf.generator.stage.stages import Computed, Rollout, Stage, Stages, rollouts_of, with_columns
from replaybuf.wire.group import Float32s, Group, Int32s
from replaybuf.wire.group_check import GroupLimits, check_group
from tests import builders


class Sums:
    """Stage: minus the sum of a rollout's completion ids, for each of its tokens; remembers its micro-batches.

    Raises `fault` for a micro-batch that holds the token `fails_at`, and in `wait_ready`. Each call uses
    the next of `versions`, then the last one; without versions its weights never change.
    """

    def __init__(
        self,
        column: str,
        micro_batch: int,
        lose: int = 0,
        fault: EngineFault | None = None,
        fails_at: int | None = None,
        versions: Sequence[int] = (),
    ) -> None:
        self.column = column
        self.micro_batch: int | None = micro_batch
        self.lose = lose
        self.fault = fault
        self.fails_at = fails_at
        self.versions = deque(versions)
        self.seen: list[int] = []
        self.least_versions: list[int] = []
        self.published: list[int] = []
        self.began: Callable[[str], None] = lambda column: None
        self.values_of: Callable[[Rollout], Float32s | Int32s] = lambda rollout: np.full(
            len(rollout.completion_ids), -rollout.completion_ids.sum(), np.float32
        )

    @property
    def waiting(self) -> str | None:
        return None if self.fault is None else self.fault.reason

    def learn_published(self, version: int) -> None:
        self.published.append(version)

    async def wait_ready(self, timeout_s: float) -> None:
        if self.fault is not None:
            raise self.fault

    def status(self) -> tuple[ServerStatus, ...]:
        return ()

    async def compute(self, rollouts: Sequence[Rollout], least_version: int = 0) -> Computed:
        self.seen.append(len(rollouts))
        self.least_versions.append(least_version)
        self.began(self.column)
        if self.fault is not None and any(self.fails_at in r.completion_ids for r in rollouts):
            raise self.fault
        values = [self.values_of(rollout) for rollout in rollouts]
        version = self.versions.popleft() if len(self.versions) > 1 else next(iter(self.versions), None)
        return Computed(values[self.lose :], version)


def make_group(first: int, version: int = 0) -> Group:
    """Two rollouts of different lengths."""
    return builders.group(
        builders.rollout(completion_ids=[first, first], inference_logprobs=[-1.0, -1.0]),
        builders.rollout(completion_ids=[first + 1], inference_logprobs=[-1.0]),
        policy_version=version,
        metadata={"env": "sums", "old_logprobs": {"model": "policy"}},
    )


def run_all(stages: list[Stage], groups: list[Group]) -> list[Group | EngineFault]:
    async def main() -> list[Group | EngineFault]:
        joined = Stages[Group](stages, group_size=2)
        windows = [*(joined.add(group, rollouts_of(group)) for group in groups), joined.flush()]
        return [done for window in windows if window is not None for done in await complete(joined, window)]

    async def complete(joined: Stages[Group], window: Window[Group, Rollout]) -> list[Group | EngineFault]:
        computed = await joined.compute(window, max(group.policy_version for group in window.groups))
        pairs = zip(window.groups, computed, strict=True)
        return [made if isinstance(made, EngineFault) else with_columns(group, made) for group, made in pairs]

    return asyncio.run(main())


def run_through(stages: list[Stage], groups: list[Group]) -> list[Group]:
    done = run_all(stages, groups)
    assert not [fault for fault in done if isinstance(fault, EngineFault)]
    return [group for group in done if isinstance(group, Group)]


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
        assert check_group(group, GroupLimits()) is None


def test_stages_compute_in_whole_micro_batches_until_the_tail() -> None:
    reference, teacher = Sums("ref_logprobs", 3), Sums("teacher_logprobs", 2)
    run_through([reference, teacher], [make_group(n) for n in range(4)])
    assert reference.seen == [3, 3, 2]
    assert teacher.seen == [2, 2, 2, 2]


def test_a_stage_that_loses_a_rollout_fails_the_groups_of_that_micro_batch() -> None:
    done = run_all([Sums("ref_logprobs", 6, lose=1)], [make_group(n) for n in range(3)])
    faults = [fault for fault in done if isinstance(fault, EngineFault)]
    assert [(fault.reason, fault.value, fault.bound) for fault in faults] == [("ref_bad_values", 5, 6)] * 3


def test_values_of_another_length_than_the_completion_fail_the_group() -> None:
    short = Sums("ref_logprobs", 2)
    short.values_of = lambda rollout: rollout.completion_ids[:1]
    (fault,) = run_all([short], [make_group(10)])
    assert isinstance(fault, EngineFault) and fault.reason == "ref_bad_values"
    assert (fault.value, fault.bound) == ((1,), (2,)), "of the first rollout"


def test_a_failed_micro_batch_costs_only_its_groups() -> None:
    fault = EngineAway("engine_timeout", "engine http://e gave no answer within 5 s", name="engine", value="http://e")
    reference = Sums("ref_logprobs", 3, fault=fault, fails_at=20)
    teacher = Sums("teacher_logprobs", 2)
    done = run_all([reference, teacher], [make_group(n) for n in (10, 20, 30, 40)])
    # Micro-batches of the reference, by group: 10 10 20 | 20 30 30 | 40 40; the first fails.
    reasons = [outcome.reason if isinstance(outcome, EngineFault) else "whole" for outcome in done]
    assert reasons == ["ref_engine_timeout", "ref_engine_timeout", "whole", "whole"]
    assert isinstance(done[0], EngineFault)
    assert (done[0].detail, done[0].value) == (fault.detail, "http://e")


def test_tokens_that_were_not_sampled_get_no_logprobs() -> None:
    tool = builders.group(
        builders.rollout(completion_ids=[5, 6, 7], completion_mask=[1, 0, 1], inference_logprobs=[-1.0, 0.0, -1.0]),
        builders.rollout(completion_ids=[8], inference_logprobs=[-1.0]),
    )
    (done,) = run_through([Sums("ref_logprobs", 1)], [tool])
    assert done.ref_logprobs is not None
    assert done.ref_logprobs.tolist() == [-18.0, 0.0, -18.0, -8.0]


def test_an_unfit_engine_is_not_a_fault_of_groups() -> None:
    unfit = Sums("ref_logprobs", 2, fault=EngineUnfit("engine_unfit", "another model"), fails_at=10)
    with pytest.raises(BaseExceptionGroup) as caught:
        run_all([unfit], [make_group(10)])
    assert isinstance(caught.value.exceptions[0], EngineUnfit)


async def test_waiting_names_the_stage_that_cannot_compute() -> None:
    teacher = Sums("teacher_logprobs", 2, fault=EngineAway("engine_away", "waited 1 s in vain"))
    stages = Stages[Group]([Sums("ref_logprobs", 2), teacher], group_size=2)
    with pytest.raises(EngineAway):
        await stages.wait_ready(1.0)
    assert stages.waiting == "teacher_engine_away"
    teacher.fault = None
    await stages.wait_ready(1.0)
    assert stages.waiting is None


def test_every_stage_uses_its_own_micro_batches() -> None:
    reference, teacher = Sums("ref_logprobs", 3), Sums("teacher_logprobs", 2)
    old = Sums("old_logprobs", 4, versions=[7])
    order: list[str] = []
    for stage in (reference, old, teacher):
        stage.began = order.append
    done = run_through([reference, old, teacher], [make_group(n) for n in range(6)])  # lcm(2, 3, 4, 2) = 12
    assert order == ["ref_logprobs"] * 4 + ["old_logprobs"] * 3 + ["teacher_logprobs"] * 6
    assert (reference.seen, old.seen, teacher.seen) == ([3] * 4, [4] * 3, [2] * 6)
    for group in done:
        assert group.old_logprobs is not None and group.ref_logprobs is not None
        assert group.old_logprobs.tolist() == group.ref_logprobs.tolist()


def test_the_metadata_hold_the_version_of_a_column() -> None:
    (done,) = run_through([Sums("ref_logprobs", 2), Sums("old_logprobs", 2, versions=[7])], [make_group(10)])
    assert done.metadata == {"env": "sums", "old_logprobs": {"model": "policy", "policy_version": 7}}


def test_the_least_version_is_the_newest_of_the_groups() -> None:
    old = Sums("old_logprobs", 4, versions=[7])
    run_through([old], [make_group(10, 5), make_group(20, 6), make_group(30, 4)])
    assert old.least_versions == [6, 4]


def test_micro_batches_of_an_older_version_are_repeated() -> None:
    """Otherwise a group of two micro-batches would hold logprobs of two versions."""
    old = Sums("old_logprobs", 1, versions=[5, 6, 5, 6, 6])
    done = run_through([old, Sums("teacher_logprobs", 4)], [make_group(10), make_group(20)])
    assert [group.metadata["old_logprobs"]["policy_version"] for group in done] == [6, 6]
    assert old.least_versions == [0] * 4 + [6] * 2, "the two of version 5, by 6 or newer"
    assert all(group.old_logprobs is not None for group in done)


def test_weights_that_keep_changing_cost_the_groups_of_older_versions() -> None:
    old = Sums("old_logprobs", 2, versions=[1, 2, 3, 4])
    done = run_all([old, Sums("teacher_logprobs", 4)], [make_group(10), make_group(20)])
    assert [outcome.reason if isinstance(outcome, EngineFault) else "whole" for outcome in done] == [
        "old_engine_version_changed",
        "whole",
    ]
    assert isinstance(done[0], EngineFault) and (done[0].value, done[0].bound) == (4, 3)
    assert len(old.seen) == 2 + 1 + 1, "each round asks for the older one alone"


def test_every_stage_learns_published_versions() -> None:
    reference, old = Sums("ref_logprobs", 2), Sums("old_logprobs", 2, versions=[7])
    Stages[Group]([reference, old], group_size=2).learn_published(7)
    assert reference.published == old.published == [7]
