"""What happened to a run when, for people: changes of its configuration and rewinds, publications, freed groups.

Folded from the ledger and bounded: the newest `MOST_CHANGES`, and `MOST_MOMENTS` of each other kind, take about 0.3 MB.
Records without a time are left out. One decision reads this: a change that names a `revision` is rejected if a newer
one exists.
"""

from __future__ import annotations

from typing import Any

import msgspec

from replaybuf.wire.config import RunConfig
from replaybuf.wire.config_patch import find_changes
from replaybuf.wire.ledger import CheckpointRecord, ConfigRecord, PolicyRecord, RewindRecord

MOST_MOMENTS = 4096
MOST_CHANGES = 64
MOST_LINES = 16
LONGEST_VALUE = 120
"""Characters of an old or new value; the ledger has all of it."""


class Publication(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A version that was published at `at_s`, when `step` was the next unacked step."""

    adapter: str
    version: int
    step: int
    at_s: float


class Freeing(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A checkpoint that freed groups last used before `step`; of these, those up to number `through`, None = all."""

    step: int
    through: int | None
    at_s: float


class Milestones(msgspec.Struct):
    """Publications and freeings, oldest first."""

    publications: list[Publication] = []
    freeings: list[Freeing] = []

    def publish(self, record: PolicyRecord, step: int) -> None:
        """Record a published version; `step` is the next unacked one."""
        if record.at_s:
            self.publications.append(Publication(record.adapter, record.version, step, record.at_s))
            del self.publications[:-MOST_MOMENTS]

    def checkpoint(self, record: CheckpointRecord, oldest_step: int) -> None:
        """Record a checkpoint after which a resume needs no step before `oldest_step`."""
        step = oldest_step if record.kept_from is None else min(oldest_step, record.kept_from)
        newest = self.freeings[-1] if self.freeings else None
        if record.at_s and (newest is None or (step, record.kept_after) != (newest.step, newest.through)):
            self.freeings.append(Freeing(step, record.kept_after, record.at_s))
            del self.freeings[:-MOST_MOMENTS]

    def rewind(self, record: RewindRecord) -> None:
        """Forget the publications of lost versions."""
        kept = {"": record.version} | record.versions
        self.publications = [
            publication
            for publication in self.publications
            if publication.version <= kept.get(publication.adapter, publication.version)
        ]

    def publication_after(self, adapter: str, step: int, version: int | None) -> Publication | None:
        """Find what was published first after `step` was acked: a version above the one that it trained, if known."""
        after = (
            publication
            for publication in self.publications
            if publication.adapter == adapter and publication.step > step
        )
        return next((publication for publication in after if version is None or publication.version > version), None)

    def freeing_of(self, number: int, last_step: int) -> Freeing | None:
        """Find the checkpoint that freed a group which was last used at `last_step`."""
        fitting = (freeing for freeing in self.freeings if freeing.step > last_step)
        return next((freeing for freeing in fitting if freeing.through is None or number <= freeing.through), None)


class Change(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One change: ledger `entry`, next unacked `step` at that time, seconds since the epoch, name of the token.

    `lines`: "name: old → new" of each field that changed.
    """

    entry: int
    step: int
    at_s: float
    by: str
    lines: tuple[str, ...]


class Changes(msgspec.Struct):
    """The newest changes, oldest first. `revision`: ledger entry of the configuration."""

    revision: int = 0
    newest: list[Change] = []

    def add_config(
        self, entry: int, step: int, record: ConfigRecord, before: RunConfig | None, phase: str, after: RunConfig
    ) -> None:
        """Record ledger entry `entry`, which replaces a configuration and a phase at the next unacked step `step`."""
        self.revision = entry
        if before is None:
            return
        changes = find_changes(msgspec.to_builtins(before), msgspec.to_builtins(after))
        lines = [f"{name}: {_text(old)} → {_text(new)}" for name, old, new in changes]
        if record.state != phase:
            reason = f" ({record.reason})" if record.reason else ""
            lines.append(f"state: {phase} → {record.state}{reason}")
        self._add(Change(entry, step, record.at_s, record.by, tuple(lines[:MOST_LINES])))

    def add_rewind(self, entry: int, record: RewindRecord) -> None:
        """Record ledger entry `entry`, which rewinds the run."""
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


def _text(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"
