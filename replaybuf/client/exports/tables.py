"""Rows of an export and their Parquet schemas; pyarrow is imported at first use."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import msgspec

from replaybuf.errors import Invalid, MissingExtra
from replaybuf.wire.answer.cursors import CursorGroup
from replaybuf.wire.decoding import decode_json, prepared
from replaybuf.wire.group import GroupJson, RolloutJson

EXTRA = "export"
TABLES = ("groups", "rollouts", "ledger")
_ROLLOUT_FIELDS = RolloutJson.__struct_fields__
LATER_COLUMNS = ("prompt_mask", "prompt_logprobs")
"""Fields of a rollout that exports of an earlier release lack."""
READ_COLUMNS: dict[str, dict[str, bool]] = {
    "groups": {
        **dict.fromkeys(("group_id", "number", "prompt_id", "adapter", "policy_version", "has_rollouts"), True),
        "metadata": False,
    },
    "rollouts": dict.fromkeys(_ROLLOUT_FIELDS, False) | {"group_id": True, "rollout": True, "rewards": True},
    "ledger": dict.fromkeys(("entry", "type", "record"), True),
}
"""Columns that a reader of an export uses, and whether each row must have a value."""


def pyarrow(what: str = "an export", extra: str = EXTRA) -> ModuleType:
    """Import pyarrow with its Parquet part, for `what`. Raises `MissingExtra` with the extra to install."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtra(what, extra) from None
    module: ModuleType = pyarrow
    return module


@functools.cache
def schema_of(table: str) -> Any:
    """Return the schema of a table, without the column `step`, which is in the path of each file."""
    pa = pyarrow()
    text, tokens, numbers = pa.string(), pa.list_(pa.int32()), pa.list_(pa.float32())
    columns: dict[str, list[tuple[str, Any]]] = {
        "groups": [
            *((name, text) for name in ("group_id", "state", "reason", "prompt_id", "adapter")),
            *((name, pa.int64()) for name in ("number", "prompt_index", "tokens", "source")),
            *((name, pa.int32()) for name in ("policy_version", "group_size", "longest_tokens", "truncated")),
            *((name, pa.float64()) for name in ("arrival_s", "reward_mean", "reward_std", "advantage_abs_mean")),
            *(("times_sampled", pa.int32()), ("batches", pa.list_(pa.int64())), ("has_rollouts", pa.bool_())),
            ("metadata", text),
        ],
        "rollouts": [
            *(("group_id", text), ("number", pa.int64()), ("rollout", pa.int32())),
            *((name, tokens) for name in ("prompt_ids", "completion_ids", "completion_mask")),
            *((name, numbers) for name in ("inference_logprobs", "ref_logprobs", "old_logprobs", "teacher_logprobs")),
            *(("prompt_mask", tokens), ("prompt_logprobs", numbers)),
            *(("token_advantages", numbers), ("reward", pa.float64()), ("advantage", pa.float64())),
            *(("rewards", text), ("version_spans", pa.list_(pa.list_(pa.int64())))),
            *(("finish_reason", text), ("temperature", pa.float64()), ("proof", pa.binary())),
        ],
        "ledger": [("entry", pa.int64()), ("type", text), ("at_s", pa.float64()), ("record", text)],
    }
    return pa.schema(columns[table])


def step_of(group: CursorGroup) -> int | None:
    """Return the partition of a group: the last step that used it."""
    return max(group.batches, default=None)


def group_row(group: CursorGroup) -> dict[str, Any]:
    """Return the row of a group; its metadata as JSON."""
    row = {name: getattr(group, name) for name in group.__struct_fields__ if name not in ("rollouts", "detail", "step")}
    metadata = None if group.metadata is None else msgspec.json.encode(group.metadata).decode()
    return row | {"metadata": metadata, "has_rollouts": group.rollouts is not None}


def rollout_rows(group: CursorGroup) -> list[dict[str, Any]]:
    """Return the rows of the rollouts of a group; the parts of a reward as JSON."""
    rows: list[dict[str, Any]] = []
    for place, rollout in enumerate(group.rollouts or ()):
        row = {name: getattr(rollout, name) for name in _ROLLOUT_FIELDS}
        row["rewards"] = msgspec.json.encode(rollout.rewards).decode()
        rows.append(row | {"group_id": group.group_id, "number": group.number, "rollout": place})
    return rows


def group_of_rows(row: dict[str, Any], rollouts: Sequence[dict[str, Any]]) -> GroupJson:
    """Return the group of a row and the rows of its rollouts, in any order. Raises `Invalid` or `Malformed`."""
    fields = {name: row[name] for name in ("group_id", "prompt_id", "policy_version", "adapter")}
    fields["metadata"] = decode_json((row["metadata"] or "{}").encode(), dict[str, Any])
    fields["rollouts"] = [
        {name: rollout[name] for name in _ROLLOUT_FIELDS if name in rollout}
        | {"rewards": decode_json(rollout["rewards"].encode(), dict[str, float])}
        for rollout in sorted(rollouts, key=lambda rollout: int(rollout["rollout"]))
    ]
    try:
        return msgspec.convert(fields, prepared(GroupJson))
    except msgspec.ValidationError as error:
        raise Invalid(str(error), name="group_id", value=row["group_id"]) from error


def ledger_row(record: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a ledger record; all of it as JSON."""
    text = msgspec.json.encode(record).decode()
    return {"entry": record["entry"], "type": record["type"], "at_s": record.get("at_s", 0.0), "record": text}
