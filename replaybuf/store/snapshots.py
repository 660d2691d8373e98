"""The snapshot of a run's fold, and the trimming that it allows.

Trimming keeps the index entries of the few groups that are still needed in a hash ("old entries"), and the prompts of
the others as one bit each.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

import numpy as np

from replaybuf.errors import Unreadable
from replaybuf.store import keys
from replaybuf.store.entries import IndexChunk, read_stored
from replaybuf.store.groups import READ_CHUNK_ENTRIES
from replaybuf.store.redis.connection import Connection
from replaybuf.store.tickets import WHOLE

_PROMPTS_PER_CALL = 1_000
"""A call with so many prompts blocks Redis for about 2 ms."""


class SnapshotStore:
    """Reads and writes the snapshot, the old entries and the bits of trimmed prompts."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def read(self, run: str) -> bytes | None:
        """Read the snapshot; None = none was written yet."""
        raw: bytes | None = await self._connection.read_one(run, "GET", keys.snapshot(run))
        return raw

    async def write(
        self, run: str, token: str, raw: bytes, first_group: int, first_entry: int, old_entries: Mapping[int, bytes]
    ) -> bool:
        """Replace the snapshot, keep old entries, and trim both streams before their first numbers: all or nothing.

        Returns False, and changes nothing, if the stored snapshot is newer. Raises `NotLeader`.
        """
        names = [keys.snapshot(run), keys.old_entries(run), keys.candidates(run)]
        arguments = [raw, first_group, first_entry, *(part for pair in old_entries.items() for part in pair)]
        outcome, _ = await self._connection.call(run, "rb_snapshot", names, arguments, token)
        return outcome == "ok"

    async def read_old_entries(self, run: str) -> AsyncIterator[IndexChunk]:
        """Read the entries that trimming kept, in the order of their numbers, in chunks."""
        key = keys.old_entries(run)
        fields = await self._connection.read_one(run, "HKEYS", key)
        if strange := next((field for field in fields if not WHOLE.fullmatch(field)), None):
            raise Unreadable(f"{key} has the field {strange[:80]!r}; fields are numbers of groups", name=key)
        numbers = np.sort(np.array(fields, np.int64))
        for start in range(0, len(numbers), READ_CHUNK_ENTRIES):
            chunk = numbers[start : start + READ_CHUNK_ENTRIES]
            raw = await self._connection.read_one(run, "HMGET", key, *map(str, chunk.tolist()))
            yield read_stored(chunk, raw, run)

    async def delete_old_entries(self, run: str, token: str, numbers: Sequence[int]) -> None:
        """Delete entries that trimming kept. Raises `NotLeader`."""
        await self._connection.call(run, "rb_drop", [keys.old_entries(run)], list(numbers), token)

    async def mark_prompts_done(self, run: str, token: str, prompts: Iterable[tuple[str, int, int]]) -> None:
        """Store one bit per prompt instead of the default id of its group, which is freed.

        `prompts`: adapter, prompt index, number of the group. Raises `NotLeader`.
        """
        by_adapter: dict[str, list[tuple[int, int]]] = {}
        for adapter, index, number in prompts:
            by_adapter.setdefault(adapter, []).append((index, number))
        for adapter, pairs in by_adapter.items():
            names = [keys.prompts_done(run, adapter)]
            prefix = f"{adapter}/p" if adapter else "p"
            for start in range(0, len(pairs), _PROMPTS_PER_CALL):
                flat = [part for pair in pairs[start : start + _PROMPTS_PER_CALL] for part in pair]
                await self._connection.call(run, "rb_done", names, [adapter, prefix, *flat], token)
