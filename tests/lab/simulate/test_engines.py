"""Engines that slow down under load: when groups end that share them."""

from __future__ import annotations

import pytest

from replaybuf.lab.simulate.engines import Engines


def finish_all(engines: Engines[str]) -> dict[str, float]:
    """Return the ends of all groups."""
    ends: dict[str, float] = {}
    while (next_s := engines.next_end_s()) is not None:
        ends |= {group: end_s for end_s, group in engines.finish(next_s, next_s)}
    return ends


def test_a_group_alone_takes_as_much_less_as_the_load_would_take() -> None:
    """One of four slots: with half of the time due to the load, 1 - 0.5 * 3/4 of it is left."""
    engines = Engines[str](4, 0.5)
    engines.start(10.0, 8.0, "alone")
    assert finish_all(engines) == {"alone": pytest.approx(15.0)}


def test_a_group_that_starts_later_slows_the_others_down() -> None:
    """A fixed speed shared by two slots: alone twice as fast, so 2 of 4 are done when the second one starts."""
    engines = Engines[str](2, 1.0)
    engines.start(0.0, 4.0, "first")
    engines.start(1.0, 4.0, "second")
    assert finish_all(engines) == {"first": pytest.approx(3.0), "second": pytest.approx(4.0)}


def test_without_load_no_group_changes_another() -> None:
    engines = Engines[str](8, 0.0)
    for number in range(8):
        engines.start(float(number), 5.0, str(number))
    assert finish_all(engines) == {str(number): pytest.approx(number + 5.0) for number in range(8)}


def test_groups_that_end_in_a_round_come_in_the_order_of_their_starts() -> None:
    engines = Engines[str](2, 0.0)
    engines.start(0.0, 1.1, "first")
    engines.start(0.0, 0.9, "second")
    assert [group for _, group in engines.finish(1.0, 1.2)] == ["first", "second"]
