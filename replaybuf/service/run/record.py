"""Record of a batch as `GET .../batches/{step}/record` reports it."""

from __future__ import annotations

from typing import Any

from replaybuf.service.run.assembly import PackedBatch, completed
from replaybuf.wire.ledger import BatchRecord


def batch_record(run: str, record: BatchRecord, standing: str, packed: PackedBatch | None) -> dict[str, Any]:
    """Render a batch record. `packed` gives the packing figures; without it (voided or freed) they are null."""
    placed = sum(packed.padded_rows()) if packed else 0
    return {
        "run": run,
        "step": record.step,
        "generation": record.generation,
        "batch_id": record.batch_id,
        "digest": record.digest,
        "state": standing,
        "version": record.version,
        "strategy": record.strategy,
        "options": record.options,
        "seed": record.seed,
        "tokens": record.tokens,
        "rollouts": record.rollouts,
        "padding_fraction": 1.0 - packed.tokens / placed if packed else None,
        "micro_batches": packed.micro_batches if packed else None,
        "filler_micro_batches": packed.fillers if packed else None,
        "dp_world_size": packed.layout.dp_world_size if packed else None,
        "adapter_tokens": _adapter_tokens(record),
        **({"adapters": record.adapters, "adapters_completed": completed(record)} if record.adapters else {}),
        "groups": [
            {
                "group_id": entry.group_id,
                "prompt_id": entry.prompt_id,
                "prompt_index": entry.prompt_index,
                "adapter": entry.adapter,
                "policy_version": entry.policy_version,
                "staleness": entry.staleness,
                "times_sampled": entry.times_sampled,
                "tokens": entry.tokens,
            }
            for entry in record.groups
        ],
    }


def _adapter_tokens(record: BatchRecord) -> dict[str, int]:
    tokens: dict[str, int] = {}
    for entry in record.groups:
        tokens[entry.adapter] = tokens.get(entry.adapter, 0) + entry.tokens
    return tokens
