"""Learning-rate schedules."""

from __future__ import annotations

import itertools
import math

import pytest

from replaybuf_trainer.schedules import ScheduleName, learning_rate_factor

STEPS, WARM_UP = 110, 10


def factors(schedule: ScheduleName, steps: int | None = STEPS, warm_up: int = WARM_UP) -> list[float]:
    return [learning_rate_factor(schedule, step, warm_up, steps) for step in range(STEPS)]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_the_rate_rises_linearly_to_its_maximum(schedule: ScheduleName) -> None:
    assert factors(schedule)[: WARM_UP + 1] == pytest.approx([*(n / 10 for n in range(1, 11)), 1.0])
    assert factors(schedule, warm_up=0)[0] == 1.0


def test_constant_needs_no_number_of_steps() -> None:
    assert set(factors("constant", None)[WARM_UP:]) == {1.0}


def test_each_decay_has_its_form() -> None:
    """A hundred steps after the warm-up: at a quarter, half and nine tenths of them."""
    at = (WARM_UP + 25, WARM_UP + 50, WARM_UP + 90)
    linear, cosine, wsd = (factors(name) for name in ("linear", "cosine", "wsd"))
    assert [linear[step] for step in at] == pytest.approx([0.75, 0.5, 0.1])
    assert [cosine[step] for step in at] == pytest.approx([(1 + math.sqrt(0.5)) / 2, 0.5, 0.02447174])
    assert [wsd[step] for step in at] == pytest.approx([1.0, 1.0, 1 - math.sqrt(0.5)])


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_a_decay_never_rises_and_trains_to_the_last_step(schedule: ScheduleName) -> None:
    decay = factors(schedule)[WARM_UP:]
    assert all(later <= earlier for earlier, later in itertools.pairwise(decay))
    assert 0 < decay[-1] < 0.2


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_beyond_the_last_step_and_for_a_short_run_the_factor_is_a_share(schedule: ScheduleName) -> None:
    assert learning_rate_factor(schedule, STEPS + 5, WARM_UP, STEPS) == pytest.approx(0.0, abs=1e-12)
    assert learning_rate_factor(schedule, 3, 10, 2) == pytest.approx(0.4)
