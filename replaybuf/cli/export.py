"""The commands `replaybuf export` and `replaybuf import`."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.progress import Progress

from replaybuf.client import Client
from replaybuf.client.exports.export import export_run
from replaybuf.client.exports.folder import ExportReader
from replaybuf.client.exports.import_run import import_run

RETRY_S = 60.0
QUICK_S = 2.0
"""Work that takes longer shows a progress bar."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """Service of the run."""

    url: str = "http://127.0.0.1:8900"
    """Address of the service; separate several servers of one Redis by commas."""
    token: str | None = dataclasses.field(default=None, repr=False)
    """Bearer token: role reader for export, operator for import."""
    json: bool = False
    """Print the result as JSON."""


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
    with _client(run, options) as client, _progress(f"exporting {run}") as report:
        manifest = export_run(client, run, options.to, report)
    counts = {**manifest.rows, "without_rollouts": manifest.without_rollouts, "trimmed_groups": manifest.trimmed_groups}
    _print(counts | {"trimmed_entries": manifest.trimmed_entries}, options.json)


def import_(run: str, /, options: Annotated[ImportOptions, Parameter(name="*")]) -> None:
    """Start a new run with the groups of an export."""
    reader = ExportReader(options.from_)
    with _client(run, options) as client, _progress(f"importing {run}") as report:
        outcomes = import_run(client, reader, replay_order=options.replay_order, report=report)
    _print(dict(outcomes), options.json)


def _client(run: str, options: ServiceOptions) -> Client:
    return Client(options.url, run, options.token, retry_for_s=RETRY_S)


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
        print(msgspec.json.encode(counts).decode())
    else:
        print(", ".join(f"{name.replace('_', ' ')} {count}" for name, count in counts.items()))
