"""The progress line of a terminal, and the summary at the end."""

from __future__ import annotations

import io
import logging
import sys
from typing import Any

import pytest
from rich.console import Console

from replaybuf.wire.contract import Amount, WaitingAnswer
from replaybuf_trainer.report.progress_line import ProgressLine, clock
from replaybuf_trainer.report.session import Session

WAIT = WaitingAnswer(
    reason="too_few_groups", have=Amount(groups=3), need=Amount(groups=8), blocked_on="producers", retry_after_s=0.5
)


def figures(step: int, reward: float, **fields: Any) -> dict[str, Any]:
    """Figures of a step of 2 s, half of it waiting."""
    filled = {"tokens": 1000, "tokens_per_s": 500.0, "mfu": 0.25, "step_s": 2.0, "wait_s": 1.0}
    filled |= {"peak_memory_bytes": 3 * 2**29, "padding_share": 0.0625}
    return {"step": step, "reward_mean": reward, "phase_s": {"wait": 1.0, "backward": 1.0}} | filled | fields


def drawn(session: Session, waiting: WaitingAnswer | None = None, width: int = 160) -> str:
    """Draw the line once, without colours."""
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    line = ProgressLine(console, session, lambda: waiting, lambda: "publish")
    line.close()
    with console.capture() as captured:
        console.print(line.render())
    return captured.get()


def test_the_line_shows_step_reward_speed_waiting_and_the_end() -> None:
    session = Session(10, 40)
    for step in (10, 11):
        session.add(figures(step, reward=0.2 + 0.2 * (step - 10)))
    shown = drawn(session)
    assert shown.startswith("step 12/40 ━")
    assert "reward 0.300 · 500 tok/s · MFU 25.0% · waited 50% · 0:56 left · publish · 1.5 GiB · padding 6%" in shown
    assert "waits for producers: too_few_groups (3/8 groups)" in drawn(session, WAIT)


def test_before_the_first_step_the_line_shows_what_is_missing() -> None:
    """Without a number of steps there is no end to estimate."""
    tokens = WaitingAnswer(
        reason="no_groups", have=Amount(), need=Amount(tokens=65536), blocked_on="producers", retry_after_s=0.5
    )
    shown = drawn(Session(0, None), tokens)
    assert shown.startswith("step 0 ") and "left" not in shown
    assert "waits for producers: no_groups (0/65,536 tokens)" in shown


def test_the_line_fits_a_narrow_terminal() -> None:
    session = Session(0, 40)
    session.add(figures(0, reward=1.0))
    assert [len(line) for line in drawn(session, WAIT, width=60).splitlines()] == [60]


def test_log_messages_scroll_above_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler writes to its own stream again at the end."""
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    handler = logging.StreamHandler(shown)
    logger = logging.getLogger()
    logger.addHandler(handler)
    try:
        line = ProgressLine(
            Console(file=shown, width=80, force_terminal=True, color_system=None),
            Session(0, 1),
            lambda: None,
            lambda: "wait",
        )
        assert handler.stream is not shown
        logging.getLogger("x").warning("a message of <b>[red]any[/red] form")
        line.close()
        assert handler.stream is shown and sys.stderr is shown
    finally:
        logger.removeHandler(handler)
    (message,) = [part for part in shown.getvalue().splitlines() if "message" in part]
    assert message.endswith("a message of <b>[red]any[/red] form")


def test_the_summary_has_phases_as_shares_and_the_change_of_the_reward() -> None:
    session = Session(10, None)
    for step in range(10, 40):
        session.add(figures(step, reward=0.1 if step == 10 else 0.5))
    assert session.summary() == (
        "steps=30 took=60.0s reward=0.100->0.500 tokens=30000 tokens_per_s=500 mfu=25.0% (wait 50 %, backward 50 %)"
    )
    assert Session(3, None).summary() == "steps=0 took=0.0s tokens=0 tokens_per_s=0 mfu=0.0% ()"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (3661, "1:01:01")])
def test_durations_are_clocks(seconds: float, text: str) -> None:
    assert clock(seconds) == text
