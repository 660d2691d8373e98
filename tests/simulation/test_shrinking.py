"""A failing schedule is shrunk to the faults that it needs."""

from __future__ import annotations

from tests.simulation.coverage import Reached
from tests.simulation.plan import Plan
from tests.simulation.release import release
from tests.simulation.schedule import Outcome
from tests.simulation.shrinking import Shrinker

NEEDED = {3, 17}


def run(plan: Plan) -> Outcome:
    """Fail while both needed faults happen, and the fault phase includes the later one."""
    numbers = range(24) if plan.only is None else plan.only
    length_s = 10.0 if plan.faults_s is None else plan.faults_s
    faults = {number: (0.1 * number, "kill") for number in numbers if 0.1 * number < length_s}
    return Outcome(plan, ["a violation"] if faults.keys() >= NEEDED else [], [], faults, Reached())


def test_only_the_faults_that_a_failure_needs_are_left() -> None:
    """Nobody understands a failure with 24 faults."""
    shortest = Shrinker(run(Plan(1)), run).shrink()
    assert shortest.faults.keys() == NEEDED
    assert shortest.plan.command == f"make simulate-faults SEED=1 ARGS='--release {release()} --only 3,17 --faults-s 2'"
