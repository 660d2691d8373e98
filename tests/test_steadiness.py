"""Tests are run again where the machine was held up, and only there."""

from __future__ import annotations

import threading
import time

import pytest

from tests.steadiness import Steadiness, Ticks, was_disturbed

pytest_plugins = ["pytester"]

STAT = "cpu  700 20 300 9000 60 0 50 970 5 5\ncpu0 350 10 150 4500 30 0 25 485 0 0\n"


def test_stolen_time_is_read_from_the_line_of_all_processors() -> None:
    """Time of guests is in the time of users already."""
    assert Ticks.of(STAT) == (970, 700 + 20 + 300 + 9000 + 60 + 50 + 970)


@pytest.mark.parametrize(
    ("latest_s", "stolen", "disturbed"), [(0.1, 0, False), (0.1, 99, False), (0.1, 101, True), (0.6, 0, True)]
)
def test_a_late_sleeper_or_stolen_processors_tell_that_it_was_held_up(
    latest_s: float, stolen: int, disturbed: bool
) -> None:
    assert was_disturbed(latest_s, Ticks(5, 1000), Ticks(5 + stolen, 2000)) == disturbed


def test_what_was_before_is_forgotten() -> None:
    """Each test answers for its own time."""
    steadiness = Steadiness()
    steadiness.begin()
    steadiness.latest_s = 9.0
    assert steadiness.disturbed()
    steadiness.begin()
    assert steadiness.latest_s < 9.0


def test_clocks_that_a_test_replaced_are_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float] = []
    monkeypatch.setattr(time, "sleep", calls.append)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    steadiness = Steadiness()
    steadiness.begin()
    for _ in range(1000):
        if steadiness.latest_s > 0:
            break
        threading.Event().wait(0.01)
    assert steadiness.latest_s > 0
    assert calls == []


@pytest.mark.parametrize(("disturbed", "outcomes"), [(True, {"passed": 1, "rerun": 1}), (False, {"failed": 1})])
def test_a_failed_test_is_run_again_where_the_machine_was_held_up_alone(
    pytester: pytest.Pytester, disturbed: bool, outcomes: dict[str, int]
) -> None:
    """By the hooks of tests/conftest.py: a steady machine gives no second try."""
    pytester.makeconftest(
        f"""
        import pytest
        from tests.conftest import run_again_where_disturbed

        def pytest_collection_modifyitems(items):
            run_again_where_disturbed(items, lambda: {disturbed})
        """
    )
    pytester.makepyfile("tries = []\ndef test_it():\n    tries.append(1)\n    assert len(tries) == 2")
    assert pytester.runpytest("-p", "no:cacheprovider").parseoutcomes() == outcomes
