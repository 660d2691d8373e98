"""The end of a demo: write the report, print it, and leave the console open until somebody presses Enter."""

from __future__ import annotations

import asyncio
import sys

import msgspec
from rich.console import Console

from replaybuf.lab.demo.folder import Folder
from replaybuf.lab.demo.picture import draw
from replaybuf.lab.demo.report import Report, build_report, read_sessions
from replaybuf.lab.demo.run_file import list_hyperparameters
from replaybuf.lab.demo.summary import introduce, print_report
from replaybuf.launch.plan import Plan
from replaybuf.launch.progress import GeneratorLine, LineReader, Progress
from replaybuf.launch.session import Session
from replaybuf.launch.view import print_line


async def conclude(console: Console, folder: Folder, plan: Plan, session: Session, *, keep_open: bool | None) -> None:
    """Write and print the report; then wait for Enter if `keep_open`, or if it is None and this is a terminal."""
    report = await asyncio.to_thread(draw_report, folder, session.progress)
    await session.write_page(introduce(report))
    # Last, because it marks the demo as finished.
    folder.report_json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    print_report(console, report, folder.reports)
    if (sys.stdin.isatty() and sys.stdout.isatty()) if keep_open is None else keep_open:
        print_line(console, f"the console stays open: {plan.console}")
        print_line(console, "press Enter, or Ctrl-C, to stop all processes")
        console.file.flush()
        await enter_pressed()


def draw_report(folder: Folder, progress: Progress) -> Report:
    """Return the report of all sessions, and draw its picture."""
    progress.generated = LineReader(folder.generator_metrics, GeneratorLine).new_lines()  # of all sessions
    report = build_report(progress, read_sessions(folder.sessions), list_hyperparameters(folder))
    draw(report, folder.report_png)
    return report


async def enter_pressed() -> None:
    """Wait for a line on standard input; where nobody can type, wait until a signal cancels this."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    try:
        loop.add_reader(sys.stdin.fileno(), ready.set)
    except (OSError, ValueError):  # closed, or a file such as /dev/null
        await asyncio.Event().wait()
    try:
        await ready.wait()
        typed = sys.stdin.readline()
    finally:
        loop.remove_reader(sys.stdin.fileno())
    if not typed:  # the end of a pipe
        await asyncio.Event().wait()
