"""What CI asks of its short demo: a pipeline that lost its overlap fails, a noisy host does not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from replaybuf.lab.demo.report import Report
from tests.lab.demo.promised import broken_promises

STEPS = 12


def demo_of(report: Report, wait_s: list[float], staleness: list[float]) -> dict[str, Any]:
    """The recorded report with another curve: 1.2 s of work in every step."""
    document: dict[str, Any] = msgspec.to_builtins(report) | {"seed": 0, "steps": STEPS}
    document["curve"] |= {"step": list(range(STEPS)), "wait_s": wait_s, "staleness_mean": staleness}
    return document | {"curve": document["curve"] | {"train_s": [1.0] * STEPS, "publish_s": [0.2] * STEPS}}


def test_a_slow_start_and_a_short_host_stall_pass(report: Report) -> None:
    """30 s for the first groups, then once 4 s without a processor, two batches of which were made too late."""
    demo = demo_of(report, [30.0] + [0.01] * 5 + [4.0] + [0.01] * 5, [0.0] + [1.0] * 5 + [0.0] * 2 + [1.0] * 4)
    assert broken_promises(demo, 0, STEPS) == []


@pytest.mark.parametrize(
    ("wait_s", "staleness", "words"),
    [
        ([0.2, 0.0] + [1.6] * 10, [0.0, 1.0] + [1.0] * 10, "waited 16.0 s of 29.2 s; at most 30%"),
        (
            [0.0] * 12,
            [0.0, 1.0, 0.47, 0.28, 0.31, 0.31, 0.28, 0.31, 0.28, 0.31, 0.3, 0.3],
            "staleness is 0.38; at least 0.75",
        ),
    ],
)
def test_a_pipeline_without_overlap_fails(
    report: Report, wait_s: list[float], staleness: list[float], words: str
) -> None:
    """With the figure and its bound."""
    (message,) = broken_promises(demo_of(report, wait_s, staleness), 0, STEPS)
    assert words in message


def test_a_demo_with_missing_steps_or_accuracies_fails(report: Report) -> None:
    """Steps that are missing, and accuracies that are none."""
    demo = demo_of(report, [0.0] * STEPS, [1.0] * STEPS)
    demo["accuracy"]["greedy"]["after"] = 1.5
    assert len(broken_promises(demo, 0, STEPS + 1)) == 2
