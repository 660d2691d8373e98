"""Describe a recorded batch; explain the order of its choice, and its packing from the lengths in the index alone.

Payloads are not read, so a batch whose bytes are freed is packed again as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from replaybuf.packing.batches import PackedGroups, completed
from replaybuf.packing.cost import TYPICAL
from replaybuf.packing.pack import Row, pack
from replaybuf.store import IndexEntry
from replaybuf.wire.answer.browse import StepRecord, UsedGroup
from replaybuf.wire.answer.explain import MOST_ROWS, Choice, ChosenGroup, PackedRank, PackedRow, Packing, ShownLayout
from replaybuf.wire.decoding import prepared
from replaybuf.wire.ledger import BatchEntry, BatchRecord, pieces_of

Lengths = npt.NDArray[np.int32]

_SCORES = ("reward_mean", "reward_std", "advantage_abs_mean")


def explain_record(
    record: BatchRecord,
    index_entries: Sequence[IndexEntry],
    shown: int,
    layout: ShownLayout | None,
    when: Literal["assembled", "attached"],
) -> tuple[Choice, Packing | None]:
    """Return the choice and the packing of a batch; a `layout` needs the index entries of all its groups in `found`."""
    entries = {entry.number: entry for entry in index_entries}
    packing = describe_packing(record, entries, layout, when) if layout else None
    return describe_choice(record, entries, shown), packing


def describe_choice(record: BatchRecord, entries: Mapping[int, IndexEntry], shown: int) -> Choice:
    """Sum up the groups of a batch and list the first ones; `entries` of the index, by number."""
    groups = record.groups
    return Choice(
        groups=len(groups),
        rollouts=record.rollouts,
        tokens=record.tokens,
        staleness=_count(group.staleness for group in groups),
        times_sampled=_count(group.times_sampled for group in groups),
        adapters=dict(Counter(group.adapter for group in groups)),
        first=[_describe(group, entries.get(group.number), record.at_s) for group in groups[:shown]],
    )


def _count(values: Iterable[int]) -> dict[str, int]:
    return {str(value): count for value, count in sorted(Counter(values).items())}


def _describe(group: BatchEntry, entry: IndexEntry | None, at_s: float) -> ChosenGroup:
    known: dict[str, float] = {}
    if entry is not None:
        known = {name: float(entry.values[name]) for name in _SCORES}
        known["age_s"] = round(at_s - float(entry.values["arrival_s"]), 3)
    return ChosenGroup(
        group_id=group.group_id,
        prompt_id=group.prompt_id,
        adapter=group.adapter,
        policy_version=group.policy_version,
        staleness=group.staleness,
        times_sampled=group.times_sampled,
        tokens=group.tokens,
        weight=group.weight,
        **known,
    )


def describe_packing(
    record: BatchRecord, entries: Mapping[int, IndexEntry], layout: ShownLayout, when: Literal["assembled", "attached"]
) -> Packing:
    """Pack a batch for a layout. `entries`: the index entries of all its groups, by number."""
    own = [np.frombuffer(entries[group.number].strings.lengths, "<i4") for group in record.groups]
    lengths = np.minimum(np.concatenate(own), layout.seq_len).astype(np.int32)
    names = sorted({group.adapter for group in record.groups})
    codes = np.repeat([names.index(group.adapter) for group in record.groups], [len(row) for row in own])
    adapters = codes.astype(np.int32) if len(names) > 1 else None
    grid = pack(lengths, layout.seq_len, layout.dp_world_size, layout.cost or TYPICAL, adapters)
    micro_batches = len(grid[0])
    places = micro_batches * layout.seq_len
    listed = micro_batches * len(grid) <= MOST_ROWS
    return Packing(
        layout=when,
        dp_world_size=layout.dp_world_size,
        seq_len=layout.seq_len,
        pad_to_multiple_of=layout.pad_to_multiple_of,
        micro_batches=micro_batches,
        fill=_share(int(lengths.sum(dtype=np.int64)), places * len(grid)),
        ranks=[_describe_rank(number, rows, lengths, codes, names, places, listed) for number, rows in enumerate(grid)],
    )


def _describe_rank(
    number: int,
    rows: Sequence[Row],
    lengths: Lengths,
    codes: npt.NDArray[np.int64],
    names: Sequence[str],
    places: int,
    listed: bool,
) -> PackedRank:
    tokens = [int(lengths[row].sum(dtype=np.int64)) for row in rows]
    packed = [
        PackedRow(len(row), size, names[codes[row[0]]] if row else "") for row, size in zip(rows, tokens, strict=True)
    ]
    rollouts = sum(map(len, rows))
    fill = _share(sum(tokens), places)
    return PackedRank(dp_rank=number, rollouts=rollouts, tokens=sum(tokens), fill=fill, rows=packed if listed else [])


def _share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0


def describe_batch(
    run: str, record: BatchRecord, state: Literal["assembled", "acked", "voided"], packed: PackedGroups | None
) -> StepRecord:
    """Build the record of a batch. `packed` has the packing figures; they are null if it is None."""
    tokens: Counter[str] = Counter()
    for entry in record.groups:
        tokens[entry.adapter] += entry.tokens
    return StepRecord(
        run=run,
        step=record.step,
        generation=record.generation,
        batch_id=record.batch_id,
        digest=record.digest,
        state=state,
        version=record.version,
        strategy=record.strategy,
        options=record.options,
        seed=record.seed,
        tokens=record.tokens,
        rollouts=record.rollouts,
        padding_fraction=1.0 - packed.tokens / sum(packed.padded_rows()) if packed else None,
        micro_batches=packed.micro_batches if packed else None,
        filler_micro_batches=packed.fillers if packed else None,
        dp_world_size=packed.layout.dp_world_size if packed else None,
        adapter_tokens=dict(tokens),
        adapters=record.adapters or None,
        adapters_completed=completed(record) if record.adapters else None,
        short=record.short or None,
        fill=record.fill,
        stale_token_mask=record.stale_token_mask,
        masked_tokens=None if record.stale_token_mask is None else record.masked_tokens,
        late_columns=record.late_columns,
        groups=[used for piece in pieces_of(record.groups) for used in _convert(piece)],
    )


def _convert(groups: list[BatchEntry]) -> list[UsedGroup]:
    return msgspec.convert(groups, prepared(list[UsedGroup]), from_attributes=True)
