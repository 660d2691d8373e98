"""The command `replaybuf demo`: check, run, report."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console

from replaybuf.errors import MissingExtra
from replaybuf.lab.demo.folder import DemoOptions, Folder, demo_command, open_folder
from replaybuf.lab.demo.page import write_page
from replaybuf.lab.demo.picture import draw
from replaybuf.lab.demo.pipeline import PROGRAM, Demo
from replaybuf.lab.demo.report import build_report, print_report
from replaybuf.launch.ending import log_to, print_line, print_stop
from replaybuf.launch.progress import Progress, read_sessions
from replaybuf.launch.view import View

NEEDED = ("matplotlib", "reasoning_gym", "torch", "transformers", "replaybuf_trainer")
_DEFAULTS = DemoOptions()


def demo(options: Annotated[DemoOptions, Parameter(name="*")] = _DEFAULTS) -> None:
    """Train a small model on this machine with service, engine, generator and trainer, and report the result.

    Each part runs in a separate process. The demo measures accuracy on held-out problems before, during and after
    training. Ctrl-C stops all processes; --resume continues the demo.
    """
    code = run_demo(Console(), options)
    if code:
        sys.exit(code)


def run_demo(console: Console, options: DemoOptions, *, program: Sequence[str] = PROGRAM) -> int:
    """Run the demo; return the exit code: 0 done, 1 a process died, 128 + signal if a signal stopped it.

    Raises `MissingExtra`, `Invalid` for the options, `Conflict` if the folder is in use or holds other files.
    """
    if any(find_spec(module) is None for module in NEEDED):
        raise MissingExtra("replaybuf demo", "demo")
    folder, request, lock = open_folder(options)
    try:
        if folder.report_json.is_file():
            print_line(console, f"the demo in {folder.root} is finished; its report: {folder.report_html}")
            return 0
        folder.create()
        log_to(folder.logs / "demo.log")
        with View(console) as view:
            demo = Demo(folder, request, view, lock=lock, program=program)
            stop = asyncio.run(demo.run())
        if stop:
            print_stop(console, stop, "demo", demo_command(folder.root, "--resume"))
            return stop.exit_code
        _report(console, folder, demo.progress)
        return 0
    finally:
        os.close(lock)


def _report(console: Console, folder: Folder, progress: Progress) -> None:
    report = build_report(progress, read_sessions(folder.sessions))
    draw(report, folder.report_png)
    write_page(report, folder.report_png, folder.report_html)
    folder.report_json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    print_report(console, report, (folder.report_html, folder.report_png, folder.report_json))
