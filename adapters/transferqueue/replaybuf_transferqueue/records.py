"""Records of pieces, and what a restore finds when it compares them with a controller."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from transfer_queue import BatchMeta

from replaybuf.errors import counted
from replaybuf.wire.decoding import prepared
from replaybuf_transferqueue.store import Store
from replaybuf_transferqueue.values import decode

Names = dict[int, dict[str, list[Any]]]
"""Index -> field -> [piece, offset, length, CRC]: what the controller keeps of each field of each sample."""


class Field(msgspec.Struct, frozen=True, array_like=True):
    """One field in a piece: its bytes, and what the controller wants to know of a tensor."""

    offset: int
    length: int
    crc: int
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    is_nested: bool = False

    @classmethod
    def describe(cls, offset: int, payload: bytes, value: Any, schema: Mapping[str, Any]) -> Field:
        """Describe a value that was encoded as `payload`."""
        crc = zlib.crc32(payload)
        if not isinstance(value, torch.Tensor):
            return cls(offset, len(payload), crc)
        # TransferQueue reports a scalar as a tensor of one element.
        shape = tuple(value.shape) or (1,)
        return cls(offset, len(payload), crc, str(value.dtype), shape, bool(schema.get("is_nested")))


class Record(msgspec.Struct, frozen=True, array_like=True):
    """Where a piece belongs: `index` is that of its put; a restore may give the sample another one."""

    partition: str
    index: int
    key: str | None
    tag: bytes
    fields: dict[str, Field]

    def names(self, piece: str) -> dict[str, list[Any]]:
        """Return what the controller keeps of each field."""
        return {name: [piece, field.offset, field.length, field.crc] for name, field in self.fields.items()}


class Later(msgspec.Struct, frozen=True):
    """A sample of which the store has acknowledged fields that the controller lacks.

    `index`: that of the controller, if it knows other fields of the sample.
    """

    partition: str
    key: str | None
    index: int | None
    pieces: tuple[str, ...]
    tag: dict[str, Any]
    names: dict[str, list[Any]]
    fields: dict[str, Field]

    @property
    def shape_of_put(self) -> tuple[str, bool, tuple[str, ...]]:
        """What samples must have in common to be reported together."""
        return self.partition, self.key is None and self.index is None, tuple(sorted(self.names))


class Missing(msgspec.Struct, frozen=True):
    """A sample of the controller with values that the store does not hold."""

    partition: str
    key: str | None
    index: int
    fields: tuple[str, ...]


class Restored(msgspec.Struct, frozen=True):
    """What a restore found.

    - `samples`: those of the controller that have values; `values`: their fields, all read by length
    - `missing`: samples whose values the store lacks, and which fields
    - `later`: samples with acknowledged fields that the controller lacked; `kept`: whether they were given to it
    - `adopted`: pieces that the controller names, and their indexes; `unnamed`: all other pieces of living samples
    """

    samples: int
    values: int
    missing: tuple[Missing, ...]
    later: tuple[Later, ...]
    kept: bool = False
    adopted: tuple[tuple[str, int], ...] = ()
    unnamed: tuple[str, ...] = ()

    def __str__(self) -> str:
        shown = "; ".join(
            f"{sample.partition}/{sample.key or sample.index}: {', '.join(sample.fields)}"
            for sample in self.missing[:5]
        )
        return (
            f"{counted(self.samples, 'sample')} with {counted(self.values, 'value')}; "
            f"{counted(len(self.missing), 'sample')} without all values{f' ({shown})' if shown else ''}; "
            f"{counted(len(self.later), 'sample')} put later, {'kept' if self.kept else 'left out'}"
        )


def reconcile(store: Store, metas: Sequence[BatchMeta], keys: Mapping[int, str | None]) -> Restored:
    """Compare the values that the controller names with those that the store holds. Changes nothing."""
    named: dict[str, int] = {}
    ends: dict[str, int] = {}
    samples: dict[int, tuple[str, dict[str, list[Any]]]] = {}
    for meta in metas:
        for index, partition, fields in zip(
            meta.global_indexes, meta.partition_ids, meta._custom_backend_meta, strict=True
        ):
            if fields:
                samples[index] = (partition, fields)
            for piece, offset, length, _ in fields.values():
                named[piece] = index
                ends[piece] = max(ends.get(piece, 0), offset + length)
    held = dict(zip(ends, store.lengths(list(ends)), strict=True))
    missing = [
        Missing(partition, keys.get(index), index, tuple(lost))
        for index, (partition, fields) in samples.items()
        if (lost := sorted(field for field, (piece, *_) in fields.items() if held[piece] < ends[piece]))
    ]
    records = {piece: msgspec.json.decode(data, type=prepared(Record)) for piece, data in store.records().items()}
    alive = records.keys() - store.deaths() - named.keys()
    return Restored(
        len(samples),
        sum(len(fields) for _, fields in samples.values()),
        tuple(missing),
        tuple(_later(store, records, alive, {index: fields for index, (_, fields) in samples.items()})),
        adopted=tuple(named.items()),
        unnamed=tuple(alive),
    )


def _later(
    store: Store, records: Mapping[str, Record], alive: set[str], samples: Mapping[int, dict[str, list[Any]]]
) -> list[Later]:
    owner = {name[0]: index for index, fields in samples.items() for name in fields.values()}
    later = []
    for pieces in store.at().values():
        # Pieces of one index belong to one sample, unless somebody cleared the controller and not the store.
        samples_here: dict[tuple[str, str | None], list[str]] = {}
        for piece in pieces:
            if piece in alive or piece in owner:
                samples_here.setdefault((records[piece].partition, records[piece].key), []).append(piece)
        for whose, own in samples_here.items():
            index = next((owner[piece] for piece in own if piece in owner), None)
            sample = _merge(whose, index, {piece: records[piece] for piece in own}, samples.get(index, {}))  # type: ignore[arg-type]
            if sample.names:
                later.append(sample)
    return later


def _merge(
    whose: tuple[str, str | None], index: int | None, records: Mapping[str, Record], named: Mapping[str, list[Any]]
) -> Later:
    """Find the newest value of each field, and keep those that the controller does not name."""
    tag: dict[str, Any] = {}
    names: dict[str, list[Any]] = {}
    fields: dict[str, Field] = {}
    for piece, record in records.items():
        tag |= decode(record.tag, "tag")
        names |= record.names(piece)
        fields |= record.fields
    fresh = {field: name for field, name in names.items() if named.get(field) != name}
    pieces = tuple(sorted({name[0] for name in fresh.values()}))
    return Later(*whose, index, pieces, tag, fresh, {field: fields[field] for field in fresh})
