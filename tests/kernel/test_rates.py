"""Measured rates: their windows, the trainer's waits, and 0 for unknown rates."""

from __future__ import annotations

import pytest

from replaybuf.kernel.strategy.rates import GROUPS, STEPS, MeasuredRates, Rates


def trained(steps: int, step_s: float = 10.0, waited_s: float = 0.0) -> Rates:
    """Ack `steps` steps of `step_s` seconds, of which the trainer waited `waited_s`."""
    rates = Rates(0.0)
    for n in range(steps):
        rates.record_ack(n * step_s, waited_s=n * waited_s, stored=4 * n, too_stale=n)
    return rates


def test_all_rates_are_unknown_before_the_second_ack() -> None:
    """The first ack has no earlier ack to measure from."""
    assert Rates(5.0).measure(5.0) == MeasuredRates()
    assert trained(1).measure(3.0) == MeasuredRates()


def test_groups_are_counted_over_the_last_minute() -> None:
    """In a run younger than a minute the rate covers the time since its start."""
    rates = Rates(0.0)
    rates.record_stored(1.0, 30)
    assert rates.measure(10.0).groups_per_s == 3.0
    rates.record_stored(100.0, 6)
    assert rates.measure(100.0).groups_per_s == 0.1
    assert rates.measure(161.0).groups_per_s == 0.0


def test_the_time_of_a_step_excludes_the_waits_of_the_trainer() -> None:
    """A step of 10 s with a wait of 4 s is 6 s of work."""
    measured = trained(5, 10.0, 4.0).measure(40.0)
    assert (measured.step_s, measured.waited, measured.steps_per_s) == (6.0, 0.4, 0.1)
    assert measured.too_stale == 0.25


def test_steps_per_second_fall_while_no_step_is_acked() -> None:
    assert trained(3).measure(200.0).steps_per_s == pytest.approx(0.01)


def test_rates_of_steps_cover_only_the_last_16_steps() -> None:
    rates = trained(5, 1.0)
    for n in range(STEPS + 1):
        rates.record_ack(100.0 + 50.0 * n, waited_s=0.0, stored=100, too_stale=4)
    measured = rates.measure(100.0 + 50.0 * STEPS)
    assert (measured.step_s, measured.too_stale) == (50.0, 0.0)


def test_the_time_between_two_trainers_belongs_to_no_step() -> None:
    rates = trained(5)
    rates.forget_steps()
    rates.record_ack(1000.0, waited_s=0.0, stored=0, too_stale=0)
    assert rates.measure(1000.0).step_s == 0.0
    rates.record_ack(1020.0, waited_s=0.0, stored=0, too_stale=0)
    assert rates.measure(1020.0).step_s == 20.0


def test_totals_that_fall_give_no_negative_rates() -> None:
    """A rewind undoes evictions, and a clock may be set back."""
    rates = Rates(0.0)
    rates.record_ack(10.0, waited_s=5.0, stored=10, too_stale=5)
    rates.record_ack(9.0, waited_s=4.0, stored=10, too_stale=3)
    measured = rates.measure(9.0)
    assert measured.waited == measured.too_stale == 0.0 and measured.step_s >= 0.0


def test_the_time_of_a_group_is_the_mean_of_the_last_256_groups() -> None:
    rates = Rates(0.0)
    rates.record_durations([1000.0] * 10)
    rates.record_durations([2.0, 4.0] * (GROUPS // 2))
    assert rates.measure(0.0).group_s == 3.0
