"""The commands `replaybuf export` and `replaybuf import`."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.progress import Progress

from replaybuf.cli.service import ServiceOptions, client, print_json
from replaybuf.client.exports.export import export_run
from replaybuf.client.exports.folder import ExportReader
from replaybuf.client.exports.import_run import import_run

QUICK_S = 2.0
"""Work that takes longer shows a progress bar."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions(ServiceOptions):
    """Folder of an export."""

    to: Path
    """Folder to create. It appears when the export is complete."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportOptions(ServiceOptions):
    """Export to read."""

    from_: Annotated[Path, Parameter(name="--from")]
    """Folder of the export."""
    replay_order: bool = False
    """Serve the recorded batches again, step by step, to debug a trainer without engines."""


def export(run: str, /, options: Annotated[ExportOptions, Parameter(name="*")]) -> None:
    """Write groups, rollouts and ledger of a run as Parquet files."""
    with client(run, options) as service, _progress(f"exporting {run}") as report:
        manifest = export_run(service, run, options.to, report)
    counts = {**manifest.rows, "without_rollouts": manifest.without_rollouts, "trimmed_groups": manifest.trimmed_groups}
    _print(counts | {"trimmed_entries": manifest.trimmed_entries}, options.json)


def import_(run: str, /, options: Annotated[ImportOptions, Parameter(name="*")]) -> None:
    """Start a new run with the groups of an export."""
    reader = ExportReader(options.from_)
    with client(run, options) as service, _progress(f"importing {run}") as report:
        outcomes = import_run(service, reader, replay_order=options.replay_order, report=report)
    _print(dict(outcomes), options.json)


@contextlib.contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Return a callback for groups done and groups in all; show a bar on a terminal if the work is not quick."""
    begun_s, bar = time.monotonic(), Progress(console=Console(stderr=True), transient=True)
    task = bar.add_task(what, total=None)

    def report(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        if time.monotonic() - begun_s > QUICK_S and bar.console.is_terminal:
            bar.start()

    try:
        yield report
    finally:
        bar.stop()


def _print(counts: dict[str, int], as_json: bool) -> None:
    if as_json:
        print_json(counts)
    else:
        print(", ".join(f"{name.replace('_', ' ')} {count}" for name, count in counts.items()))
