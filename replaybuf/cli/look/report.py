"""The command `replaybuf report`: one HTML file about a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from replaybuf.cli.service import RunName, ServiceOptions, client, print_json
from replaybuf.errors import Invalid, counted
from replaybuf.report import POINTS, render
from replaybuf.wire.answer.evaluations import MOST_LISTED


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportOptions(ServiceOptions):
    """Where to write it."""

    to: Path | None = None
    """File to write. Default: RUN.html in this folder."""


def report(run: RunName, /, options: Annotated[ReportOptions, Parameter(name="*")] = ReportOptions()) -> None:
    """Write what a run learned, how fast, and what it waited for, as one HTML file."""
    path = options.to or Path(f"{run}.html")
    with client(run, options) as service:
        status, history = service.get_run(), service.get_history(points=POINTS)
        page = render(status, history, service.list_evaluations(MOST_LISTED))
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        detail = f"{path} cannot be written: {error.strerror}; choose another file with --to"
        raise Invalid(detail, name="to", value=str(path)) from error
    if options.json:
        print_json({"run": run, "path": str(path), "steps": status.step})
    else:
        print(f"{path}: report of {run}, {counted(status.step, 'step')}")
