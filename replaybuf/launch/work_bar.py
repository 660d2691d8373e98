"""Progress bar of work that a person waits for: on standard error of a terminal, if the work is not quick."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress

QUICK_S = 2.0
"""Work that takes longer shows a bar."""

Report = Callable[[int, int], None]
"""Receives how much is done, and how much there is in all."""


@contextlib.contextmanager
def work_bar(what: str, console: Console | None = None) -> Iterator[Report]:
    """Return a callback for what is done and what there is in all; show a bar that disappears at the end."""
    begun_s, bar = time.monotonic(), Progress(console=console or Console(stderr=True), transient=True)
    task = bar.add_task(what, total=None)

    def report(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        if time.monotonic() - begun_s >= QUICK_S and bar.console.is_terminal:
            bar.start()

    try:
        yield report
    finally:
        bar.stop()
