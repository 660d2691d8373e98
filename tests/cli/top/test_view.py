"""What `top` draws: the columns that fit, the flow of a run, an outage, names that want to be commands."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from replaybuf.cli.top.poller import Frame
from replaybuf.cli.top.screen import Screen
from replaybuf.cli.top.texts import age, count
from replaybuf.cli.top.view import draw
from replaybuf.wire.contract import MissingClient, ProducerStatus
from replaybuf.wire.wait_reasons import REASONS
from tests.builders import waiting_answer
from tests.cli.top.rows import flow, overview, row

URL = "http://127.0.0.1:8900"
EVIL = "\x1b[2J[red]evil"


def drawn(frame: Frame, width: int, screen: Screen | None = None, *, height: int = 24, now_s: float = 100.0) -> str:
    """Return the text of a frame."""
    written = io.StringIO()
    console = Console(file=written, width=width, height=height, force_terminal=True, color_system=None)
    console.print(draw(frame, screen or Screen(frame.run), console, URL, now_s))
    return written.getvalue()


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 200])
def test_no_line_is_longer_than_the_terminal_is_wide(width: int) -> None:
    """The name of the run stays; the less important columns go first."""
    waits = waiting_answer("too_few_groups", "producers")
    rows = [row("a" * 60, waiting=waits), row("toy", state="paused", paused_reason="operator")]
    shown = drawn(overview(*rows), width)
    assert max(map(len, shown.splitlines())) <= width
    assert "toy" in shown and ("paused" in shown or width < 40)
    assert max(map(len, drawn(flow(rows[0]), width).splitlines())) <= width


@pytest.mark.parametrize("width", [80, 110])
@pytest.mark.parametrize("reason", REASONS)
def test_a_narrow_list_keeps_reason_producers_and_staleness(reason: str, width: int) -> None:
    """Also with the longest name that the list shows."""
    waits = waiting_answer(reason, "producers")
    shown = drawn(overview(row("a" * 40, waiting=waits, producers_gone=1, staleness=12.5)), width)
    for text in ("producers", "stale", reason, "8 -1 0.4s", "12.5"):
        assert text in shown, text


def test_a_wide_list_shows_every_figure() -> None:
    waits = waiting_answer("too_few_groups", "producers")
    shown = drawn(overview(row("toy", waiting=waits, producers_gone=1, idle_s=190.0, stands_still=True)), 200)
    for text in ("12/100", "stalled", "12.3k", "0.600", "too_few_groups", "<- producers", "8 -1 0.4s", "1.0s", "3m"):
        assert text in shown, text


def test_a_thousand_runs_show_those_around_the_selected_one() -> None:
    """The screen is as long as the terminal is high, and says how many runs it leaves out."""
    frame = overview(*(row(f"run-{n:04}") for n in range(1000)))
    shown = drawn(frame, 100, Screen(selected="run-0500"))
    assert "run-0500" in shown and "run-0001" not in shown
    assert len(shown.splitlines()) <= 24 and "982 more runs" in shown


def test_the_flow_marks_the_stage_that_everything_waits_for() -> None:
    waits = waiting_answer(
        "too_few_groups", "producers", detail="slow", missing=[MissingClient(name="host-3", last_seen_s=70.0)]
    )
    shown = drawn(flow(row("toy", waiting=waits, producers_gone=1)), 120)
    (marked,) = (line for line in shown.splitlines() if line.startswith(">"))
    assert "producers" in marked and "1 gone" in marked
    for text in (
        "24 out",
        "v11",
        "20 live, 64 in batches",
        "ack never",
        "11 published",
        "host-3 was last seen 70s ago",
    ):
        assert text in shown, text
    assert "no batch and no ack for 2.0s" in shown and "waited so far: no_groups 12s" in shown


def test_producers_that_are_gone_come_first() -> None:
    each = [
        ProducerStatus(name=f"host-{n}", last_seen_s=1.0, tickets_out=2, groups_per_min=3.0, faults=0, gone=n == 29)
        for n in range(30)
    ]
    shown = drawn(flow(row("toy"), producers=each), 120)
    assert "host-29" in shown and "10 more producers" in shown


def test_an_outage_is_named_with_its_age_above_the_last_state() -> None:
    shown = drawn(overview(row("toy"), error="no answer from there", failing_s=97.0), 120, now_s=105.0)
    assert "no answer from there (for 8.0s); shown is the state of 5.0s ago" in shown and "toy" in shown
    assert "no answer" in drawn(Frame(error="no answer", failing_s=99.0), 80)


def test_names_and_texts_of_users_cannot_change_the_terminal() -> None:
    waits = waiting_answer(
        "too_few_groups", "producers", detail=EVIL, missing=[MissingClient(name=EVIL, last_seen_s=1.0)]
    )
    evil = row(EVIL, waiting=waits, alarm=EVIL, paused_reason=EVIL, strategy=EVIL)
    producer = ProducerStatus(
        name=EVIL, last_seen_s=1.0, tickets_out=0, groups_per_min=0.0, faults=0, held_back_by=EVIL
    )
    for frame in (overview(evil, error=EVIL), flow(evil, producers=[producer])):
        shown = drawn(frame, 120)
        assert "\x1b[2J" not in shown and "[red]evil" in shown


def test_empty_services_say_what_to_do() -> None:
    assert "replaybuf runs create" in drawn(overview(), 100)
    assert "asking" in drawn(Frame(), 100)


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "never"), (0.44, "0.4s"), (12.3, "12s"), (119, "119s"), (180, "3m"), (9e5, "10d")]
)
def test_ages_have_one_unit(seconds: float | None, text: str) -> None:
    assert age(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.25, "0.25"), (950, "950"), (12_345, "12.3k"), (4.5e6, "4.5M"), (123e9, "123G")]
)
def test_numbers_have_at_most_five_characters(value: float, text: str) -> None:
    assert count(value) == text
