"""Flow control end to end on the virtual clock: exact grants, no backlog to throw away, bounds that hold."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replaybuf.kernel.rows.index import LIVE
from replaybuf.lab.simulate.figures import Figures
from replaybuf.lab.simulate.loop import Simulation, simulate
from replaybuf.lab.simulate.workload import Supply
from replaybuf.wire.config import BatchSpec, Limits, StrategySpec
from tests.lab.simulate.workloads import config, workload

STEPS = 10
BATCH = 4
few = settings(max_examples=20, deadline=None, derandomize=True)


def study(strategy: str, options: dict[str, Any] | None = None, *, steps: int = STEPS, **fields: Any) -> Figures:
    """Simulate a small workload; `fields` of the workload."""
    run = config(strategy, options)
    return simulate(run, Supply(workload(**fields), run, 0), steps)


@given(st.integers(0, 2**32), st.integers(1, 24), st.sampled_from([0.0, 0.3]), st.sampled_from([1, 3]))
@few
def test_on_policy_grants_what_the_version_needs_and_tops_up_what_was_filtered(
    seed: int, slots: int, failure_rate: float, steps_per_publish: int
) -> None:
    """Every group that a filter did not drop is trained; what it dropped, or failed, is generated anew."""
    run = config("on-policy", steps_per_publish=steps_per_publish, filters=[StrategySpec(name="zero-variance")])
    steps = 4 * steps_per_publish
    w = workload(slots=slots, failure_rate=failure_rate, checkpoint_steps=100)
    simulation = Simulation(run, Supply(w, run, seed), steps)
    figures = simulation.simulate()
    assert figures.ended == "steps" and set(figures.staleness) == {0}
    dropped = {reason: waste.groups for reason, waste in figures.waste.items()}
    assert set(dropped) <= {"zero_variance", "failed"}
    state, book = simulation.run.state, simulation.run.book
    begun_for_the_next_version = state.count(LIVE) + book.out
    assert begun_for_the_next_version <= BATCH * steps_per_publish
    assert figures.generated_groups - sum(dropped.values()) == BATCH * steps + state.count(LIVE)


@given(
    st.integers(0, 2**32), st.integers(1, 40), st.integers(0, 3), st.sampled_from([1, 2]), st.booleans(), st.booleans()
)
@few
def test_one_step_off_never_exceeds_its_window_and_wastes_only_late_groups(
    seed: int, slots: int, max_staleness: int, steps_per_publish: int, adaptive: bool, equal: bool
) -> None:
    """live + out <= (m + 1) * steps_per_publish * B; groups that all take less than a step are all trained."""
    options = {"max_staleness": max_staleness, "adaptive": adaptive}
    run = config("one-step-off-policy", options, steps_per_publish=steps_per_publish)
    even = {"length_sigma": 0.0, "group_s": 0.5, "token_s": 0.001} if equal else {}
    simulation = Simulation(run, Supply(workload(slots=slots, **even), run, seed), STEPS)
    window = (max_staleness + 1) * steps_per_publish * BATCH
    simulation._act()
    while simulation.ended is None:
        simulation._advance()
        assert simulation.run.state.count(LIVE) + simulation.run.book.out <= window
    assert simulation.ended == "steps"
    if equal and slots >= BATCH:
        assert not simulation.meter.wasted


@given(
    st.integers(0, 2**32),
    st.integers(1, 32),
    st.sampled_from([("on-policy", {}), ("one-step-off-policy", {"max_staleness": 4}), ("replay", {})]),
    st.sampled_from([1, 8, 800, 3000, 10_000]),
    st.sampled_from([None, 40_000]),
    st.booleans(),
)
@few
def test_limits_on_live_groups_hold_and_never_stop_the_run(
    seed: int, slots: int, strategy: tuple[str, dict[str, Any]], tokens: int, live_bytes: int | None, by_tokens: bool
) -> None:
    """Never above the bound, or above what one batch takes; all steps are trained."""
    batch = BatchSpec(tokens_per_batch=2000 if by_tokens else None, groups_per_batch=None if by_tokens else BATCH)
    tokens = max(tokens, 2000 if by_tokens else 32)
    limits = Limits(max_tokens_live=tokens, max_bytes_live=live_bytes, max_group_bytes=40_000)
    run = config(*strategy, batch=batch, limits=limits)
    supply = Supply(workload(slots=slots), run, seed)
    simulation = Simulation(run, supply, STEPS)
    figures = simulation.simulate()
    assert figures.ended == "steps"
    largest = max(attempt.tokens for attempt in supply._block(0, 1).attempts)
    assert figures.tokens_live_max <= max(tokens, (2000 if by_tokens else BATCH * largest) + largest)


@pytest.mark.parametrize("slots", [4, 8, 24])
def test_adaptive_admission_waits_and_wastes_as_little_as_the_best_fixed_window(slots: int) -> None:
    """Slow, matched and fast producers: least wait and waste of all windows, at less staleness than the widest."""
    fixed = [study("one-step-off-policy", {"max_staleness": k}, steps=40, slots=slots) for k in (1, 2, 6)]
    adaptive = study("one-step-off-policy", {"max_staleness": 6, "adaptive": True}, steps=40, slots=slots)
    assert adaptive.wait_share <= min(each.wait_share for each in fixed) + 0.02
    assert adaptive.waste_share <= min(each.waste_share for each in fixed) + 0.02
    assert adaptive.staleness_mean <= fixed[-1].staleness_mean
