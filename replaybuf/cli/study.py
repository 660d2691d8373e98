"""The command `replaybuf study`: check the file, run what is missing, write and print the result."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console

from replaybuf.cli.service import print_table
from replaybuf.errors import Conflict, Invalid, MissingExtra, counted
from replaybuf.lab.demo.command import NEEDED, PROGRAM
from replaybuf.lab.study.file import read_study
from replaybuf.lab.study.picture import draw_study
from replaybuf.lab.study.plan import StudyPlan, plan_study
from replaybuf.lab.study.report import StudyResult, build_result, notes_of, table_of
from replaybuf.lab.study.session import run_study
from replaybuf.launch.guard import lock_folder
from replaybuf.launch.view import log_to, print_line, print_stop
from replaybuf.program import command_line


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """What to do with the file."""

    dry_run: Annotated[bool, Parameter(negative="")] = False
    """Check the file and list the trainings; start nothing."""
    json: Annotated[bool, Parameter(negative="")] = False
    """Print the result as JSON, as in study.json, in place of the table."""


_DEFAULTS = StudyOptions()


def study(
    file: Annotated[Path, Parameter(help="TOML file of the study.")],
    /,
    options: Annotated[StudyOptions, Parameter(name="*")] = _DEFAULTS,
) -> None:
    """Compare strategies on one task: train each with several seeds, score their checkpoints by one engine.

    All trainings share a warm start. The result is a table, study.json, and study.svg with accuracy by generated
    tokens, optimizer steps and wall seconds. Ctrl-C stops all processes; the same command goes on where it stopped.
    """
    code = run(Console(stderr=True), file, options)
    if code:
        sys.exit(code)


def run(console: Console, file: Path, options: StudyOptions, *, program: Sequence[str] = PROGRAM) -> int:
    """Run a study; return the exit code: 0 done, 1 a process kept dying, 128 + signal if a signal stopped it.

    `console`: for the progress; the result goes to standard output. Raises `MissingExtra`, and `Invalid` and `Conflict`
    before anything starts.
    """
    plan = plan_study(read_study(file), file.parent)
    if options.dry_run:
        for training in plan.trainings:
            left = "finished" if training.costs.is_file() else "to run"
            print(f"{training.name}: {counted(training.variant.steps, 'step')}, {left}")
        return 0
    if any(find_spec(module) is None for module in NEEDED):
        raise MissingExtra("replaybuf study", "demo")
    lock = _lock(plan)
    try:
        log_to(plan.data_dir / "logs" / "study.log")
        if stop := asyncio.run(run_study(plan, console, lock, program)):
            print_stop(console, stop, "study", command_line("study", str(file)))
            return stop.exit_code
    finally:
        os.close(lock)
    result = build_result(plan)
    paths = _write(plan, result)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(result)).decode())
    else:
        _print(result)
    print_line(console, f"written: {', '.join(map(str, paths))}")
    return 0


def _lock(plan: StudyPlan) -> int:
    """Create the folder of a study and lock it. Raises `Conflict`, `Invalid`."""
    try:
        (plan.data_dir / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        detail = f"data_dir {plan.data_dir} cannot be created: {error.strerror}"
        raise Invalid(detail, name="data_dir", value=str(plan.data_dir)) from error
    detail = f"{plan.data_dir} is in use by another study; stop it, or set another data_dir in the file"
    return lock_folder(plan.data_dir / "lock", Conflict(detail, name="data_dir", value=str(plan.data_dir)))


def _write(plan: StudyPlan, result: StudyResult) -> list[Path]:
    picture, figures = plan.data_dir / "study.svg", plan.data_dir / "study.json"
    picture.write_text(draw_study(result), encoding="utf-8")
    figures.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    return [picture, figures]


def _print(result: StudyResult) -> None:
    heading, rows = table_of(result)
    print_table(heading, rows)
    print("\n".join(notes_of(result)))
