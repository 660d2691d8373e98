"""Bringing the state of a run back from Redis: snapshot, entries set aside, index stream; the ledger's rest follows."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from replaybuf.kernel.snapshot import Snapshot, decode_snapshot, restore
from replaybuf.kernel.state import RunState
from replaybuf.store import Store


async def load_state(store: Store, run: str, state: RunState, through: int | None = None) -> Snapshot | None:
    """Bring an empty state to the ledger entry of the run's snapshot, which is returned; without one, to entry 0.

    `through` is the last group that is confirmed; those that the snapshot knows were confirmed before it.
    """
    raw = await store.snapshots.read(run)
    snapshot = None if raw is None else decode_snapshot(raw)
    state.start_after(snapshot.trimmed if snapshot else 0)
    state.index.reserve((await store.counters.read(run)).get("stored", 0) - state.trimmed)
    if through is not None and snapshot:
        through = max(through, snapshot.stored)
    with _no_collection():
        if snapshot:
            async for chunk in store.snapshots.read_old_entries(run):
                state.store(chunk.numbers, chunk.values, chunk.malformed)
        async for chunk in store.groups.read_index(run, state.trimmed, through):
            state.store(chunk.numbers, chunk.values, chunk.malformed)
    if snapshot:
        restore(state, snapshot)
    return snapshot


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
