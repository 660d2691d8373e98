"""The default policy loss on packed rows. Any other loss goes into `compute_loss` of your trainer or module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch.nn.functional import pad

Row: TypeAlias = Mapping[str, torch.Tensor]
"""One micro-batch: L tokens of n rollouts, with the names and types of `replaybuf.wire.batch.MicroBatch`."""


def token_logprobs(model: Any, row: Row) -> torch.Tensor:
    """Return the logprob of each token of a packed row, float32 [L] in nats; 0 where the loss mask is 0.

    Position t holds token t. Only the restarting positions separate the rollouts, so the model gets no attention mask.
    """
    ids, positions = (row[name][None].long() for name in ("input_ids", "position_ids"))
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0, :-1]
    mask = row["loss_mask"][1:]
    chosen = logits[mask].float().log_softmax(-1).gather(1, ids[0, 1:][mask][:, None])[:, 0]
    return torch.zeros_like(row["advantages"]).masked_scatter(row["loss_mask"], chosen)


def clipped_policy_loss(logprobs: torch.Tensor, row: Row, clip: float = 0.2) -> torch.Tensor:
    """Return the PPO clip loss (Schulman et al. 2017, equation 7), summed over the loss tokens of a row.

    `logprobs` [L] from `token_logprobs`. The ratio is to the logprobs of the engine. Sampling weights of the strategy
    apply.
    """
    ratio = (logprobs - row["inference_logprobs"]).exp()
    advantages = row["advantages"]
    if "sampling_weights" in row:
        lengths = row["cu_seqlens"].diff()[: len(row["rewards"])]  # without padding
        weights = row["sampling_weights"].repeat_interleave(lengths)
        advantages = advantages * pad(weights, (0, len(advantages) - len(weights)))
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return -(surrogate * row["loss_mask"]).sum()
