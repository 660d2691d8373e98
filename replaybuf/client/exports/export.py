"""Export of a run by its HTTP API, with the role reader: a cursor brings the groups, pages the ledger."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from replaybuf.client.client import Client
from replaybuf.client.exports.folder import FORMAT, ExportWriter, Manifest, remove_leftovers
from replaybuf.client.exports.tables import group_row, ledger_row, rollout_rows, step_of
from replaybuf.errors import Gone, ReplaybufError
from replaybuf.wire.answer.cursors import CursorGap, CursorPage

PAGE_GROUPS = 500
PAGE_RECORDS = 1000
CURSOR_LIFETIME_S = 600
"""A killed export keeps its cursor, and the bytes of the groups behind it, for so long at most."""

Report = Callable[[int, int], None]
"""Called after each page with the groups done and the groups in all."""
_Rows = defaultdict[int | None, list[dict[str, Any]]]


def export_run(client: Client, run: str, target: Path, report: Report) -> Manifest:
    """Write groups, rollouts and ledger of a run to a new folder; it appears complete or not at all.

    Groups stored after the start are left out. Memory holds one page. What a killed export to the same folder left is
    removed first. Raises `Conflict` if the folder exists.
    """
    remove_leftovers(target, run, client.delete_cursor)
    status = client.get_run()
    missed = CursorGap()
    with ExportWriter(target, run) as writer:
        for part, page in enumerate(_pages(client, writer.cursor, status.groups.stored)):
            groups, rollouts = _Rows(list), _Rows(list)
            for group in page.groups:
                groups[step_of(group)].append(group_row(group))
                if group.rollouts:
                    rollouts[step_of(group)] += rollout_rows(group)
            writer.write("groups", part, groups)
            writer.write("rollouts", part, rollouts)
            if page.gap:
                missed = CursorGap(groups=missed.groups + page.gap.groups, freed=missed.freed + page.gap.freed)
            report(writer.rows["groups"], status.groups.stored)
        steps, first = _write_ledger(client, writer)
        manifest = Manifest(
            format=FORMAT,
            run=run,
            generation=status.generation,
            step=status.step,
            config=status.config,
            rows=writer.rows,
            without_rollouts=missed.freed,
            trimmed_groups=missed.groups,
            trimmed_entries=first - 1,
            steps=steps,
            files=writer.files,
        )
        writer.finish(manifest)
    return manifest


def _pages(client: Client, name: str, last: int) -> Iterator[CursorPage]:
    """Yield the groups up to number `last`. The cursor keeps their bytes meanwhile, and goes at the end.

    Raises `Gone` if the service forgot the cursor, because this process stood still for longer than its lifetime.
    """
    done = 0
    try:
        while (page := client.read_cursor(name, "stored", PAGE_GROUPS, lifetime_s=CURSOR_LIFETIME_S)).groups:
            if page.groups[0].number <= done:
                why = f"this export made no call for {CURSOR_LIFETIME_S} s, so its cursor is gone; export again"
                raise Gone(why, name="cursor", value=name)
            groups = [group for group in page.groups if group.number <= last]
            if groups:
                yield msgspec.structs.replace(page, groups=groups)
            client.advance_cursor(name, page.position)
            done = page.groups[-1].number
            if page.groups[-1].number >= last:
                return
    finally:
        with contextlib.suppress(ReplaybufError):  # else it would hide the first error
            client.delete_cursor(name)


def _write_ledger(client: Client, writer: ExportWriter) -> tuple[dict[int, list[str]], int]:
    """Write the ledger; return the groups of each step of the surviving history, and the first entry."""
    steps: dict[int, list[str]] = {}
    after: int | None = 0
    first, part = 0, 0
    while after is not None:
        page = client.get_ledger(after, PAGE_RECORDS)
        rows = _Rows(list)
        for record in page.records:
            rows[record.get("step")].append(ledger_row(record))
            if record["type"] == "BATCH":
                steps[record["step"]] = [group[1] for group in record["groups"]]
            elif record["type"] == "REWIND" and record["on_resume"] == "resample":
                steps = {step: groups for step, groups in steps.items() if step < record["step"]}
        writer.write("ledger", part, rows)
        first = first or (page.records[0]["entry"] if page.records else 0)
        after, part = page.next, part + 1
    return steps, max(first, 1)
