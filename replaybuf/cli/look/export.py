"""The commands `replaybuf export` and `replaybuf import`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from replaybuf.cli.service import RunName, ServiceOptions, client, print_json
from replaybuf.client.exports.export import export_run
from replaybuf.client.exports.import_run import import_run
from replaybuf.client.exports.reader import ExportReader
from replaybuf.launch.view import work_bar


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


def export(run: RunName, /, options: Annotated[ExportOptions, Parameter(name="*")]) -> None:
    """Write groups, rollouts and ledger of a run as Parquet files."""
    with client(run, options) as service, work_bar(f"exporting {run}") as report:
        manifest = export_run(service, run, options.to, report)
    counts = {**manifest.rows, "without_rollouts": manifest.without_rollouts, "trimmed_groups": manifest.trimmed_groups}
    _print(counts | {"trimmed_entries": manifest.trimmed_entries}, options.json)


def import_(run: RunName, /, options: Annotated[ImportOptions, Parameter(name="*")]) -> None:
    """Start a new run with the groups of an export."""
    reader = ExportReader(options.from_)
    with client(run, options) as service, work_bar(f"importing {run}") as report:
        outcomes = import_run(service, reader, replay_order=options.replay_order, report=report)
    _print(dict(outcomes), options.json)


def _print(counts: dict[str, int], as_json: bool) -> None:
    if as_json:
        print_json(counts)
    else:
        print(", ".join(f"{name.replace('_', ' ')} {count}" for name, count in counts.items()))
