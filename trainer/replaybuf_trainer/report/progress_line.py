"""A line at the bottom of the terminal: step, reward, speed, waiting and the estimated end."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from replaybuf.wire.contract import WaitingAnswer
from replaybuf_trainer.report.session import Session
from replaybuf_trainer.report.sinks.sink import Waiting
from replaybuf_trainer.report.stopwatch import Phase

REFRESHES_PER_S = 2
_BAR_CELLS = 20


class ProgressLine:
    """A line that redraws itself until `close`; log messages scroll above it."""

    def __init__(self, console: Console, session: Session, waiting: Waiting, phase: Callable[[], Phase]) -> None:
        self._session = session
        self._waiting = waiting
        self._phase = phase
        self._stderr = sys.stderr
        self._live = Live(
            console=console, get_renderable=self.render, refresh_per_second=REFRESHES_PER_S, transient=True
        )
        self._live.start()  # replaces sys.stderr by a file that prints above the line
        self._move_logs(self._stderr, sys.stderr)

    def render(self) -> RenderableType:
        """Draw the line as it is now."""
        session = self._session
        bar = ProgressBar(total=session.steps, completed=session.step, width=_BAR_CELLS, pulse=session.steps is None)
        line = Table.grid(padding=(0, 1))
        line.add_column(no_wrap=True)
        line.add_column(width=_BAR_CELLS)
        line.add_column(no_wrap=True, overflow="ellipsis")
        line.add_row(
            Text(f"step {_steps(session)}", style="bold"), bar, Text(_figures(session, self._waiting(), self._phase()))
        )
        return line

    def close(self) -> None:
        """Remove the line."""
        replaced = sys.stderr
        self._live.stop()
        self._move_logs(replaced, self._stderr)

    def _move_logs(self, old: object, new: object) -> None:
        """Let the handlers that write to one stream write to another."""
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is old:
                handler.setStream(new)


def clock(seconds: float) -> str:
    """Format a duration as M:SS or H:MM:SS."""
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def _steps(session: Session) -> str:
    return f"{session.step}" if session.steps is None else f"{session.step}/{session.steps}"


def _figures(session: Session, waiting: WaitingAnswer | None, phase: Phase) -> str:
    parts = []
    if session.newest:
        parts += [
            f"reward {session.recent('reward_mean'):.3f}",
            f"{session.recent('tokens_per_s'):,.0f} tok/s",
            f"MFU {session.recent('mfu'):.1%}",
            f"waited {session.wait_share:.0%}",
        ]
    if (left := session.seconds_left) is not None:
        parts.append(f"{clock(left)} left")
    parts.append(phase if waiting is None else f"waits for {waiting.blocked_on}: {waiting.reason}{_missing(waiting)}")
    if session.newest:
        parts += [
            f"{session.newest['peak_memory_bytes'] / 2**30:.1f} GiB",
            f"padding {session.recent('padding_share'):.0%}",
        ]
    return " · ".join(parts)


def _missing(waiting: WaitingAnswer) -> str:
    have, need = waiting.have, waiting.need
    if need.groups:
        return f" ({have.groups or 0}/{need.groups} groups)"
    return f" ({have.tokens or 0:,}/{need.tokens:,} tokens)" if need.tokens else ""
