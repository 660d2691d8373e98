"""The commands `replaybuf up`, which starts and supervises all parts of a run from one file, and `config schema`."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console

from replaybuf.cli.service import print_json
from replaybuf.errors import Conflict, Invalid, counted
from replaybuf.launch.file import read_file
from replaybuf.launch.guard import lock_folder
from replaybuf.launch.machine import port_problems
from replaybuf.launch.plan import Plan
from replaybuf.launch.planning import Planner
from replaybuf.launch.sections import file_schema
from replaybuf.launch.session import Session
from replaybuf.launch.view import View, log_to, print_line, print_stop
from replaybuf.program import command_line

WRONG_FILE_EXIT_CODE = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpOptions:
    """What to do with the file."""

    dry_run: Annotated[bool, Parameter(negative="")] = False
    """Check the file and print what would start: commands, environment, addresses. Secrets are hidden."""
    json: Annotated[bool, Parameter(negative="")] = False
    """Print JSON: how the run ended, the plan of --dry-run, or the problems of the file. The progress of the run goes
    to standard error."""
    token: str | None = dataclasses.field(default=None, repr=False)
    """Bearer token of the service with the role operator, for a service with a tokens file."""


_DEFAULTS = UpOptions()


def up(
    file: Annotated[Path, Parameter(help="TOML file of the run.")],
    /,
    options: Annotated[UpOptions, Parameter(name="*")] = _DEFAULTS,
) -> None:
    """Start and supervise a whole run from one file: service, engines, generators, trainer, evaluation.

    Failed processes are restarted. Ctrl-C stops all of them; the same command continues the run. "replaybuf config
    schema" has all keys of the file. The exit code is 2 for a wrong file, and 1 if a process keeps failing.
    """
    code = run_up(Console(stderr=options.json), file, options)
    if code:
        sys.exit(code)


def run_up(console: Console, file: Path, options: UpOptions) -> int:
    """Check the file, then print or run its plan; return the exit code."""
    try:
        planner = Planner(read_file(file), file.parent, has_token=options.token is not None)
    except Invalid as error:
        return _reject(file, [error.detail], options)
    plan = planner.plan()
    if plan is None or options.dry_run:
        problems = [*planner.problems, *port_problems(planner.addresses)]
        if problems or plan is None:
            return _reject(file, problems, options)
        _show(console, plan, as_json=options.json)
        return 0
    lock = _lock(plan)
    try:
        if problems := list(port_problems(plan.addresses)):
            return _reject(file, problems, options)
        return _run(console, plan, lock, file, options)
    finally:
        os.close(lock)


def _reject(file: Path, problems: Sequence[str], options: UpOptions) -> int:
    if options.json:
        print_json({"problems": problems})
    else:
        count = "1 problem" if len(problems) == 1 else counted(len(problems), "problem")
        lines = [f"replaybuf: {file} has {count}, and nothing was started", *(f"  - {problem}" for problem in problems)]
        print("\n".join(lines), file=sys.stderr)
    return WRONG_FILE_EXIT_CODE


def _show(console: Console, plan: Plan, *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(plan.described())).decode())
        return
    for line in plan.lines():
        print_line(console, line)


def _lock(plan: Plan) -> int:
    """Create the folders of a plan and lock them. Raises `Conflict`, `Invalid`."""
    try:
        for folder in (plan.data_dir, plan.logs, plan.data_dir / "metrics"):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        detail = f"data_dir {plan.data_dir} cannot be created: {error.strerror}"
        raise Invalid(detail, name="data_dir", value=str(plan.data_dir)) from error
    detail = f"{plan.data_dir} is in use by another `replaybuf up`; stop it, or set another data_dir in the file"
    return lock_folder(plan.data_dir / "lock", Conflict(detail, name="data_dir", value=str(plan.data_dir)))


def _run(console: Console, plan: Plan, lock: int, file: Path, options: UpOptions) -> int:
    log_to(plan.logs / "up.log")
    with View(console) as view:
        session = Session(plan, view, lock=lock, token=options.token)
        stop = asyncio.run(session.run())
    if options.json:
        print_json(
            {
                "run": plan.run,
                "stopped": stop.reason if stop else None,
                "data_dir": str(plan.data_dir),
                "logs": str(plan.logs),
                "console": shlex.join(plan.service.command),
            }
        )
    if stop:
        print_stop(console, stop, "up", command_line("up", str(file)))
        return stop.exit_code
    print_line(console, f"run {plan.run} is done; data and logs are in {plan.data_dir}")
    print_line(console, f"open its console again: {shlex.join(plan.service.command)}")
    return 0


def schema(
    *, json: Annotated[bool, Parameter(negative="", help="Print JSON; the schema has no other form.")] = True
) -> None:
    """Print the JSON Schema of the file of "replaybuf up", with a description of every key."""
    del json
    print(msgspec.json.format(msgspec.json.encode(file_schema())).decode())
