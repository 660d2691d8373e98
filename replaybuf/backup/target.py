"""Write the copy of a run to a Redis. The run appears there when all of it is written, or not at all."""

from __future__ import annotations

import os
import secrets
import socket
import time
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
from replaybuf.store.copying import STAGED_S, Restore

LEASE_S = 60.0
EXTEND_AFTER_S = STAGED_S / 4
"""Between two renewals of the lifetime of all keys. A pause between two sections is shorter, or the lease ends."""
_STREAMS = {
    "index": keys.index,
    "ledger": keys.ledger,
    "candidates": keys.candidates,
    "evaluations": keys.evaluations,
}
_HASHES = {"group_ids": keys.group_ids, "old_entries": keys.old_entries, "samples": keys.samples}


class Target:
    """A sink that writes run `run` to a store; use `open_target`.

    Everything has a lifetime until `finish`. The lease on the run keeps servers from creating a run of this name. It is
    taken once: each write compares and renews it, so a restore that lost it changes nothing more.
    """

    def __init__(self, store: Store, run: str) -> None:
        self._store = store
        self._run = run
        holder = f"restore:{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"
        self._restore = Restore(run, holder, LEASE_S)
        self._leased = False
        self._adapters: list[str] = []
        self._incarnation = 0
        self._payloads: list[str] = []
        self._extended_s = time.monotonic()

    async def add(self, section: Section) -> None:
        """Write one section. Raises `Conflict` if another process has taken the run."""
        if not self._leased:
            await self._take_lease()
        writes, run, restore = self._store.copying, self._run, self._restore
        match section:
            case MomentSection(moment):
                await writes.remove_staged(restore, [*self._adapters, *moment.adapters])
                self._adapters, self._incarnation = moment.adapters, moment.incarnation
                await writes.write_moment(restore, moment)
            case StreamSection(stream, entries):
                await writes.write_stream(restore, _STREAMS[stream](run), entries)
            case FieldsSection(name, fields) if fields:
                await writes.write_hash(restore, _HASHES[name](run), fields)
            case PromptsSection(adapter, bits):
                await writes.write_values(restore, {keys.prompts_done(run, adapter): bits})
            case PayloadsSection(frames):
                values = {keys.named_payload(run, name): frame for name, frame in frames.items()}
                await writes.write_values(restore, values)
                self._payloads += values
        if time.monotonic() - self._extended_s >= EXTEND_AFTER_S:
            await writes.extend_lifetimes(restore, self._adapters, self._payloads)
            self._extended_s = time.monotonic()

    async def finish(self) -> None:
        """Let the run appear, durably."""
        await self._store.copying.keep_payloads(self._restore, self._adapters, self._payloads)
        await self._store.copying.show(self._restore, self._incarnation)

    async def _take_lease(self) -> None:
        lease = await self._store.runs.take_lease(self._run, self._restore.holder, LEASE_S)
        if lease.token is None:
            detail = f"run {self._run} is led by {lease.holder} on {self._store.connection.url}; it exists there"
            raise Conflict(detail, name="run", value=self._run)
        self._leased = True

    async def release(self) -> None:
        """Release the lease."""
        await self._store.runs.release_lease(self._run, self._restore.holder)


@asynccontextmanager
async def open_target(store: Store, run: str) -> AsyncIterator[Target]:
    """Begin to restore a run. Raises `Conflict` if it exists, `Gone` while it is being deleted."""
    await store.copying.check_free(run)
    target = Target(store, run)
    try:
        yield target
    finally:
        await target.release()
