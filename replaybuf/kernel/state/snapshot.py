"""Snapshot of the state at one ledger entry: all of it that the index stream alone does not give.

::

    b"RBS4"   20 digits: the ledger entry   zlib of msgpack: `Snapshot`

To write one: `freeze` the state, `thaw` and `encode_snapshot` in a thread; `take` does the first two at once. To load
one: `decode_snapshot`, fold the entries set aside and the index stream behind `trimmed`, call `restore`, then fold the
ledger behind `entries`. Groups that did not change since they were stored are not in it: a million live ones cost
nothing.
"""

from __future__ import annotations

import zlib
from collections import Counter
from typing import Any

import msgspec
import numpy as np

from replaybuf.errors import DataLost, Unreadable, counted
from replaybuf.kernel.figures.step_figures import StepFigures
from replaybuf.kernel.rows.index import DEAD, FREED, LATE_ROW, LIVE, STATE_ROW
from replaybuf.kernel.rows.prompt_set import PromptSet
from replaybuf.kernel.state.failed_prompts import FailedPrompts, FailedWindow
from replaybuf.kernel.state.group_counts import AdapterCounts
from replaybuf.kernel.state.history import AttachedTrainer, BatchState, RecordedBatch, VoidedBatch
from replaybuf.kernel.state.reissues import Reissues
from replaybuf.kernel.state.rotation import Rotation
from replaybuf.kernel.state.run_state import RunPhase, RunState
from replaybuf.wire.config import read_config, recorded
from replaybuf.wire.ledger import FailedPromptRecord

MAGIC = b"RBS4"
"""Format and version; snapshots of other versions are rejected."""
_HEADER_BYTES = len(MAGIC) + 20
_FASTEST = 1


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Fields of `RunState` and its pool, most under their names, and what else a reader needs.

    `config`: as the ledger has it; `failed_prompts`, `newest_failed`, `failed_start`, `failed_after`: of
    `RunState.failed`; `reissued`, `waiting`: of `RunState.reissues`;
    `rows`: `STATE_ROW` of changed groups; `late_rows`: `LATE_ROW` of groups with late columns; `set_aside`: int64,
    numbers up to `trimmed` of groups that are not freed; `sizes`: only if groups may be partial.
    """

    entries: int
    trimmed_entries: int
    config: dict[str, Any] | None
    config_phase: RunPhase = msgspec.field(name="config_state")
    phase_reason: str | None = msgspec.field(name="config_reason")
    attachment: AttachedTrainer | None
    step: int
    next_step: int
    generation: int
    published: dict[str, int]
    weights_uri: dict[str, str | None]
    batches: dict[int, BatchState]
    records: dict[int, RecordedBatch]
    voided: dict[int, list[VoidedBatch]]
    checkpoints: list[int]
    feedback: dict[int, bytes]
    rewinds: dict[str, list[tuple[int, int]]]
    rotation: Rotation
    failed_prompts: PromptSet
    max_uses: int | None
    reasons: list[str]
    freed_as: bytearray
    counts: dict[int, AdapterCounts]
    stale_adapters: set[int]
    newest_failed: list[FailedPromptRecord] = msgspec.field(name="failed")
    stored: int
    trimmed: int
    groups_used: int
    set_aside: bytes
    rows: bytes
    sizes: dict[int, Counter[int]] = {}
    masked_tokens: int = 0
    fenced_epoch: int = 0
    failed_start: int = 0
    failed_after: list[int] = []
    reissued: list[PromptSet] = []
    waiting: list[tuple[str, int]] = []
    late_names: list[str] = []
    late_rows: bytes = b""
    figures: StepFigures = msgspec.field(default_factory=StepFigures)


_OF_POOL = ("max_uses", "reasons", "freed_as", "counts", "stale_adapters")
_OF_FAILED = ("failed_prompts", "newest_failed", "failed_start", "failed_after")
_OF_INDEX = ("stored", "trimmed", "groups_used", "set_aside", "rows", "sizes", "late_names", "late_rows")
_OTHERS = {"config", "reissued", "waiting", *_OF_POOL, *_OF_FAILED, *_OF_INDEX}
_OF_STATE = tuple(name for name in Snapshot.__struct_fields__ if name not in _OTHERS)


def _to_bytes(value: Any) -> Any:
    return value.bits if isinstance(value, PromptSet) else value.tobytes()


def _from_bytes(kind: Any, value: Any) -> Any:
    if kind is PromptSet:
        return PromptSet(value)
    return Counter(value) if getattr(kind, "__origin__", None) is Counter else np.frombuffer(value, np.int64).copy()


_encode = msgspec.msgpack.Encoder(enc_hook=_to_bytes).encode
_decode = msgspec.msgpack.Decoder(Snapshot, dec_hook=_from_bytes).decode


def take(state: RunState) -> Snapshot:
    """Take a snapshot of a state; later changes of the state do not touch it."""
    return thaw(freeze(state))


def freeze(state: RunState) -> bytes:
    """Copy a state as msgpack, which `thaw` makes a snapshot of. A thread may do that: it takes twice as long."""
    index, pool = state.index, state.pool
    numbers = index["number"]
    groups_used = state.totals.groups_used  # first: it brings the histograms up to date
    snapshot = Snapshot(
        **{name: getattr(state, name) for name in _OF_STATE},
        **{name: getattr(pool, name) for name in _OF_POOL},
        config=None if state.config is None else recorded(state.config),
        failed_prompts=state.failed.prompts,
        newest_failed=list(state.failed.newest.values()),
        stored=state.stored,
        trimmed=state.trimmed,
        groups_used=groups_used,
        set_aside=numbers[(index["state"] != FREED) & (numbers <= state.trimmed)].tobytes(),
        rows=index.changed().tobytes(),
        failed_start=state.failed.window.start,
        failed_after=state.failed.window.after,
        reissued=state.reissues.rounds,
        waiting=list(state.reissues.waiting),
        sizes=pool.sizes if state.config and state.config.min_group_size else {},
        late_names=pool.columns.late_names,
        late_rows=index.late_rows().tobytes(),
    )
    return _encode(snapshot)


thaw = _decode


def restore(state: RunState, snapshot: Snapshot) -> None:
    """Bring a state to the ledger entry of a snapshot, whose objects it owns from then on.

    `state` has begun behind `snapshot.trimmed`, has folded the entries set aside and the whole index stream, and no
    ledger record. Raises `DataLost` if groups of the snapshot are missing.
    """
    if state.trimmed != snapshot.trimmed or state.stored < snapshot.stored:
        detail = (
            f"the index stream ends at group {state.stored}; the snapshot at ledger entry {snapshot.entries} has "
            f"{counted(snapshot.stored, 'group')}: Redis lost data"
        )
        raise DataLost(detail, name="stored", value=state.stored, bound=snapshot.stored)
    for name in _OF_STATE:
        setattr(state, name, getattr(snapshot, name))
    state.config = None if snapshot.config is None else read_config(snapshot.config, "the snapshot")
    state.failed = FailedPrompts(
        snapshot.failed_prompts,
        {(failed.adapter, failed.prompt_index): failed for failed in snapshot.newest_failed},
        FailedWindow(snapshot.failed_start, snapshot.failed_after),
    )
    state.reissues = Reissues(snapshot.reissued, dict.fromkeys(snapshot.waiting))
    _restore_pool(state, snapshot)


def _restore_pool(state: RunState, snapshot: Snapshot) -> None:
    index, pool = state.index, state.pool
    freed_as = pool.freed_as
    freed_as[: len(snapshot.freed_as)] = snapshot.freed_as
    for name in _OF_POOL:
        setattr(pool, name, getattr(snapshot, name))
    pool.freed_as, pool.counted = freed_as, snapshot.stored
    fresh = index["number"] > snapshot.stored
    pool.sizes = snapshot.sizes
    pool.count_stored(index["adapter"][fresh], index["rollouts"][fresh])
    state.resolve_prompts(index["adapter"][fresh], index["prompt_index"][fresh])
    bad = np.flatnonzero(fresh & (index["state"] == DEAD))  # dead before any ledger record: by the index entry
    if len(bad):
        index["state"][bad] = LIVE
        pool.dead_letter(bad, "bad_index_entry", None, 0.0)
    freed = np.flatnonzero(np.frombuffer(freed_as, np.uint8)) + state.trimmed
    aside = index["number"][index["number"] <= state.trimmed]
    expected = np.frombuffer(snapshot.set_aside, np.int64)
    missing = np.setdiff1d(expected, aside)
    if len(missing):
        detail = f"group {missing[0]} was set aside by a trimming and is missing: Redis lost data"
        raise DataLost(detail, name="number", value=int(missing[0]))
    index.free(index.rows_of(np.concatenate([np.setdiff1d(aside, expected), freed])))
    pool.columns.late_names = snapshot.late_names
    index.put_late(np.frombuffer(snapshot.late_rows, LATE_ROW))
    index.put(np.frombuffer(snapshot.rows, STATE_ROW))
    pool.live.forget()


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """Write a snapshot as bytes."""
    return MAGIC + b"%020d" % snapshot.entries + zlib.compress(_encode(snapshot), _FASTEST)


def decode_snapshot(raw: bytes) -> Snapshot:
    """Read a snapshot. Raises `Unreadable` for another version and for bytes that do not decode."""
    if raw[: len(MAGIC)] != MAGIC:
        detail = f"the snapshot has format {raw[: len(MAGIC)]!r}; this release reads {MAGIC!r}"
        raise Unreadable(detail, name="snapshot", value=repr(raw[: len(MAGIC)]), bound=repr(MAGIC))
    try:
        return _decode(zlib.decompress(raw[_HEADER_BYTES:]))
    except (zlib.error, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unreadable(f"the snapshot does not decode: {error}", name="snapshot", value=len(raw)) from error
