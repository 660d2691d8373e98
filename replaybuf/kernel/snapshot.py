"""A snapshot of the fold at one ledger entry: everything of a run's state that the index stream alone does not tell.

::

    b"RBS4"   20 digits: the ledger entry   zlib of msgpack: `Snapshot`

State = `restore`(`take`(state), rows of the index stream behind `trimmed` and those set aside) and the ledger behind
`entries`. Groups that are as they were stored are not in it: a million live groups cost nothing.
"""

from __future__ import annotations

import copy
import zlib
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from replaybuf.errors import DataLost, Unreadable
from replaybuf.kernel.histograms import GroupHistograms, ages_ms
from replaybuf.kernel.index import DEAD, FREED, STATE_ROW
from replaybuf.kernel.prompt_set import PromptSet
from replaybuf.kernel.rotation import Rotation
from replaybuf.kernel.state import BAD_INDEX_ENTRY, RunState
from replaybuf.kernel.state_view import AdapterCounts, Attachment, BatchState, VoidedBatch
from replaybuf.wire.config import RunConfig
from replaybuf.wire.ledger import TicketRecord

MAGIC = b"RBS4"
"""Format and version: what is not this is refused, never guessed at."""
_HEADER_BYTES = len(MAGIC) + 20
_FASTEST = 1


class BatchPart(msgspec.Struct, frozen=True, array_like=True):
    """A `BatchState`; `numbers` int64 [n] and `earlier` int64 [m, 2] as bytes."""

    step: int
    entry: int
    generation: int
    numbers: bytes
    earlier: bytes
    acked: bool
    rotation: Rotation


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `RunState` under their names; what is long is packed.

    `rows`: `STATE_ROW` of groups that changed since they were stored; `set_aside`: int64, numbers up to `trimmed` that
    are not freed; `records`: int64 [n, 4] of step, entry, generation, groups; `failed_prompts`: bits of a
    `PromptSet`.
    """

    entries: int
    stored: int
    trimmed: int
    trimmed_entries: int
    config: RunConfig | None
    config_state: str
    config_reason: str | None
    max_uses: int | None
    attachment: Attachment | None
    step: int
    next_step: int
    generation: int
    published: dict[str, int]
    weights_uri: dict[str, str | None]
    batches: list[BatchPart]
    records: bytes
    voided: dict[int, list[VoidedBatch]]
    checkpoints: list[int]
    feedback: dict[int, bytes] = {}
    rewinds: dict[str, list[tuple[int, int]]]
    rotation: Rotation
    standings: dict[int, AdapterCounts]
    failed_prompts: dict[str, bytes]
    failures: list[TicketRecord] = []
    retired: int
    evicted: dict[str, int]
    dead_lettered: dict[str, int]
    evicted_since_batch: dict[str, int]
    used_staleness: dict[int, int]
    groups_used: int
    uses: int
    tokens_used: int
    tallies: GroupHistograms
    reasons: list[str]
    freed_as: bytes
    set_aside: bytes
    rows: bytes


_COUNTERS = ("evicted", "dead_lettered", "evicted_since_batch", "used_staleness")
_PACKED = (
    "stored",
    "trimmed",
    "batches",
    "records",
    "failed_prompts",
    "failures",
    "tallies",
    "reasons",
    "freed_as",
    "set_aside",
    "rows",
)
_COPIED = tuple(name for name in Snapshot.__struct_fields__ if name not in (*_COUNTERS, *_PACKED))
"""Fields that are the same in both."""
_NESTED = ("standings", "voided")
"""Those of them in which the fold changes what they hold; to copy all that deeply takes a hundred times as long."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Snapshot).decode


def take(state: RunState) -> Snapshot:
    """Take a snapshot of a state; later changes of the state do not touch it."""
    numbers = state.index["number"]
    aside = numbers[(state.index["state"] != FREED) & (numbers <= state.trimmed)]
    records = [(step, entry, *state.made[step]) for step, entry in state.records.items()]
    batches = [
        BatchPart(
            step,
            batch.entry,
            batch.generation,
            batch.numbers.tobytes(),
            np.array(list(batch.earlier.items()), np.int64).tobytes(),
            batch.acked,
            batch.rotation,
        )
        for step, batch in state.batches.items()
    ]
    tallies = copy.deepcopy(state.histograms)  # first: this counts new groups in the standings too
    copied = _copied(state) | {name: dict(getattr(state, name)) for name in _COUNTERS}
    return Snapshot(
        **copied,
        stored=state.stored,
        trimmed=state.trimmed,
        batches=batches,
        records=np.array(records, np.int64).tobytes(),
        tallies=tallies,
        failed_prompts=state.failed_prompts.bits,
        failures=list(state.failures.values()),
        reasons=list(state.reasons),
        freed_as=bytes(state.freed_as),
        set_aside=aside.tobytes(),
        rows=state.index.changed().tobytes(),
    )


def restore(state: RunState, snapshot: Snapshot) -> None:
    """Bring a state to the ledger entry of a snapshot.

    `state` has begun behind `snapshot.trimmed` and taken in the groups set aside, then the whole index stream, and no
    ledger record. Raises `DataLost` where groups are missing that the snapshot knows.
    """
    if state.trimmed != snapshot.trimmed or state.stored < snapshot.stored:
        raise DataLost(
            f"the index stream ends at group {state.stored}; the snapshot at ledger entry {snapshot.entries} knows "
            f"{snapshot.stored}: Redis lost data",
            name="stored",
            value=state.stored,
            bound=snapshot.stored,
        )
    for name, value in _copied(snapshot).items():
        setattr(state, name, value)
    for name in _COUNTERS:
        setattr(state, name, Counter(getattr(snapshot, name)))
    state.batches = {part.step: _batch(part) for part in snapshot.batches}
    records = _numbers(snapshot.records).reshape(-1, 4).tolist()
    state.records = {step: entry for step, entry, _, _ in records}
    state.made = {step: (generation, groups) for step, _, generation, groups in records}
    state.failed_prompts = PromptSet(snapshot.failed_prompts)
    state.failures = {(failed.adapter, failed.prompt_index): failed for failed in snapshot.failures}
    state.resume_histograms(copy.deepcopy(snapshot.tallies), snapshot.stored)
    _restore_rows(state, snapshot)


def _restore_rows(state: RunState, snapshot: Snapshot) -> None:
    index = state.index
    fresh = index["number"] > snapshot.stored
    # What came after the snapshot and is dead already is so by its index entry alone.
    bad = np.flatnonzero(fresh & (index["state"] == DEAD))
    state.reasons = list(snapshot.reasons)
    if len(bad):
        if BAD_INDEX_ENTRY not in state.reasons:
            state.reasons.append(BAD_INDEX_ENTRY)
        index["reason"][bad] = state.reasons.index(BAD_INDEX_ENTRY)
        state.dead_lettered[BAD_INDEX_ENTRY] += len(bad)
        state.histograms.drop(index, bad, BAD_INDEX_ENTRY, 0, ages_ms(index["arrival_s"][bad], 0.0))
    state.count_stored(index["adapter"][fresh])
    state.forgive(index["adapter"][fresh], index["prompt_index"][fresh])
    state.freed_as[: len(snapshot.freed_as)] = snapshot.freed_as
    freed = np.flatnonzero(np.frombuffer(state.freed_as, np.uint8)) + state.trimmed
    aside = index["number"][index["number"] <= state.trimmed]
    held = _numbers(snapshot.set_aside)
    missing = np.setdiff1d(held, aside)
    if len(missing):
        raise DataLost(
            f"group {missing[0]} was set aside by a trimming and is not there: Redis lost data",
            name="number",
            value=int(missing[0]),
        )
    index.free(index.rows_of(np.concatenate([np.setdiff1d(aside, held), freed])))
    index.put(np.frombuffer(snapshot.rows, STATE_ROW))
    state.recount()


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """Write a snapshot as bytes."""
    return MAGIC + b"%020d" % snapshot.entries + zlib.compress(_encode(snapshot), _FASTEST)


def decode_snapshot(raw: bytes) -> Snapshot:
    """Read a snapshot. Raises `Unreadable` for another version or for bytes that are none."""
    if raw[: len(MAGIC)] != MAGIC:
        raise Unreadable(
            f"the snapshot has format {raw[: len(MAGIC)]!r}; this release reads {MAGIC!r}",
            name="snapshot",
            value=repr(raw[: len(MAGIC)]),
            bound=repr(MAGIC),
        )
    try:
        return _decode(zlib.decompress(raw[_HEADER_BYTES:]))
    except (zlib.error, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unreadable(f"the snapshot does not decode: {error}", name="snapshot", value=len(raw)) from error


def _copied(source: RunState | Snapshot) -> dict[str, Any]:
    return {name: (copy.deepcopy if name in _NESTED else copy.copy)(getattr(source, name)) for name in _COPIED}


def _batch(part: BatchPart) -> BatchState:
    numbers, steps = _numbers(part.earlier).reshape(-1, 2).T.tolist()
    earlier = dict(zip(numbers, steps, strict=True))
    return BatchState(part.entry, part.generation, _numbers(part.numbers), earlier, part.acked, part.rotation)


def _numbers(raw: bytes) -> npt.NDArray[np.int64]:
    numbers: npt.NDArray[np.int64] = np.frombuffer(raw, np.int64).copy()
    return numbers
