"""Terminal output: one line redrawn in a terminal, new lines elsewhere; bars only for work that takes a while."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from replaybuf.launch import view as views
from replaybuf.launch.progress import Progress
from replaybuf.launch.view import TRAINING, View, clock, summary, work_bar

ESCAPE = "\x1b"


def test_without_a_terminal_the_output_is_plain_lines(progress: Progress) -> None:
    """No escape codes, no redrawing, one line for each event and summary, each with its time."""
    out = io.StringIO()
    view = View(Console(file=out, width=60))
    progress.phases.enter(TRAINING)
    with view:
        view.event("service listening on http://127.0.0.1:1")
        view.update(progress)
    lines = out.getvalue().splitlines()
    assert ESCAPE not in out.getvalue()
    assert len(lines) == 2
    assert re.fullmatch(r" +0:00  service listening on http://127\.0\.0\.1:1", lines[0])
    assert re.fullmatch(r" +0:00  step 10/10 \| .*", lines[1])


def test_plain_summaries_come_every_five_seconds(progress: Progress, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("replaybuf.launch.view.time.monotonic", lambda: now)
    out = io.StringIO()
    view = View(Console(file=out))
    progress.phases.enter(TRAINING)
    for now in (100.0, 101.0, 104.9, 105.0):  # noqa: B007 - read by the clock above
        view.update(progress)
    assert len(out.getvalue().splitlines()) == 2


def test_plain_lines_name_the_phase_before_the_training() -> None:
    out = io.StringIO()
    progress = Progress(seed=0, total_steps=5)
    progress.phases.enter("warm start")
    progress.note = "step 100, accuracy 0.12"
    View(Console(file=out)).update(progress)
    assert out.getvalue().strip().endswith("warm start: step 100, accuracy 0.12")


def test_a_terminal_gets_the_state_redrawn_in_place(progress: Progress) -> None:
    """It moves the cursor instead of adding lines; only the events stay."""
    out = io.StringIO()
    progress.phases.enter(TRAINING)
    view = View(Console(file=out, force_terminal=True, width=300))
    with view:
        view.update(progress)
        view.event("engine ready")
    assert ESCAPE in out.getvalue()
    assert "step 10/10" in out.getvalue() and "engine ready" in out.getvalue()


def test_the_line_has_all_figures(progress: Progress) -> None:
    assert summary(progress) == (
        "step 10/10 | reward 0.525 | accuracy sampled 62.5%, greedy 85.0% (before: 25.0%, 80.0%) | "
        "staleness mean 0.45, max 1 | buffer 20 groups, 2,500 tokens; stored 350, used 320, dropped 10 | "
        "speed generated 3,000 tok/s, trained 4,000 tok/s | "
        "trainer waited 25% (too_few_groups 20%, fetching 5%) | "
        "generator waited 50% of its 10 reports (rate_limited 50%) | 0:00 left"
    )


def test_a_closed_view_shows_nothing_more(progress: Progress) -> None:
    """The report is printed below the last event."""
    out = io.StringIO()
    view = View(Console(file=out, force_terminal=True, width=100))
    with view:
        view.update(progress)
        view.close()
        shown = len(out.getvalue())
        view.update(progress)
    assert len(out.getvalue()) == shown


def test_missing_values_are_left_out() -> None:
    assert summary(Progress(seed=0, total_steps=5)) == "step 0/5"


def test_durations_read_as_minutes_and_seconds() -> None:
    assert [clock(seconds) for seconds in (0, 59.6, 125, -3)] == ["0:00", "1:00", "2:05", "0:00"]


def test_a_run_without_an_end_shows_its_step_alone_and_why_it_waits() -> None:
    """Without metrics of the trainer, step and reason are those of the run's state."""
    progress = Progress(total_steps=None)
    waiting = {"reason": "no_groups", "blocked_on": "producers"}
    counts = {"stored": 0, "live": 0, "in_batches": 0, "retired": 0, "dead_lettered": 0, "evicted": {}, "rejected": {}}
    progress.state = {"step": 7, "waiting": waiting, "groups": counts, "tokens": {"live": 0}}
    progress.phases.enter(TRAINING)
    line = summary(progress)
    assert line.startswith("step 7 | buffer 0 groups, 0 tokens") and "accuracy" not in line
    assert "now: no_groups, blocked on producers" in line


def work_shown(*, terminal: bool) -> str:
    """Do some work with a bar; return what is written."""
    written = io.StringIO()
    with work_bar("counting sheep", Console(file=written, force_terminal=terminal, width=80)) as report:
        for done in range(1, 4):
            report(done, 3)
    return written.getvalue()


def test_work_that_takes_a_while_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "QUICK_S", 0.0)
    assert "counting sheep" in work_shown(terminal=True) and "100%" in work_shown(terminal=True)


def test_quick_work_and_files_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs and pipes stay free of escape codes."""
    monkeypatch.setattr(views, "QUICK_S", 3600.0)
    assert not work_shown(terminal=True)
    monkeypatch.setattr(views, "QUICK_S", 0.0)
    assert not work_shown(terminal=False).strip()
