"""Bringing the state of a run back from Redis: snapshot, entries set aside, index stream; the ledger's rest follows."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from replaybuf.snapshot import Snapshot, decode_snapshot, restore
from replaybuf.state import RunState
from replaybuf.store import IndexEntry, Store

if TYPE_CHECKING:
    from replaybuf.service.journal import Journal


async def load_state(store: Store, run: str, state: RunState) -> Snapshot | None:
    """Bring an empty state to the ledger entry of the run's snapshot, which is returned; without one, to entry 0."""
    raw = await store.read_snapshot(run)
    snapshot = None if raw is None else decode_snapshot(raw)
    state.start_behind(snapshot.trimmed if snapshot else 0)
    state.index.reserve((await store.counts(run)).get("stored", 0) - state.trimmed)
    with _no_collection():
        if snapshot:
            async for chunk in store.read_set_aside(run):
                state.store(chunk.numbers, chunk.values, chunk.malformed)
        async for chunk in store.read_index(run, state.trimmed):
            state.store(chunk.numbers, chunk.values, chunk.malformed)
    if snapshot:
        restore(state, snapshot)
    return snapshot


async def forget_set_aside(journal: Journal, freed: Sequence[IndexEntry]) -> None:
    """Delete entries of freed groups that trimming had set aside, and keep a bit of their prompts."""
    if freed:
        await journal.store.mark_done(journal.name, journal.token, ticketed(freed))
        await journal.store.drop_set_aside(journal.name, [entry.number for entry in freed])


def ticketed(entries: Sequence[IndexEntry]) -> list[tuple[str, int, int]]:
    """List adapter, prompt index and number of the groups that came with a ticket."""
    return [(e.strings.adapter, int(e.values["prompt_index"]), e.number) for e in entries if e.strings.ticket]


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector off: it would walk the lists of every chunk, and none is garbage (1.6x slower)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
