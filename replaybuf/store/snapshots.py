"""The snapshot of a run's fold, and the trimming that it allows: entries set aside, prompts remembered by a bit."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

import numpy as np

from replaybuf.store import keys
from replaybuf.store.connection import Connection, text
from replaybuf.store.entries import IndexChunk, read_stored
from replaybuf.store.groups import READ_CHUNK_ENTRIES

_MARKED_AT_ONCE = 2_000
"""Half as many prompts, an index and a number each: a call with so many holds up others for about 2 ms."""


class SnapshotCommands(Connection):
    """What is done with the snapshot and with what stands behind the trimmed ends of the streams."""

    async def read_snapshot(self, run: str) -> bytes | None:
        """Read the snapshot; None where none was written yet."""
        raw: bytes | None = await self._guard(self._redis.get(keys.snapshot(run)))
        return raw

    async def write_snapshot(
        self, run: str, token: str, raw: bytes, first_group: int, first_entry: int, set_aside: Mapping[int, bytes]
    ) -> bool:
        """Replace the snapshot, set entries aside, trim both streams to what is named first: all or nothing.

        A snapshot older than the one that stands there changes nothing: False. Raises `NotLeader`.
        """
        names = [keys.snapshot(run), keys.fence(run), keys.index(run), keys.ledger(run), keys.set_aside(run)]
        aside = [part for pair in set_aside.items() for part in pair]
        reply = await self._call("rb_snapshot", names, [token, raw, first_group, first_entry, *aside])
        self._check_fence(run, token, reply)
        return text(reply[0]) == "ok"

    async def read_set_aside(self, run: str) -> AsyncIterator[IndexChunk]:
        """Read the entries that trimming set aside, in the order of their numbers, in chunks."""
        numbers = np.sort(np.array(await self._guard(self._redis.hkeys(keys.set_aside(run))), np.int64))
        for start in range(0, len(numbers), READ_CHUNK_ENTRIES):
            chunk = numbers[start : start + READ_CHUNK_ENTRIES]
            raw = await self._guard(self._redis.hmget(keys.set_aside(run), [str(number) for number in chunk.tolist()]))
            yield read_stored(chunk, raw)

    async def drop_set_aside(self, run: str, token: str, numbers: Sequence[int]) -> None:
        """Delete entries that trimming set aside. Raises `NotLeader`."""
        names = [keys.set_aside(run), keys.fence(run)]
        self._check_fence(run, token, await self._call("rb_drop", names, [token, *numbers]))

    async def mark_done(self, run: str, token: str, prompts: Iterable[tuple[str, int, int]]) -> None:
        """Remember a bit each of these prompts instead of the default id of their group, which is freed.

        `prompts`: adapter, prompt index, number of the group. Raises `NotLeader`.
        """
        by_adapter: dict[str, list[int]] = {}
        for adapter, index, number in prompts:
            by_adapter.setdefault(adapter, []).extend((index, number))
        for adapter, indexes in by_adapter.items():
            names = [keys.group_ids(run), keys.prompts_done(run, adapter), keys.counts(run), keys.fence(run)]
            for start in range(0, len(indexes), _MARKED_AT_ONCE):
                arguments = [
                    token,
                    adapter,
                    f"{adapter}/p" if adapter else "p",
                    *indexes[start : start + _MARKED_AT_ONCE],
                ]
                self._check_fence(run, token, await self._call("rb_done", names, arguments))
