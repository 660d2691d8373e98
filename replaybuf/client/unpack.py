"""From a packed micro-batch back to rollouts and groups: what a trainer computed per token, by who sampled it.

`row_values` below is one array per token of a micro-batch, [L] or [L, ...], in the order of `MicroBatch.input_ids`.

- `per_rollout(row, row_values)` gives each rollout its own: views, by (group index, rollout index)
- `per_group(batch, [row_values, ...])` sums over the sampled tokens of each group, by `group_id`. The rollouts of a
  group may stand on several ranks: add their sums with `merged` before taking the `mean`, then send it with the ack:

      sums = merged(gathered_from_all_ranks)
      reader.ack({"priorities": {group_id: sum.mean for group_id, sum in sums.items()}})

All of it is numpy. `replaybuf_trainer.unpack` has the same two calls for tensors and batches of tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from replaybuf.errors import Invalid
from replaybuf.wire.batch import Batch, MicroBatch

Tokens: TypeAlias = Literal["all", "completion", "sampled"]
"""Of a rollout: all tokens; those from the first sampled one on (a body does not say where a prompt ends; completions
begin with a sampled token); or those that the policy sampled (`loss_mask`)."""

_FOR_TENSORS = "replaybuf_trainer.unpack takes tensors"


class RolloutKey(NamedTuple):
    """A rollout of one rank: position of its group in `BatchMeta.group_ids`, its number in the group."""

    group_index: int
    rollout_index: int


class GroupSum(NamedTuple):
    """A sum over tokens of a group, and over how many of them."""

    total: float
    tokens: int

    @property
    def mean(self) -> float:
        """Mean per token; 0 where there are none."""
        return self.total / self.tokens if self.tokens else 0.0


def rollout_keys(row: MicroBatch) -> list[RolloutKey]:
    """Name the n rollouts of a micro-batch, in order."""
    return [RolloutKey(*key) for key in zip(row.group_index.tolist(), row.rollout_index.tolist(), strict=True)]


def per_rollout(
    row: MicroBatch, row_values: npt.ArrayLike, tokens: Tokens = "all"
) -> dict[RolloutKey, npt.NDArray[Any]]:
    """Cut the values of a micro-batch into its rollouts: views, but for `sampled`, which copies. Padding is left out.

    Raises `Invalid` where there are not L values, and for tensors that numpy cannot read.
    """
    values = _values_of(row, row_values)
    bounds = row.cu_seqlens.tolist()
    cut = {}
    for number, key in enumerate(rollout_keys(row)):
        start, end = bounds[number], bounds[number + 1]
        mask = row.loss_mask[start:end]
        if tokens == "sampled":
            cut[key] = values[start:end][mask]
        elif tokens == "completion":
            cut[key] = values[start + int(mask.argmax()) if mask.any() else end : end]
        else:
            cut[key] = values[start:end]
    return cut


def per_group(batch: Batch, row_values: Sequence[npt.ArrayLike]) -> dict[str, GroupSum]:
    """Sum values [L] of every micro-batch over the sampled tokens of each group of this rank.

    Raises `Invalid` where there is not one array of L values per micro-batch, and for tensors that numpy cannot read.
    """
    _check_kind(batch, Batch)
    rows = batch.micro_batches
    if len(row_values) != len(rows):
        raise Invalid(
            f"values of {len(row_values)} micro-batches were given; the batch has {len(rows)}",
            name="row_values",
            value=len(row_values),
            bound=len(rows),
        )
    totals, tokens = np.zeros(len(batch.meta.group_ids)), np.zeros(len(batch.meta.group_ids), np.int64)
    for row, given in zip(rows, row_values, strict=True):
        values = _values_of(row, given)
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


def merged(parts: Iterable[Mapping[str, GroupSum]]) -> dict[str, GroupSum]:
    """Add the sums of several ranks, group by group."""
    sums: dict[str, GroupSum] = {}
    for part in parts:
        for group_id, one in part.items():
            before = sums.get(group_id, GroupSum(0.0, 0))
            sums[group_id] = GroupSum(before.total + one.total, before.tokens + one.tokens)
    return sums


def _values_of(row: MicroBatch, row_values: npt.ArrayLike) -> npt.NDArray[Any]:
    _check_kind(row, MicroBatch)
    try:
        values = np.asarray(row_values)
    except (TypeError, ValueError, RuntimeError) as error:  # torch's, for a gradient, bfloat16, another device
        told = f"numpy cannot read the values ({error}); {_FOR_TENSORS}"
        raise Invalid(told, name="row_values", value=type(row_values).__name__) from error
    length = len(row.input_ids)
    if values.ndim == 0 or len(values) != length:
        raise Invalid(
            f"values have shape {list(values.shape)}; the micro-batch has {length} tokens",
            name="row_values",
            value=list(values.shape),
            bound=length,
        )
    return values


def _check_kind(given: object, kind: type) -> None:
    if not isinstance(given, kind):
        found = type(given).__name__
        raise Invalid(f"{found} is no {kind.__name__}; {_FOR_TENSORS}", name=kind.__name__, value=found)
