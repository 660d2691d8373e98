"""Record of a batch, as `GET .../batches/{step}/record` returns it."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import msgspec

from replaybuf.packing.batches import PackedGroups, completed
from replaybuf.wire.answer.browse import StepRecord, UsedGroup
from replaybuf.wire.decoding import prepared
from replaybuf.wire.ledger import BatchEntry, BatchRecord, pieces_of


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
