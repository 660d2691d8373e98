"""Terminal output of commands: the lines of a session, its end, and progress bars."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import Progress as WorkProgress
from rich.text import Text

from replaybuf.errors import counted
from replaybuf.launch.progress import Progress
from replaybuf.launch.supervisor import Stop

PLAIN_PERIOD_S = 5.0
TRAINING = "training"
QUICK_S = 2.0
"""Work that takes longer shows a bar."""

Report = Callable[[int, int], None]
"""Receives how much is done, and how much there is in all."""


class View:
    """Output of one session: events, and its state in one line, redrawn below them in a terminal, else every 5 s."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("starting") if console.is_terminal else None
        self._started = time.monotonic()
        self._next_summary_s = 0.0
        self._closed = False

    def __enter__(self) -> Self:
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the state; later updates show nothing."""
        if self._status:
            self._status.stop()
        self._closed = True

    def event(self, text: str) -> None:
        """Print one line with the time since the start."""
        stamp = (f"{clock(time.monotonic() - self._started):>5}  ", "dim")
        self._console.print(Text.assemble(stamp, text), highlight=False, soft_wrap=self._status is None)
        self._console.file.flush()

    def update(self, progress: Progress) -> None:
        """Show the state, elsewhere than in a terminal if the last one is old enough."""
        training, now = progress.phases.current == TRAINING, time.monotonic()
        if self._closed or not (training or progress.note):
            return
        line = summary(progress) if training else f"{progress.phases.current}: {progress.note}"
        if self._status:
            self._status.update(Text(line))
        elif now >= self._next_summary_s:
            self._next_summary_s = now + PLAIN_PERIOD_S
            self.event(line)


def summary(progress: Progress) -> str:
    """Return the state of the training in one line."""
    left = progress.seconds_left()
    parts = [f"step {_steps(progress)}", *(f"{name} {text}" for name, text in _figures(progress))]
    return " | ".join(parts if left is None else [*parts, f"{clock(left)} left"])


def print_line(console: Console, line: str) -> None:
    """Print a line as it is: no markup, no line breaks added."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def print_stop(console: Console, stop: Stop, what: str, again: str) -> None:
    """Print why `what` ended early, the last log lines of the child that caused it, and the command to continue."""
    print_line(console, f"{what} stopped: {stop.reason}")
    if stop.log is not None:
        print_line(console, f"last lines of {stop.log}:" if stop.log_lines else f"{stop.log} is empty")
        for line in stop.log_lines:
            print_line(console, f"  {line}")
    print_line(console, f"all processes are stopped; continue with: {again}")


def log_to(path: Path) -> None:
    """Log to a file: the terminal belongs to the view."""
    logging.basicConfig(
        filename=path, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", force=True
    )


@contextlib.contextmanager
def work_bar(what: str, console: Console | None = None) -> Iterator[Report]:
    """Return a callback for what is done and what there is in all; show a bar that disappears at the end."""
    begun_s, bar = time.monotonic(), WorkProgress(console=console or Console(stderr=True), transient=True)
    task = bar.add_task(what, total=None)

    def report(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        if time.monotonic() - begun_s >= QUICK_S and bar.console.is_terminal:
            bar.start()

    try:
        yield report
    finally:
        bar.stop()


def clock(seconds: float) -> str:
    """Return a duration as minutes:seconds."""
    whole = max(0, round(seconds))
    return f"{whole // 60}:{whole % 60:02d}"


def megabytes(size: int | None) -> str:
    """Return a size in MB (10^6 bytes); `-` if unknown."""
    return "-" if size is None else f"{size / 1e6:,.0f} MB"


def whole_seconds(duration_s: float | None) -> str:
    """Return a duration in whole seconds; `-` if unknown."""
    return "-" if duration_s is None else f"{duration_s:,.0f} s"


def percent(share: float | None) -> str:
    """Return a share, 0..1, in percent; `-` if unknown."""
    return "-" if share is None else f"{share:.1%}"


def _figures(progress: Progress) -> Iterator[tuple[str, str]]:
    """Yield name and text of each figure that is known."""
    if lines := progress.lines:
        recent = lines[-10:]
        reward = sum(line.reward_mean for line in recent) / len(recent)
        yield "reward", f"{reward:.3f}"
    if progress.evaluations:
        before = progress.before
        start = f" (before: {percent(before.sampled)}, {percent(before.greedy)})" if before else ""
        greedy = next((e.greedy for e in reversed(progress.evaluations) if e.greedy is not None), None)
        yield "accuracy", f"sampled {percent(progress.evaluations[-1].sampled)}, greedy {percent(greedy)}{start}"
    if lines:
        staleness = progress.staleness()
        yield "staleness", f"mean {staleness.mean:.2f}, max {staleness.max}"
    if progress.state and (lines or progress.phases.current == TRAINING):
        yield "buffer", _buffer(progress)
        yield "speed", _speed(progress)
        yield "trainer waited", _waiting(progress)
        yield "generator waited", _held_back(progress)


def _steps(progress: Progress) -> str:
    return f"{progress.done_steps}" if progress.total_steps is None else f"{progress.done_steps}/{progress.total_steps}"


def _buffer(progress: Progress) -> str:
    groups, tokens = progress.state["groups"]["live"], progress.state["tokens"]["live"]
    counts = progress.group_counts()
    return (
        f"{counted(groups, 'group', f'{groups:,}')}, {counted(tokens, 'token', f'{tokens:,}')}; "
        f"stored {counts.stored:,}, used {counts.used:,}, dropped {sum(counts.dropped.values()):,}"
    )


def _speed(progress: Progress) -> str:
    rates = (progress.generated_tokens_per_s(), progress.trained_tokens_per_s())
    generated, trained = ("-" if rate is None else f"{rate:,.0f} tok/s" for rate in rates)
    return f"generated {generated}, trained {trained}"


def _waiting(progress: Progress) -> str:
    waiting = progress.waiting()
    if not waiting.seconds:
        now = progress.state.get("waiting") if not progress.lines else None
        return f"now: {now['reason']}, blocked on {now['blocked_on']}" if now else "0%"
    reasons = ", ".join(f"{reason} {share:.0%}" for reason, share in waiting.by_reason.items() if share >= 0.005)
    return f"{waiting.share:.0%}" + (f" ({reasons})" if reasons else "")


def _held_back(progress: Progress) -> str:
    reports, held_back = len(progress.generated), progress.held_back()
    if not reports:
        return "-"
    reasons = ", ".join(f"{reason} {count / reports:.0%}" for reason, count in held_back.most_common())
    return f"{held_back.total() / reports:.0%} of its {reports:,} reports" + (f" ({reasons})" if reasons else "")
