"""Figures of a chaos run: takeovers, and the conditions of a failed run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.checker import Violation
from tests.chaos.history import AnyEvent, Faulted, Healed, TicketsTaken, TrainerWrote
from tests.chaos.report import build

LEADER, STANDBY = "http://a", "http://b"


def fault(at_s: float, **fields: Any) -> Faulted:
    """A kill of the leader of run r."""
    values = {"process": "serve-1", "role": "leader", "kind": "kill", "server": LEADER, "led": ["r"]} | fields
    return Faulted(at_s=at_s, **values)


def ack(server: str, sent_s: float, at_s: float, outcome: str = "ok", run: str = "r") -> TrainerWrote:
    """A write."""
    fields: dict[str, Any] = {"server": server, "sent_s": sent_s, "at_s": at_s, "outcome": outcome, "run": run}
    return TrainerWrote(kind="ack", epoch=1, value=0, **fields)


@pytest.mark.parametrize(
    ("events", "takeovers_s"),
    [
        ([fault(10.0), ack(LEADER, 9.9, 10.1), ack(STANDBY, 10.5, 13.0), ack(STANDBY, 13.0, 13.1)], [3.0]),
        ([fault(10.0), ack(STANDBY, 10.5, 11.0, "not-leader"), ack(STANDBY, 11.0, 13.5)], [3.5]),
        ([fault(10.0), ack(LEADER, 11.0, 12.0), ack(STANDBY, 13.0, 14.0)], []),
        ([fault(10.0), ack(STANDBY, 10.5, 13.0, run="other")], []),
        ([fault(10.0, led=[]), ack(STANDBY, 10.5, 13.0)], []),
        ([fault(10.0), TicketsTaken(run="r", server=STANDBY, sent_s=11.0, at_s=12.5)], [2.5]),
    ],
    ids=[
        "the first write elsewhere",
        "an error is no write",
        "the leader came back",
        "of another run",
        "a standby",
        "tickets",
    ],
)
def test_a_takeover_is_the_time_to_the_first_write_that_another_server_answers(
    events: list[AnyEvent], takeovers_s: list[float]
) -> None:
    """Asked after the fault, and answered with success."""
    assert build(events, [], [], seed=0, wall_s=1.0).takeovers_s == takeovers_s


@pytest.mark.parametrize(("process", "disturbed"), [("serve-2", True), ("valkey", True), ("serve-1", False)])
def test_a_takeover_while_others_are_hurt_is_counted_apart(process: str, disturbed: bool) -> None:
    """It measures their recovery as well."""
    events: list[AnyEvent] = [
        fault(8.0, process=process, role="standby", led=[]),
        Healed(at_s=9.0, process=process),
        fault(10.0),
        ack(STANDBY, 10.5, 13.0),
    ]
    report = build(events, [], [], seed=0, wall_s=1.0)
    assert (report.takeovers_s, report.disturbed_takeovers_s) == (([], [3.0]) if disturbed else ([3.0], []))


def test_faults_are_counted_by_process_and_kind() -> None:
    """Kills and stops apart."""
    events: list[AnyEvent] = [fault(1.0), fault(2.0, kind="stop"), fault(3.0), fault(4.0, role="trainer")]
    assert build(events, [], [], seed=0, wall_s=1.0).kills == {"leader": {"kill": 2, "stop": 1}, "trainer": {"kill": 1}}


def test_a_run_is_good_where_nothing_was_violated_and_nobody_ended_by_itself() -> None:
    """The exit code says so."""
    assert build([], [], [], seed=0, wall_s=1.0).good
    assert not build([], [Violation(1, "r", "lost")], [], seed=0, wall_s=1.0).good
    assert not build([], [], ["serve-1 with 1"], seed=0, wall_s=1.0).good
    assert not build([], [], [], seed=0, wall_s=1.0, wanted=1).good, "time was up before the faults were done"
