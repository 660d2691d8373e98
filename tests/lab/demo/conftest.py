"""A recorded demo of ten steps, as view and report see it."""

from __future__ import annotations

from typing import Any

import pytest

from replaybuf.lab.demo.report import Report, Session, build_report
from replaybuf.launch.progress import Progress
from tests.launch.recorded import recorded_progress

HYPERPARAMETERS: dict[str, dict[str, Any]] = {
    "run": {"strategy": "one-step-off-policy", "max_staleness": 1},
    "trainer": {"learning_rate": 1e-4},
}


@pytest.fixture
def progress() -> Progress:
    """The recorded progress of ten steps."""
    return recorded_progress()


@pytest.fixture
def sessions() -> list[Session]:
    """Two starts: the first was stopped, the second went to the end."""
    return [
        Session(
            started=1.0,
            phases={"warm start": 15.0, "training": 4.0},
            peaks={"serve": 90_000_000},
            cpu_s={"serve": 2.0},
            outcome="stopped by Ctrl-C",
        ),
        Session(
            started=2.0,
            phases={"training": 6.0},
            peaks={"serve": 80_000_000, "train": 500_000_000},
            cpu_s={"serve": 3.0, "train": 8.5},
            outcome="finished",
        ),
    ]


@pytest.fixture
def report(progress: Progress, sessions: list[Session]) -> Report:
    """The report of that demo."""
    return build_report(progress, sessions, HYPERPARAMETERS)
