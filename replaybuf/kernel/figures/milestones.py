"""When versions were published and groups freed, for the life of a group. Folded from the ledger, bounded, for people.

The newest `MOST_MOMENTS` of each kind are kept: about 0.3 MB. Records without a time are left out.
"""

from __future__ import annotations

import msgspec

from replaybuf.wire.ledger import CheckpointRecord, PolicyRecord, RewindRecord

MOST_MOMENTS = 4096


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
        """Note a published version; `step` is the next unacked one."""
        if record.at_s:
            self.publications.append(Publication(record.adapter, record.version, step, record.at_s))
            del self.publications[:-MOST_MOMENTS]

    def checkpoint(self, record: CheckpointRecord, oldest_step: int) -> None:
        """Note a checkpoint after which a resume needs no step before `oldest_step`."""
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
