"""Curves over seeds: what is averaged, how sure it is, and what a strategy needs to reach an accuracy."""

from __future__ import annotations

import numpy as np
import pytest

from replaybuf.lab.study.curves import accuracy_at, band, cost_ratio, cost_to_reach, interval


def test_an_interval_is_that_of_students_t() -> None:
    """Three values 1, 2, 3: mean 2, standard error 1 / sqrt(3), and 4.30 of them with two degrees of freedom."""
    estimate = interval([1.0, 2.0, 3.0])
    assert (estimate.mean, estimate.seeds) == (2.0, 3)
    assert estimate.half == pytest.approx(4.30 / 3**0.5)


def test_one_seed_has_no_interval() -> None:
    assert interval([0.5]).half is None
    assert band([[(0.0, 0.2), (10.0, 0.4)]]).low == [None] * 21


def test_seeds_are_averaged_at_the_same_cost_up_to_the_shorter_end() -> None:
    """One rises to 0.6 at cost 20, one to 0.4 at cost 10: at 10 both have 0.4 and the mean has no width."""
    curves = [[(0.0, 0.2), (20.0, 0.6)], [(0.0, 0.2), (10.0, 0.4)]]
    envelope = band(curves, points=3)
    assert envelope.cost == [0.0, 5.0, 10.0]
    assert envelope.mean == pytest.approx([0.2, 0.3, 0.4])
    assert envelope.high == pytest.approx(envelope.mean)


def test_the_cost_to_reach_an_accuracy_is_where_the_curve_crosses_it_first() -> None:
    """Also where it falls again; never is None, and nothing is needed where the start is good enough."""
    curve = [(0.0, 0.2), (10.0, 0.4), (20.0, 0.3), (30.0, 0.5)]
    assert cost_to_reach(curve, 0.3) == pytest.approx(5.0)
    assert cost_to_reach(curve, 0.45) == pytest.approx(27.5)
    assert cost_to_reach(curve, 0.2) == 0.0
    assert cost_to_reach(curve, 0.51) is None
    assert accuracy_at(curve, np.array([5.0, 25.0])).tolist() == pytest.approx([0.3, 0.4])


def test_the_cost_of_the_same_accuracies_is_compared_over_the_whole_curve() -> None:
    """Twice the cost everywhere is 2, also where the reference ends higher or falls in between."""
    reference = [(0.0, 0.2), (10.0, 0.4), (20.0, 0.3), (30.0, 0.5)]
    slow = [(2 * cost, accuracy) for cost, accuracy in reference]
    assert cost_ratio(slow, reference) == pytest.approx(2.0)
    assert cost_ratio(slow[:3], reference) == pytest.approx(2.0)
    assert cost_ratio(reference, slow) == pytest.approx(0.5)


def test_a_curve_that_hardly_rises_has_no_cost_of_the_same_accuracies() -> None:
    """At low accuracies alone the noise of a score would decide: 1 % above the start may cost all tokens or none."""
    reference = [(0.0, 0.2), (10.0, 0.4)]
    assert cost_ratio([(0.0, 0.2), (10.0, 0.1)], reference) is None
    assert cost_ratio([(0.0, 0.2), (40.0, 0.29)], reference) is None
    assert cost_ratio([(0.0, 0.2), (40.0, 0.31)], reference) is not None
    assert cost_ratio(reference, [(0.0, 0.2), (10.0, 0.2)]) is None
    assert cost_ratio([(0.0, 0.2), (0.0, 0.4)], [(0.0, 0.2), (0.0, 0.4)]) is None
