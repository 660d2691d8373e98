"""The command `replaybuf demo`: check, run, report."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console

from replaybuf.errors import MissingExtra
from replaybuf.lab.demo.folder import DEFAULT_DATA_DIR, Folder, Request, demo_command, take
from replaybuf.lab.demo.page import write_page
from replaybuf.lab.demo.picture import draw
from replaybuf.lab.demo.progress import LineReader, Progress, Session, starts
from replaybuf.lab.demo.report import build_report, print_report
from replaybuf.lab.demo.story import PROGRAM, Demo
from replaybuf.lab.demo.supervisor import Stop
from replaybuf.lab.demo.view import View, choose_view

NEEDED = ("matplotlib", "reasoning_gym", "torch", "transformers", "replaybuf_trainer")


def demo(
    *,
    data_dir: Path = DEFAULT_DATA_DIR,
    seed: int | None = None,
    steps: int | None = None,
    resume: Annotated[bool, Parameter(negative="")] = False,
    overwrite: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Train a small policy through the real parts, and show that it learns.

    Starts service, engine, generator and trainer as separate processes, measures accuracy on held-out problems before,
    during and after, and writes a report. Ctrl-C stops everything; --resume goes on from there.

    Parameters
    ----------
    data_dir
        Folder for everything the demo writes.
    seed
        Seed of model, problems and requests (default 0). Which weights answer a request is a matter of time, so two
        demos of one seed differ.
    steps
        Number of optimizer steps (default 300; about 1 s each on 2 cores at 2.5 GHz, after a minute of warm start).
    resume
        Go on with the demo in the data folder, with its seed and number of steps.
    overwrite
        Delete the demo in the data folder first.
    """
    code = run_demo(Console(), Folder(data_dir), seed=seed, steps=steps, resume=resume, overwrite=overwrite)
    if code:
        sys.exit(code)


def run_demo(
    console: Console,
    folder: Folder,
    *,
    seed: int | None = None,
    steps: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    program: Sequence[str] = PROGRAM,
) -> int:
    """Run the demo; return the exit code: 0 done, 1 a process died, 128 + signal where a signal stopped it.

    Raises `MissingExtra`, `Invalid` for the options, `Conflict` where the folder is in use or taken.
    """
    if any(find_spec(module) is None for module in NEEDED):
        raise MissingExtra("replaybuf demo", "demo")
    request, lock = take(folder, seed=seed, steps=steps, resume=resume, overwrite=overwrite)
    try:
        if folder.report_json.is_file():
            console.print(
                f"the demo in {folder.root} is finished; its report: {folder.report_html}",
                highlight=False,
                soft_wrap=True,
            )
            return 0
        folder.create()
        _log_to(folder.logs / "demo.log")
        view = choose_view(console)
        progress = _run(Demo(folder, request, view, lock=lock, program=program), view)
        if isinstance(progress, Stop):
            tell_stop(console, progress, folder)
            return progress.exit_code
        _report(console, folder, request, progress)
        return 0
    finally:
        os.close(lock)


def _log_to(path: Path) -> None:
    """Send this process's log to a file: the terminal belongs to the view."""
    logging.basicConfig(
        filename=path, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", force=True
    )


def _run(demo: Demo, view: View) -> Progress | Stop:
    with view:
        return asyncio.run(demo.run()) or demo.progress


def tell_stop(console: Console, stop: Stop, folder: Folder) -> None:
    """Say why the demo ended early, with the last log lines of the child behind it, and how to go on."""
    console.print(f"demo stopped: {stop.reason}", highlight=False, soft_wrap=True)
    if stop.log is not None:
        console.print(f"last lines of {stop.log}:" if stop.log_lines else f"{stop.log} is empty", highlight=False)
        for line in stop.log_lines:
            console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
    command = demo_command(folder.root, "--resume")
    console.print(f"all processes are stopped; go on with: {command}", highlight=False, markup=False, soft_wrap=True)


def _report(console: Console, folder: Folder, request: Request, progress: Progress) -> None:
    report = build_report(request, progress, starts(LineReader(folder.sessions, Session).new_lines()))
    draw(report, folder.report_png)
    write_page(report, folder.report_png, folder.report_html)
    folder.report_json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    print_report(console, report, [str(path) for path in (folder.report_html, folder.report_png, folder.report_json)])
