"""Keeping Redis and rebuilds bounded: snapshots of the state, and the trimming of what nobody is told any more.

A trimming is decided as a TRIM record (so every follower forgets the same) and carried out afterwards: ids of trimmed
groups become bits, then one function call replaces the snapshot, sets entries of old live groups aside and trims both
streams. Dying between the two leaves entries that the next leader finds in the stream and trims.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from replaybuf.kernel.retention import KEPT_GROUPS, trim_point
from replaybuf.kernel.snapshot import Snapshot, encode_snapshot, take
from replaybuf.service.run.journal import Journal
from replaybuf.store import IndexEntry
from replaybuf.store.entries import encode_entry

logger = logging.getLogger(__name__)

SNAPSHOT_ENTRIES = 1_000
SNAPSHOT_USES = 100_000
"""A snapshot is written once so many ledger entries, or uses of groups named in them, came after the last one."""
LOOK_ENTRIES = 16
"""Whether history may go is asked every so many ledger entries."""


class Trimming:
    """Writes snapshots and trims one run; `kept_groups` freed groups stay to be looked at."""

    def __init__(self, journal: Journal) -> None:
        self.kept_groups = KEPT_GROUPS
        self._journal = journal
        self._looked_at = 0

    async def tick(self) -> None:
        """Trim or take a snapshot where it is time to. Raises `NotLeader`."""
        state = self._journal.state
        if state.entries - self._looked_at < LOOK_ENTRIES:
            return
        self._looked_at = state.entries
        await self._trim()
        if self._due():
            await self._write(take(state))

    def _due(self) -> bool:
        state, last = self._journal.state, self._journal.snapshot
        if last is None:
            return state.trimmed > 0 or state.entries >= SNAPSHOT_ENTRIES or state.groups_used >= SNAPSHOT_USES
        return (
            state.trimmed > last.trimmed
            or state.entries - last.entries >= SNAPSHOT_ENTRIES
            or state.groups_used - last.groups_used >= SNAPSHOT_USES
        )

    async def _trim(self) -> None:
        """Decide what is told no longer."""
        journal = self._journal
        async with journal.decision():
            # A payload is found by its index entry, which therefore goes after it.
            record = None if journal.owes_payloads else trim_point(journal.state, self.kept_groups)
            if record:
                await journal.append(msgspec.structs.replace(record, at_s=journal.clock()))
                logger.info("trimmed run=%s groups=%d entries=%d", journal.name, record.groups, record.entries)

    async def _write(self, snapshot: Snapshot) -> None:
        journal = self._journal
        # Read once: this server may lose the lead meanwhile and have it again, by a token that would let us delete what
        # the leader between set aside.
        token = journal.token or ""
        held = set(memoryview(snapshot.set_aside).cast("q"))
        aside: dict[int, bytes] = {}
        async for chunk in journal.store.groups.read_index(journal.name, 0, snapshot.trimmed):
            entries = chunk.entries()
            freed = [entry for entry in entries if entry.number not in held]
            await journal.store.snapshots.mark_prompts_done(journal.name, token, _ticketed(freed))
            kept = [position for position, entry in enumerate(entries) if entry.number in held]
            aside |= {entries[position].number: encode_entry(chunk, position) for position in kept}
        written = await journal.store.snapshots.write(
            journal.name,
            token,
            encode_snapshot(snapshot),
            snapshot.trimmed + 1,
            snapshot.trimmed_entries + 1,
            aside,
        )
        if not written:
            return
        before, journal.snapshot = journal.snapshot, snapshot
        if before is None or before.set_aside != snapshot.set_aside:
            await self._drop_freed(held, token)

    async def _drop_freed(self, held: set[int], token: str) -> None:
        """Delete entries set aside of groups freed since: only now, as the snapshot before this one needs them.

        All that is read here is looked at, not what the last snapshot held: an older leader may have died before this.
        Behind the fence, nobody but this leader has set anything aside since `held` was known.
        """
        journal = self._journal
        async for chunk in journal.store.snapshots.read_old_entries(journal.name):
            freed = [entry for entry in chunk.entries() if entry.number not in held]
            if freed:
                await journal.store.snapshots.mark_prompts_done(journal.name, token, _ticketed(freed))
                await journal.store.snapshots.delete_old_entries(journal.name, token, [entry.number for entry in freed])


def _ticketed(entries: Sequence[IndexEntry]) -> list[tuple[str, int, int]]:
    """List adapter, prompt index and number of the groups that came with a ticket."""
    return [(e.strings.adapter, int(e.values["prompt_index"]), e.number) for e in entries if e.strings.ticket]
