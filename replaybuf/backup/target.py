"""Write the copy of a run to a Redis. The run appears there when all of it is written, or not at all."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from replaybuf.backup.section import (
    FieldsSection,
    MomentSection,
    PayloadsSection,
    PromptsSection,
    Section,
    StreamSection,
)
from replaybuf.errors import Conflict
from replaybuf.store import Store, keys
from replaybuf.store.chunks import split_chunks

LEASE_S = 60.0
_STREAMS = {
    "index": keys.index,
    "ledger": keys.ledger,
    "candidates": keys.candidates,
    "evaluations": keys.evaluations,
}
_HASHES = {"group_ids": keys.group_ids, "old_entries": keys.old_entries}


class Target:
    """A sink that writes run `run` to a store; use `open_target`.

    Everything has a lifetime until `finish`. The lease on the run keeps servers from creating a run of this name.
    """

    def __init__(self, store: Store, run: str) -> None:
        self._store = store
        self._run = run
        self._holder = f"restore:{socket.gethostname()}:{os.getpid()}"
        self._adapters: list[str] = []
        self._payloads: list[str] = []

    async def add(self, section: Section) -> None:
        """Write one section. Raises `Conflict` if a server has taken the run."""
        await self._hold()
        writes, run = self._store.copying, self._run
        match section:
            case MomentSection(moment):
                await writes.remove_staged(run, self._adapters)
                self._adapters = moment.adapters
                await writes.write_moment(run, moment)
            case StreamSection(stream, entries):
                await writes.write_stream(_STREAMS[stream](run), entries)
            case FieldsSection(name, fields) if fields:
                await writes.write_hash(_HASHES[name](run), fields)
            case PromptsSection(adapter, bits):
                await writes.write_values({keys.prompts_done(run, adapter): bits})
            case PayloadsSection(frames):
                for piece in split_chunks(frames, lambda key: len(frames[key])):
                    await writes.write_values({key: frames[key] for key in piece})
                self._payloads += frames

    async def finish(self) -> None:
        """Let the run appear, durably."""
        await self._hold()
        await self._store.copying.keep_payloads(self._payloads)
        await self._store.copying.show(self._run, self._adapters)

    async def _hold(self) -> None:
        """Hold the lease on the run."""
        lease = await self._store.runs.take_lease(self._run, self._holder, LEASE_S)
        if lease.token is None:
            detail = f"run {self._run} is led by {lease.holder} on {self._store.connection.url}; it exists there"
            raise Conflict(detail, name="run", value=self._run)

    async def release(self) -> None:
        """Release the lease."""
        await self._store.runs.release_lease(self._run, self._holder)


@asynccontextmanager
async def open_target(store: Store, run: str) -> AsyncIterator[Target]:
    """Begin to restore a run. Raises `Conflict` if it exists, `Gone` while it is being deleted."""
    await store.copying.check_free(run)
    target = Target(store, run)
    try:
        yield target
    finally:
        await target.release()
