"""Samples as a Parquet file: one row per rollout, with a list per token column."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from replaybuf.client.exports.tables import pyarrow
from replaybuf_trainer.report.tables.samples import TOKEN_COLUMNS, Sample, StepSamples

EXTRA = ("replaybuf train --tables", "tables")
"""What needs pyarrow, and the extra that has it."""
_TEXTS = ("group_id", "adapter", "prompt", "completion")
_NUMBERS = ("rollout", "policy_version", "staleness", "times_sampled")
_FLOATS = ("reward", "advantage")


def write_parquet(path: Path, step: StepSamples) -> None:
    """Write the samples of a step; NaN becomes null. The metadata of the file has run, step and version."""
    pa = pyarrow(*EXTRA)
    metadata = {name: str(getattr(step, name)) for name in ("run", "step", "version", "loss")}
    schema = _schema(pa).with_metadata(metadata)
    table = pa.Table.from_pylist([_row(sample) for sample in step.samples], schema=schema)
    pa.parquet.write_table(table, path, compression="zstd")


def _schema(pa: ModuleType) -> Any:
    return pa.schema(
        [
            *((name, pa.string()) for name in _TEXTS),
            *((name, pa.int32()) for name in _NUMBERS),
            *((name, pa.float32()) for name in _FLOATS),
            ("reward_parts", pa.map_(pa.string(), pa.float32())),
            ("prompt_ids", pa.list_(pa.int32())),
            ("token_ids", pa.list_(pa.int32())),
            ("token_texts", pa.list_(pa.string())),
            ("loss_mask", pa.list_(pa.bool_())),
            *((name, pa.list_(pa.float32())) for name in TOKEN_COLUMNS),
        ]
    )


def _row(sample: Sample) -> dict[str, Any]:
    tokens = sample.tokens
    return {
        **{name: getattr(sample, name) for name in (*_TEXTS, *_NUMBERS, *_FLOATS, "token_texts")},
        "reward_parts": list(sample.reward_parts.items()),
        "prompt_ids": sample.prompt_ids.tolist(),
        "token_ids": tokens["token_id"].tolist(),
        "loss_mask": tokens["loss_mask"].tolist(),
        **{name: [None if value != value else value for value in tokens[name].tolist()] for name in TOKEN_COLUMNS},
    }
