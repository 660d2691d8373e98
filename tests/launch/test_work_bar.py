"""Progress bars: on a terminal alone, and only for work that takes a while."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from replaybuf.launch import work_bar as bars
from replaybuf.launch.work_bar import work_bar


def shown(*, terminal: bool) -> str:
    """Do some work with a bar; return what is written."""
    written = io.StringIO()
    with work_bar("counting sheep", Console(file=written, force_terminal=terminal, width=80)) as report:
        for done in range(1, 4):
            report(done, 3)
    return written.getvalue()


def test_work_that_takes_a_while_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bars, "QUICK_S", 0.0)
    assert "counting sheep" in shown(terminal=True) and "100%" in shown(terminal=True)


def test_quick_work_and_files_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs and pipes stay free of escape codes."""
    monkeypatch.setattr(bars, "QUICK_S", 3600.0)
    assert not shown(terminal=True)
    monkeypatch.setattr(bars, "QUICK_S", 0.0)
    assert not shown(terminal=False).strip()
