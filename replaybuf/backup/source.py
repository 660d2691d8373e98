"""Copy a run while it is live.

The copy is what Redis held at one moment, as after a crash then: the keys that change in place are read in one
transaction, which also says where both streams end; streams are read up to there. Groups that were freed since may
lack their payload, and trimming may shorten what is read. Then another moment is read; the payloads that are copied
already stay, so each round has little left to copy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from replaybuf.backup.section import (
    FieldsSection,
    MomentSection,
    PayloadsSection,
    PromptsSection,
    Sink,
    StreamSection,
    Summary,
)
from replaybuf.errors import Conflict, DataLost, LedgerGap, NotFound
from replaybuf.kernel.rows.index import DEAD, FREED
from replaybuf.kernel.state.run_state import RunState
from replaybuf.kernel.state.snapshot import decode_snapshot, restore
from replaybuf.store import Store, keys
from replaybuf.store.chunks import split_chunks
from replaybuf.store.copying import ENTRIES_AT_ONCE, Moment, StreamEntry
from replaybuf.store.entries import IndexChunk, read_chunk, read_stored
from replaybuf.store.redis.connection import text
from replaybuf.version import __version__
from replaybuf.wire.answer.samples import decode_samples
from replaybuf.wire.ledger import decode_record

MOST_ROUNDS = 20
SAMPLED_STEPS_AT_ONCE = 16
"""The samples of a step have 1 MB at most."""
LEDGER_ENTRIES_AT_ONCE = 16
"""A batch record may have 130 MB."""

Report = Callable[[int, int], None]
"""Called with the payloads copied so far, and those to copy in this round."""


class Source:
    """Copies run `run` of a store to a sink."""

    def __init__(self, store: Store, run: str, sink: Sink, report: Report = lambda *_: None) -> None:
        self._store = store
        self._run = run
        self._sink = sink
        self._report = report
        self._copied: set[str] = set()
        self._payload_bytes = 0
        self._gone: set[str] = set()

    async def copy(self) -> Summary:
        """Copy the run. Raises `NotFound`, `DataLost` for a run that lacks data, `Conflict` if it changes too fast."""
        store, run = self._store, self._run
        if not await store.runs.exists(run):
            raise NotFound(f"run {run} is not on {store.connection.url}", name="run", value=run)
        for _ in range(MOST_ROUNDS):
            taken_at, moment = time.time(), await store.copying.read_moment(run)
            try:
                held = await self._copy_keys(moment)
            except (DataLost, LedgerGap):
                if await self._trimmed_since(moment):
                    continue
                raise
            if await self._trimmed_since(moment):
                continue
            if await self._copy_payloads(held, moment.spill_url):
                return Summary(
                    run=run,
                    release=__version__,
                    taken_at=taken_at,
                    entries=moment.entries,
                    stored=moment.stored,
                    payloads=len(self._copied),
                    payload_bytes=self._payload_bytes,
                    missing=len(held.keys() - self._copied),
                )
        raise Conflict(
            f"run {run} freed or trimmed groups during each of {MOST_ROUNDS} rounds of the copy; pause the run",
            name="run",
            value=run,
            bound=MOST_ROUNDS,
        )

    async def _trimmed_since(self, moment: Moment) -> bool:
        """Return whether trimming may have removed entries that were to be read."""
        return await self._store.copying.read_value(keys.snapshot(self._run)) != moment.snapshot

    async def _copy_keys(self, moment: Moment) -> dict[str, int]:
        """Copy all keys but the payloads; return payload keys and frame sizes of the groups that are not freed."""
        run, reads = self._run, self._store.copying
        await self._sink.add(MomentSection(moment))
        fold = _Fold(run, moment)
        async for fields in reads.read_hash(keys.old_entries(run)):
            await self._sink.add(FieldsSection("old_entries", fields))
            fold.add_old(fields)
        fold.sort_old()
        async for entries in reads.read_stream(keys.index(run), moment.stored, ENTRIES_AT_ONCE):
            await self._sink.add(StreamSection("index", entries))
            fold.add_groups(entries)
        fold.start()
        async for entries in reads.read_stream(keys.ledger(run), moment.entries, LEDGER_ENTRIES_AT_ONCE):
            await self._sink.add(StreamSection("ledger", entries))
            fold.add_records(entries)
        # Not beyond the ledger: the restored run appends both under the same number.
        async for entries in reads.read_stream(keys.candidates(run), moment.entries, ENTRIES_AT_ONCE):
            await self._sink.add(StreamSection("candidates", entries))
        # Ids before bits: trimming sets the bit of a prompt first, and then removes its id.
        async for fields in reads.read_hash(keys.group_ids(run)):
            known = {name: number for name, number in fields.items() if int(number) <= moment.stored}
            await self._sink.add(FieldsSection("group_ids", known))
        for adapter in moment.adapters:
            if bits := await reads.read_value(keys.prompts_done(run, adapter)):
                await self._sink.add(PromptsSection(adapter, bits))
        async for entries in reads.read_stream(keys.evaluations(run), "+", ENTRIES_AT_ONCE):
            await self._sink.add(StreamSection("evaluations", entries))
        async for fields in reads.read_hash(keys.samples(run), SAMPLED_STEPS_AT_ONCE):
            # Not beyond the ledger: the restored run gives the entry of such a batch to another record.
            known = {step: raw for step, raw in fields.items() if _entry_of(raw) <= moment.entries}
            await self._sink.add(FieldsSection("samples", known))
        return fold.finish()

    async def _copy_payloads(self, held: dict[str, int], spill_url: bytes | None) -> bool:
        """Copy payloads that are not copied yet; return False if one is gone that may be freed by now.

        A payload that was gone in the round before is missing in the run itself: the service makes it a dead letter.
        """
        store, run = self._store, self._run
        # Keys of other runs are in malformed entries, which hold no payload.
        names = {key: name for key in held if (name := keys.payload_name(run, key))}
        sizes = {key: held[key] for key in names if key not in self._copied}
        gone: set[str] = set()
        files = store.groups.spilled.open(run, text(spill_url)) if spill_url else None
        try:
            for chunk in split_chunks(sizes, sizes.__getitem__):
                self._report(len(self._copied), len(held))
                frames = await store.groups.read_frames(run, {key: sizes[key] for key in chunk})
                present = {key: frame for key, frame in zip(chunk, frames, strict=True) if frame is not None}
                gone |= set(chunk) - present.keys()
                if present:
                    await self._sink.add(PayloadsSection({names[key]: frame for key, frame in present.items()}))
                self._copied |= present.keys()
                self._payload_bytes += sum(map(len, present.values()))
        finally:
            if files:
                store.groups.spilled.close(run, files)
        settled, self._gone = gone <= self._gone, gone
        return settled


def _entry_of(raw: bytes) -> float:
    """Return the ledger entry of the batch that samples are from; samples that do not decode are of none."""
    try:
        return decode_samples(raw).entry
    except (msgspec.MsgspecError, ValueError):
        return math.inf


class _Fold:
    """State of the run at a moment, to know which groups still have a payload."""

    def __init__(self, run: str, moment: Moment) -> None:
        self._run = run
        self._snapshot = None if moment.snapshot is None else decode_snapshot(moment.snapshot)
        self._moment = moment
        self._state = RunState()
        self._state.start_after(self._snapshot.trimmed if self._snapshot else 0)
        self._old: dict[int, bytes] = {}
        self._payload_keys: dict[int, str] = {}

    def add_old(self, fields: dict[bytes, bytes]) -> None:
        self._old |= {int(number): raw for number, raw in fields.items()}

    def sort_old(self) -> None:
        numbers = sorted(self._old)
        self._store(read_stored(np.array(numbers, np.int64), [self._old[number] for number in numbers], self._run))

    def add_groups(self, entries: Sequence[StreamEntry]) -> None:
        self._store(read_chunk(entries, self._run))

    def start(self) -> None:
        if self._snapshot:
            restore(self._state, self._snapshot)

    def add_records(self, entries: Sequence[StreamEntry]) -> None:
        for entry, fields in entries:
            number = int(entry.partition(b"-")[0])
            if number > self._state.entries:
                self._state.apply(number, decode_record(fields[1]))

    def finish(self) -> dict[str, int]:
        """Return payload keys and frame sizes of groups that are not freed. Raises `DataLost` for a gap."""
        end, expected = (self._state.entries, self._state.stored), (self._moment.entries, self._moment.stored)
        if end != expected:
            raise DataLost(
                f"the streams end at ledger entry {end[0]} and group {end[1]}; {expected[0]} and {expected[1]} "
                "were stored",
                name="entries",
                value=list(end),
                bound=list(expected),
            )
        index = self._state.index
        rows = np.flatnonzero((index["state"] != FREED) & (index["state"] != DEAD))
        numbers, sizes = index["number"][rows].tolist(), index["frame_bytes"][rows].tolist()
        held = {self._payload_keys[number]: size for number, size in zip(numbers, sizes, strict=True)}
        for number, names in self._state.pool.columns.late_of(numbers).items():
            key = self._payload_keys[number]
            held |= {keys.late_column(key, name): held[key] for name in names}
        return held

    def _store(self, chunk: IndexChunk) -> None:
        self._state.store(chunk.numbers, chunk.values, chunk.malformed)
        self._payload_keys |= {
            number: strings.payload_key for number, strings in zip(chunk.numbers.tolist(), chunk.strings, strict=True)
        }
