"""`client.unpack` for what a torch trainer has at hand: tensors of any type and device, and batches of tensors.

Values come back as numpy arrays on the CPU, without their gradient; types that numpy lacks (bfloat16) as float32.
`merge_sums`, `GroupSum` and `RolloutKey` are those of `replaybuf.client.unpack`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from replaybuf.client import unpack
from replaybuf.client.unpack import GroupSum, RolloutKey, Tokens
from replaybuf.wire.batch import Batch, MicroBatch
from replaybuf_trainer.reading import TensorBatch

Values: TypeAlias = torch.Tensor | npt.ArrayLike
"""One value per token of a micro-batch, [L] or [L, ...]."""
_KNOWN_TO_NUMPY = (torch.float16, torch.float32, torch.float64)


def per_rollout(
    row: MicroBatch | Mapping[str, torch.Tensor], row_values: Values, tokens: Tokens = "all"
) -> dict[RolloutKey, npt.NDArray[Any]]:
    """Cut the values of a micro-batch into its rollouts, as `replaybuf.client.unpack.per_rollout` does.

    `row`: one of `TensorBatch.micro_batches`, or of `TensorBatch.host.micro_batches`, which saves copies off a device.
    """
    if isinstance(row, Mapping):
        row = MicroBatch(**{name: _array(tensor) for name, tensor in row.items()})
    return unpack.per_rollout(row, _array(row_values), tokens)


def per_group(batch: Batch | TensorBatch, row_values: Sequence[Values]) -> dict[str, GroupSum]:
    """Sum values [L] of every micro-batch by group, over sampled tokens, as `client.unpack.per_group` does."""
    host = batch.host if isinstance(batch, TensorBatch) else batch
    return unpack.per_group(host, [_array(values) for values in row_values])


def _array(values: Values) -> Any:
    if not isinstance(values, torch.Tensor):
        return values
    values = values.detach()
    if values.is_floating_point() and values.dtype not in _KNOWN_TO_NUMPY:
        values = values.float()
    return np.asarray(values.cpu())
