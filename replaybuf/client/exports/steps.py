"""Batches of an export: those of the recorded steps, with the bytes that the service sent, or of all groups anew."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache

import msgspec

from replaybuf.client.exports.reader import ExportReader
from replaybuf.client.offline import Layout, batch_of_groups, recorded_batch
from replaybuf.errors import Invalid
from replaybuf.wire.config import BatchSpec, RowMultiple, RowTokens, RunConfig
from replaybuf.wire.decoding import prepared
from replaybuf.wire.group import Group
from replaybuf.wire.ledger import AckRecord, AttachRecord, BatchRecord

FILES_KEPT = 8

_decode = msgspec.json.Decoder(BatchRecord | AttachRecord | AckRecord).decode


class BatchRows(msgspec.Struct, frozen=True):
    """The bounded part of a recorded layout: tokens of a row, and what their number is a multiple of."""

    seq_len: RowTokens
    pad_to_multiple_of: RowMultiple


class RecordedSteps:
    """The batches of the surviving history, by step. `missing`: by step that lacks a group, the id of the first.

    A body has the layout of the trainer that acked the step, for any number of ranks. Memory holds the places of all
    groups and `FILES_KEPT` files.
    """

    def __init__(self, reader: ExportReader) -> None:
        self._reader = reader
        self._read_groups = lru_cache(FILES_KEPT)(reader.read_groups)
        self._layouts = self._read_layouts()
        places = {name: file for file in self._group_files() for name in self._with_rollouts(file)}
        self._places = places
        lacking = {
            step: next((group for group in ids if group not in places), None)
            for step, ids in reader.manifest.steps.items()
        }
        self.missing = {step: group_id for step, group_id in sorted(lacking.items()) if group_id is not None}
        self.steps = sorted(step for step, group_id in lacking.items() if group_id is None)

    def body(self, step: int, dp_rank: int = 0, dp_world_size: int = 1) -> memoryview:
        """Return the body of one rank. Raises `Invalid` for a damaged export."""
        record, epoch = self._record(step)
        layout = self._layout(epoch, dp_world_size)
        groups = [self._group(step, entry.group_id) for entry in record.groups]
        try:
            return recorded_batch(self._reader.manifest.run, record, groups, layout, dp_rank)
        except (LookupError, TypeError, ValueError, ArithmeticError, msgspec.MsgspecError) as error:
            raise self._ledger_error(step, f"the record of the batch does not fit its groups: {error!r}") from error

    def _group_files(self) -> Iterator[str]:
        return (name for names in self._reader.parts() for name in names)

    def _with_rollouts(self, file: str) -> list[str]:
        return [row["group_id"] for row in self._reader.read(file) if row["has_rollouts"]]

    def _group(self, step: int, group_id: str) -> Group:
        if group_id not in self._places:
            raise self._ledger_error(step, f"the batch has group {group_id!r}, whose rollouts the export lacks")
        row, rollouts = self._read_groups(self._places[group_id])[group_id]
        return self._reader.group(self._reader.group_json(row, rollouts))

    def _ledger_error(self, step: int, why: str) -> Invalid:
        return self._reader.error(f"ledger/step={step}", why)

    def _records(self, *, step: int | None, types: tuple[str, ...]) -> list[BatchRecord | AttachRecord | AckRecord]:
        """Read the records of these types in ledger order; `step` None: of all steps."""
        folder = "ledger/" if step is None else f"ledger/step={step}/"
        names = [name for name in self._reader.manifest.files if name.startswith(folder)]
        rows = [(row, name) for name in names for row in self._reader.read(name) if row["type"] in types]
        return [self._decode(row["record"], name) for row, name in sorted(rows, key=lambda row: int(row[0]["entry"]))]

    def _decode(self, record: str, name: str) -> BatchRecord | AttachRecord | AckRecord:
        try:
            decoded: BatchRecord | AttachRecord | AckRecord = _decode(record)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise self._reader.error(name, f"a ledger record is damaged: {error}") from error
        return decoded

    def _record(self, step: int) -> tuple[BatchRecord, int]:
        """Return the batch of a step in the surviving history, and the epoch that acked it last; 0 = none."""
        records = self._records(step=step, types=("BATCH", "ACK"))
        batches = [record for record in records if isinstance(record, BatchRecord)]
        if not batches:
            raise Invalid(f"the export has no ledger record of step {step}", name="step", value=step)
        epochs = [record.epoch for record in records if isinstance(record, AckRecord)]
        return batches[-1], epochs[-1] if epochs else 0

    def _read_layouts(self) -> dict[int, AttachRecord]:
        records = self._records(step=None, types=("ATTACH",))
        return {record.epoch: record for record in records if isinstance(record, AttachRecord)}

    def _layout(self, epoch: int, dp_world_size: int) -> Layout:
        attached = self._layouts.get(epoch) or self._layouts.get(max(self._layouts, default=0))
        if attached is None:  # the records of all attaches were trimmed
            return configured_layout(self._reader, dp_world_size)
        try:
            rows = msgspec.convert(attached, prepared(BatchRows), from_attributes=True)
        except msgspec.ValidationError as error:
            raise self._ledger_error(attached.step, f"the record of the attach of epoch {epoch}: {error}") from error
        return Layout(
            seq_len=rows.seq_len,
            dp_world_size=dp_world_size,
            pad_to_multiple_of=rows.pad_to_multiple_of,
            cost=attached.cost,
            extras=attached.extras,
        )


def stored_batches(
    reader: ExportReader, dp_rank: int = 0, dp_world_size: int = 1, skip: int = 0
) -> Iterator[memoryview]:
    """Yield batches of all groups that have rollouts, in the order of storing, as large as the run's batches.

    The last one may be smaller, and the first `skip` are left out. `version` of a batch is the newest of its groups.
    """
    layout, run = configured_layout(reader, dp_world_size), reader.manifest.run
    batch = reader.config(RunConfig).batch
    cut = enumerate(_cut(reader, batch, dp_world_size))
    for step, groups in itertools.islice(cut, skip, None):
        version = max(group.policy_version for group in groups)
        yield batch_of_groups(run, groups, layout, step=step, version=version, dp_rank=dp_rank)


def configured_layout(reader: ExportReader, dp_world_size: int = 1) -> Layout:
    """Return the layout of the run's configuration, for a trainer that asks for nothing else."""
    batch = reader.config(RunConfig).batch
    return Layout(seq_len=batch.seq_len, dp_world_size=dp_world_size, pad_to_multiple_of=batch.pad_to_multiple_of)


def stored_groups(reader: ExportReader) -> Iterator[Group]:
    """Yield all groups that have rollouts, in the order of storing."""
    return (reader.group(reader.group_json(row, rollouts)) for row, rollouts in reader.groups() if rollouts)


def _cut(reader: ExportReader, batch: BatchSpec, ranks: int) -> Iterator[list[Group]]:
    """Collect groups until the next one exceeds the budget; each has at least one."""
    budget = batch.token_budget(ranks)
    groups: list[Group] = []
    tokens = 0
    for group in stored_groups(reader):
        full = len(groups) == batch.groups_per_batch or (budget is not None and tokens + group.tokens > budget)
        if groups and full:
            yield groups
            groups, tokens = [], 0
        groups.append(group)
        tokens += group.tokens
    if groups:
        yield groups
