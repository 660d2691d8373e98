"""Snapshots of the state and trimming of both streams: they bound Redis memory and the time of a rebuild.

A TRIM record decides what is trimmed, so every follower forgets the same. Afterwards the ids of trimmed groups become
bits, and one function call replaces the snapshot, keeps the entries of old live groups and trims both streams. If the
leader dies between the two, the next leader finds the entries in the stream and trims them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import msgspec

from replaybuf.kernel.decide.trimming import KEPT_GROUPS, decide_trim
from replaybuf.kernel.state.snapshot import Snapshot, encode_snapshot, freeze, thaw
from replaybuf.service.run.journal import Journal
from replaybuf.store import IndexEntry
from replaybuf.store.entries import encode_entry

logger = logging.getLogger(__name__)

SNAPSHOT_ENTRIES = 1_000
SNAPSHOT_USES = 100_000
"""A snapshot is written after so many ledger entries, or uses of groups in them, since the last one."""
CHECK_ENTRIES = 16
"""Whether history may be trimmed is checked every so many ledger entries."""


class Trimming:
    """Writes snapshots and trims one run; the history of `kept_groups` freed groups is kept."""

    def __init__(self, journal: Journal) -> None:
        self.kept_groups = KEPT_GROUPS
        self._journal = journal
        self._checked_at = 0

    async def tick(self) -> None:
        """Trim, and write a snapshot if one is due. Raises `NotLeader`."""
        state = self._journal.state
        if state.entries - self._checked_at < CHECK_ENTRIES:
            return
        self._checked_at = state.entries
        await self._trim()
        if self._due():
            await self._write(await asyncio.to_thread(thaw, freeze(state)))

    def _due(self) -> bool:
        state, last = self._journal.state, self._journal.snapshot
        if last is None:
            return state.trimmed > 0 or state.entries >= SNAPSHOT_ENTRIES or state.totals.groups_used >= SNAPSHOT_USES
        return (
            state.trimmed > last.trimmed
            or state.entries - last.entries >= SNAPSHOT_ENTRIES
            or state.totals.groups_used - last.groups_used >= SNAPSHOT_USES
        )

    async def _trim(self) -> None:
        """Record what is trimmed."""
        journal = self._journal
        async with journal.decision():
            # A payload is found by its index entry, so it is deleted first.
            record = None if journal.owes_payloads else decide_trim(journal.state, self.kept_groups)
            if record:
                await journal.append(msgspec.structs.replace(record, at_s=journal.clock.wall()))
                logger.info("trimmed run=%s groups=%d entries=%d", journal.name, record.groups, record.entries)

    async def _write(self, snapshot: Snapshot) -> None:
        journal = self._journal
        # Read once. With the token of a later term we could delete what the leader between kept.
        token = journal.token
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
            await asyncio.to_thread(encode_snapshot, snapshot),  # compression takes 0.1 s for a million groups
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
        """Delete kept entries of groups that were freed since; the snapshot before this one needed them.

        Check all kept entries, not those of the last snapshot: an older leader may have died before it deleted them.
        The fence keeps other servers from adding entries after `held` was read.
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
