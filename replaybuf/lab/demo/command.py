"""The command `replaybuf demo`: check the folder, show the first screen, run the session."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console

from replaybuf.errors import MissingExtra
from replaybuf.lab.demo.folder import CHARACTERS, DemoOptions, Folder, Request, demo_command, open_folder
from replaybuf.launch.view import View, log_to, print_line, print_stop
from replaybuf.program import command_line

if TYPE_CHECKING:
    from replaybuf.launch.supervisor import Stop

NEEDED = ("matplotlib", "reasoning_gym", "torch", "transformers", "replaybuf_trainer")
PROGRAM = (sys.executable, "-m", "replaybuf")
_DEFAULTS = DemoOptions()


def demo(options: Annotated[DemoOptions, Parameter(name="*")] = _DEFAULTS) -> None:
    """Train a small model on this machine with service, engine, generator and trainer, and report the result.

    Each part runs in a separate process, which is restarted if it dies. The console of the service shows the run from
    the start; the demo prints its address. It measures accuracy on held-out problems before, during and after the
    training. In a terminal the console stays open after the report until Enter. Ctrl-C stops all processes; --resume
    continues the demo.
    """
    code = run_demo(Console(stderr=options.json), options)
    if code:
        sys.exit(code)


def run_demo(console: Console, options: DemoOptions, *, program: Sequence[str] = PROGRAM) -> int:
    """Run the demo; return the exit code: 0 done, 1 a process kept dying, 128 + signal if a signal stopped it.

    Raises `MissingExtra`, `Invalid` for the options, `Conflict` if the folder is in use or holds other files.
    """
    if any(find_spec(module) is None for module in NEEDED):
        raise MissingExtra("replaybuf demo", "demo")
    options.check()
    if options.strategy is not None or options.strategy_options is not None:
        from replaybuf.lab.demo.run_file import check_request

        check_request(options.request())
    folder, request, lock = open_folder(options)
    again = command_line("serve", "--data-dir", str(folder.service), "--tokenizer", str(CHARACTERS))
    try:
        if folder.report_json.is_file():
            print_line(console, f"the demo in {folder.root} is finished; its report: {folder.report_html}")
            print_line(console, f"open its console again: {again}")
            _print_report(folder, options)
            return 0
        folder.create()
        log_to(folder.logs / "demo.log")
        with View(console) as view:
            view.event(f"starting the service; everything is written to {folder.root}")
            stop = _run_session(console, view, folder, request, options, lock, program)
        if stop and not folder.report_json.is_file():
            print_stop(console, stop, "demo", demo_command(folder.root, "--resume"))
            return stop.exit_code
        print_line(console, f"all processes are stopped; open the console again: {again}")
        _print_report(folder, options)
        return 0
    finally:
        os.close(lock)


def _print_report(folder: Folder, options: DemoOptions) -> None:
    if options.json:
        print(folder.report_json.read_text(), end="")


def _run_session(
    console: Console,
    view: View,
    folder: Folder,
    request: Request,
    options: DemoOptions,
    lock: int,
    program: Sequence[str],
) -> Stop | None:
    # Imported after the first line: they take 1 s of processor time, several seconds on a busy machine.
    from replaybuf.lab.demo.conclusion import conclude
    from replaybuf.lab.demo.pipeline import Demo
    from replaybuf.lab.demo.run_file import read_plan, write_run_file

    if not folder.run_file.is_file():
        write_run_file(folder, request)
    plan, tables = read_plan(folder, options.port, program)

    async def finish() -> None:
        view.close()
        await conclude(console, folder, plan, session, keep_open=options.keep_open)

    session = Demo(folder, request, plan, tables, view, lock=lock, finish=finish, program=program)
    return asyncio.run(session.run())
