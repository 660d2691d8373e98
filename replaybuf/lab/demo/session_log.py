"""Sessions of a demo: each start appends its phases, peaks and outcome to a file, also before it is killed."""

from __future__ import annotations

from pathlib import Path

import msgspec

from replaybuf.launch.progress import LineReader

KILLED = "killed"
"""Outcome of a session that wrote no other outcome."""
SESSION_EVERY_S = 5.0
"""Maximum time of a session that `kill -9` leaves out of the report."""


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """One start of a session, at `started` (seconds since the epoch), and its outcome.

    It is written repeatedly and the last line counts. `phases`: seconds by phase; `peaks`, `cpu_s`: peak bytes and
    processor seconds by process.
    """

    started: float
    phases: dict[str, float]
    peaks: dict[str, int]
    outcome: str
    cpu_s: dict[str, float] = {}


def append_line(path: Path, line: msgspec.Struct) -> None:
    """Append one JSON line to a file."""
    with path.open("ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")


def read_sessions(path: Path) -> list[Session]:
    """Read the last line of each session."""
    return list({line.started: line for line in LineReader(path, Session).new_lines()}.values())
