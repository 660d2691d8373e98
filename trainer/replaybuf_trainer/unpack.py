"""`replaybuf.client.unpack` for torch: takes tensors of any type and device, and batches of tensors.

Results are numpy arrays on the CPU without gradient; types that numpy lacks (bfloat16) become float32. `merge_sums`,
`GroupSum` and `RolloutKey` are those of `replaybuf.client.unpack`.
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
_NUMPY_TYPES = (torch.float16, torch.float32, torch.float64)


def per_rollout(
    row: MicroBatch | Mapping[str, torch.Tensor], row_values: Values, tokens: Tokens = "all"
) -> dict[RolloutKey, npt.NDArray[Any]]:
    """Split the values of a micro-batch by rollout, as `replaybuf.client.unpack.per_rollout` does.

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
    if values.is_floating_point() and values.dtype not in _NUMPY_TYPES:
        values = values.float()
    return np.asarray(values.cpu())
