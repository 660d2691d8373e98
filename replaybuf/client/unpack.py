"""Values that a trainer computed per token of a packed micro-batch, per rollout and per group.

`row_values` is one array per micro-batch: one value per token, [L] or [L, ...], in the order of `MicroBatch.input_ids`.

- `per_rollout(row, row_values)` returns the values of each rollout, as views, by (group index, rollout index)
- `per_group(batch, [row_values, ...])` sums over the sampled tokens of each group, by `group_id`. The rollouts of a
  group can be on several ranks: add their sums with `merge_sums` before you take the `mean` and send it with the ack:

      sums = merge_sums(gathered_from_all_ranks)
      reader.ack({"priorities": {group_id: sum.mean for group_id, sum in sums.items()}})

Everything is numpy. `replaybuf_trainer.unpack` has the same functions for tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from replaybuf.errors import Invalid, counted
from replaybuf.wire.batch import Batch, MicroBatch

Tokens: TypeAlias = Literal["all", "completion", "sampled"]
"""Which tokens of a rollout: all; those of the completion; or those in the loss (`loss_mask`).

Without `prompt_lengths` (`client.attach(lengths=True)`) a completion begins at the first token in the loss."""

_FOR_TENSORS = "for tensors use replaybuf_trainer.unpack"


class RolloutKey(NamedTuple):
    """A rollout of one rank: the position of its group in `BatchMeta.group_ids`, its number in the group."""

    group_index: int
    rollout_index: int


class GroupSum(NamedTuple):
    """A sum over tokens of a group, and the number of these tokens."""

    total: float
    tokens: int

    @property
    def mean(self) -> float:
        """Mean per token; 0 without tokens."""
        return self.total / self.tokens if self.tokens else 0.0


def rollout_keys(row: MicroBatch) -> list[RolloutKey]:
    """Return the keys of the n rollouts of a micro-batch, in order."""
    return [RolloutKey(*key) for key in zip(row.group_index.tolist(), row.rollout_index.tolist(), strict=True)]


def check_unweighted(batch: Batch, trainer: str) -> None:
    """Raise `Invalid` if a batch has sampling weights, for a trainer that cannot apply them."""
    if any(row.sampling_weights is not None for row in batch.micro_batches):
        strategy = batch.meta.strategy
        detail = (
            f"strategy {strategy} gives sampling weights, which {trainer} cannot apply; set its option importance to 0"
        )
        raise Invalid(detail, name="sampling_weights", value=strategy)


def per_rollout(
    row: MicroBatch, row_values: npt.ArrayLike, tokens: Tokens = "all"
) -> dict[RolloutKey, npt.NDArray[Any]]:
    """Split the values of a micro-batch by rollout, without padding. `sampled` copies, the others are views.

    Raises `Invalid` unless there are L values that numpy can read.
    """
    values = _read_values(row, row_values)
    bounds = row.cu_seqlens.tolist()
    lengths = None if row.prompt_lengths is None else row.prompt_lengths.tolist()
    split = {}
    for number, key in enumerate(rollout_keys(row)):
        start, end = bounds[number], bounds[number + 1]
        mask = row.loss_mask[start:end]
        if tokens == "sampled":
            split[key] = values[start:end][mask]
        elif tokens == "completion":
            prompt = int(mask.argmax()) if mask.any() else end - start
            split[key] = values[start + (prompt if lengths is None else lengths[number]) : end]
        else:
            split[key] = values[start:end]
    return split


def per_group(batch: Batch, row_values: Sequence[npt.ArrayLike]) -> dict[str, GroupSum]:
    """Sum the values [L] of every micro-batch over the sampled tokens of each group of this rank.

    Raises `Invalid` unless there is one array of L values per micro-batch that numpy can read.
    """
    _check_type(batch, Batch)
    rows = batch.micro_batches
    if len(row_values) != len(rows):
        raise Invalid(
            f"row_values has arrays for {counted(len(row_values), 'micro-batch')}; the batch has {len(rows)}",
            name="row_values",
            value=len(row_values),
            bound=len(rows),
        )
    totals, tokens = np.zeros(len(batch.meta.group_ids)), np.zeros(len(batch.meta.group_ids), np.int64)
    for row, value in zip(rows, row_values, strict=True):
        values = _read_values(row, value)
        lengths = np.diff(row.cu_seqlens[: len(row.group_index) + 1])
        owners = np.repeat(row.group_index, lengths)
        mask = row.loss_mask[: len(owners)]
        owners = owners[mask]
        totals += np.bincount(owners, values[: len(mask)][mask], len(totals))
        tokens += np.bincount(owners, minlength=len(tokens))
    return {
        group_id: GroupSum(total, count)
        for group_id, total, count in zip(batch.meta.group_ids, totals.tolist(), tokens.tolist(), strict=True)
    }


def merge_sums(parts: Iterable[Mapping[str, GroupSum]]) -> dict[str, GroupSum]:
    """Add the sums of several ranks, group by group."""
    merged: dict[str, GroupSum] = {}
    for part in parts:
        for group_id, added in part.items():
            before = merged.get(group_id, GroupSum(0.0, 0))
            merged[group_id] = GroupSum(before.total + added.total, before.tokens + added.tokens)
    return merged


def _read_values(row: MicroBatch, row_values: npt.ArrayLike) -> npt.NDArray[Any]:
    _check_type(row, MicroBatch)
    try:
        values = np.asarray(row_values)
    except (TypeError, ValueError, RuntimeError) as error:  # torch raises for a gradient, bfloat16, another device
        detail = f"numpy cannot read row_values ({error}); {_FOR_TENSORS}"
        raise Invalid(detail, name="row_values", value=type(row_values).__name__) from error
    length = len(row.input_ids)
    if values.ndim == 0 or len(values) != length:
        raise Invalid(
            f"row_values has shape {list(values.shape)}; the micro-batch has {counted(length, 'token')}",
            name="row_values",
            value=list(values.shape),
            bound=length,
        )
    return values


def _check_type(value: object, expected: type) -> None:
    if not isinstance(value, expected):
        type_name = type(value).__name__
        raise Invalid(
            f"got {type_name}, expected {expected.__name__}; {_FOR_TENSORS}", name=expected.__name__, value=type_name
        )
