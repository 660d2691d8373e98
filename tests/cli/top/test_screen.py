"""Keys of `top`: select, open, sort, end."""

from __future__ import annotations

from replaybuf.cli.top.keyboard import split_keys
from replaybuf.cli.top.screen import Screen
from tests.builders import waiting_answer
from tests.cli.top.rows import row

ROWS = [
    row("busy", tokens_per_s=9.0),
    row("done", state="finished", tokens_per_s=0.0),
    row("slow", waiting=waiting_answer("no_groups", "producers"), tokens_per_s=1.0),
    row("stopped", state="paused", tokens_per_s=2.0),
]


def names(screen: Screen) -> list[str]:
    """Return the runs in the order of the screen."""
    return [row.run for row in screen.shown(ROWS)]


def test_runs_that_need_a_person_come_first() -> None:
    screen = Screen()
    assert names(screen) == ["stopped", "slow", "busy", "done"]
    screen.press("s", ROWS)
    assert names(screen) == ["busy", "done", "slow", "stopped"]
    screen.press("s", ROWS)
    assert names(screen) == ["busy", "stopped", "slow", "done"]
    screen.press("s", ROWS)
    assert screen.order == "attention"


def test_a_run_that_stands_still_comes_before_one_that_waits_as_usual() -> None:
    still = row("still", stands_still=True)
    assert [row.run for row in Screen().shown([*ROWS, still])] == ["still", "stopped", "slow", "busy", "done"]


def test_the_selection_stays_on_its_run() -> None:
    """Whatever the order; at the ends it stops; a run that is gone gives it to the first."""
    screen = Screen()
    for key in ("up", "down", "down"):
        screen.press(key, ROWS)
    assert screen.selected == "busy" and screen.place(ROWS) == 2
    screen.press("s", ROWS)
    assert screen.selected == "busy" and screen.place(ROWS) == 0
    for _ in range(9):
        screen.press("down", ROWS)
    assert screen.selected == "stopped"
    assert screen.place([row for row in ROWS if row.run != "stopped"]) == 0


def test_enter_opens_the_selected_run_and_escape_goes_back() -> None:
    screen = Screen()
    screen.press("enter", [])
    assert (screen.run, screen.selected) == ("", ""), "there is nothing to open"
    screen.press("down", ROWS)
    screen.press("enter", ROWS)
    assert (screen.run, screen.selected) == ("slow", "slow")
    screen.press("down", [])
    screen.press("escape", [])
    assert (screen.run, screen.selected, screen.ended) == ("", "slow", False)
    for unknown in ("x", "?", "\x00"):
        screen.press(unknown, ROWS)
    screen.press("q", ROWS)
    assert screen.ended


def test_keys_that_come_together_are_split() -> None:
    assert split_keys("\x1b[Aj\r\x1b[Bs") == ["up", "down", "enter", "down", "s"]
    assert split_keys("\x1b") == ["escape"] and split_keys("\x03") == ["q"]
