"""The newest changes of a run for people: who changed the configuration or the state, and where a rewind led.

Folded from the ledger. One decision reads it: a change that names a `revision` is rejected if a newer one exists.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from replaybuf.wire.config import RunConfig
from replaybuf.wire.ledger import ConfigRecord, RewindRecord

MOST_CHANGES = 64
MOST_LINES = 16
LONGEST_VALUE = 120
"""Characters of an old or new value; the ledger has all of it."""


class Change(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One change: ledger `entry`, next unacked `step` at that time, seconds since the epoch, name of the token.

    `lines`: "name: old → new" of each field that changed.
    """

    entry: int
    step: int
    at_s: float
    by: str
    lines: tuple[str, ...]


class Configured(NamedTuple):
    """The configuration of a run and its state, as the last record set it."""

    config: RunConfig | None
    state: str


class Changes(msgspec.Struct):
    """The newest changes, oldest first. `revision`: ledger entry of the configuration."""

    revision: int = 0
    newest: list[Change] = []

    def add_config(self, entry: int, step: int, record: ConfigRecord, before: Configured, after: RunConfig) -> None:
        """Note ledger entry `entry`, which replaces a configuration at the next unacked step `step`."""
        self.revision = entry
        if before.config is None:
            return
        lines = _lines(msgspec.to_builtins(before.config), msgspec.to_builtins(after), "")
        if record.state != before.state:
            reason = f" ({record.reason})" if record.reason else ""
            lines.append(f"state: {before.state} → {record.state}{reason}")
        self._add(Change(entry, step, record.at_s, record.by, tuple(lines[:MOST_LINES])))

    def add_rewind(self, entry: int, record: RewindRecord) -> None:
        """Note ledger entry `entry`, which rewinds the run."""
        line = f"rewind to step {record.step} ({record.on_resume})"
        self._add(Change(entry, record.step, record.at_s, "", (line,)))

    def describe_since(self, revision: int) -> str:
        """Describe the changes after ledger entry `revision` in one line."""
        newer = [change for change in self.newest if change.entry > revision]
        return "; ".join(f"{', '.join(change.lines)}{f' by {change.by}' if change.by else ''}" for change in newer)

    def _add(self, change: Change) -> None:
        if change.lines:
            self.newest.append(change)
            del self.newest[:-MOST_CHANGES]


def _lines(before: Any, after: Any, name: str) -> list[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        names = sorted(before.keys() | after.keys())
        return [line for key in names for line in _lines(before.get(key), after.get(key), f"{name}.{key}".strip("."))]
    return [] if before == after else [f"{name}: {_text(before)} → {_text(after)}"]


def _text(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"
