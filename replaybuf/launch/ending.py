"""What a command prints and logs around a session of supervised processes."""

from __future__ import annotations

import logging
from pathlib import Path

from rich.console import Console

from replaybuf.launch.supervisor import Stop


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
