"""Proximal logprobs of a batch: those of the weights before its first epoch, computed once for all its epochs.

Decoupled PPO clips around them (Hilton et al. 2022, arXiv:2110.00641, section 3). A generator may send such a column
too, of the weights when the group was stored; these are younger, because the batch waited meanwhile.
"""

from __future__ import annotations

import dataclasses

import torch

from replaybuf_trainer.models.policy import Policy
from replaybuf_trainer.reading import TensorBatch

COLUMN = "old_logprobs"


def lacks_column(batch: TensorBatch) -> bool:
    """Return whether a row with rollouts has no proximal logprobs."""
    return any(COLUMN not in row for row in batch.micro_batches if len(row["rewards"]))


@torch.no_grad()
def with_proximal_logprobs(batch: TensorBatch, policy: Policy, rows_per_forward: int) -> TensorBatch:
    """Return the batch with the logprobs of its loss tokens by the present weights, float32 [L] per row, else 0.

    On all ranks at the same time. Only for a run without adapters, whose rows are in the order of the batch.
    """
    rows = []
    for adapter, part in batch.parts(rows_per_forward):
        logprobs = policy.forward(part, adapter).logprobs.cpu()
        counts = [int(row["loss_mask"].sum()) for row in part]
        for row, values in zip(part, torch.split(logprobs, counts), strict=True):
            column = torch.zeros(row["loss_mask"].shape, dtype=torch.float32)
            column[row["loss_mask"].cpu()] = values.float()
            rows.append({**row, COLUMN: column})
    return dataclasses.replace(batch, micro_batches=rows)
