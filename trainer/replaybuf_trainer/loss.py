"""Packed forward pass and the clipped GRPO objective on the logprobs of the policy that sampled.

GRPO (Shao et al. 2024, "DeepSeekMath", section 4.1) with these deviations: the ratio is against the inference
logprobs of the engine that sampled (one-step off-policy, no second forward pass of the old policy), the mean is over
all loss tokens of the whole batch (DAPO, Yu et al. 2025, section 3.3), and the KL term is off by default.

Packed rows are kept apart by their restarting positions alone: `use_cache=False` and no attention mask. With a mask
of ones, or the default cache, the rollouts of a row would see each other without any warning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from replaybuf.errors import Invalid
from replaybuf.wire.batch import MicroBatch


@dataclasses.dataclass(frozen=True, slots=True)
class Objective:
    """`clip_low`, `clip_high`: how far the ratio may move an advantage; `kl`: weight of the KL to `ref_logprobs`."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl: float = 0.0


@dataclasses.dataclass(slots=True)
class Tally:
    """Sums over loss tokens; divide by `tokens` for means."""

    tokens: int = 0
    loss: float = 0.0
    clipped: float = 0.0
    ratio: float = 0.0
    entropy: float = 0.0

    def mean(self, name: str) -> float:
        """Mean of a sum over all loss tokens; 0 where there are none."""
        return float(getattr(self, name)) / self.tokens if self.tokens else 0.0


def stack(rows: Sequence[MicroBatch]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Put rows of unequal length L into one batch: ids, positions, loss mask, each [B, longest L].

    What is added at the end of a row starts at position 0 again, like any other rollout, so it stays apart.
    """
    width = max(len(row.input_ids) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    positions = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for number, row in enumerate(rows):
        length = len(row.input_ids)
        ids[number, :length] = torch.from_numpy(row.input_ids.astype("int64"))
        positions[number, :length] = torch.from_numpy(row.position_ids.astype("int64"))
        positions[number, length:] = torch.arange(width - length)
        mask[number, :length] = torch.from_numpy(row.loss_mask.copy())
    return ids, positions, mask


def token_logits(model: Any, rows: Sequence[MicroBatch]) -> tuple[torch.Tensor, torch.Tensor]:
    """Run packed rows; return the targets [k] of all their loss tokens, row by row, and the logits [k, V] for them.

    Position t holds token t, so its logits stand at t-1. The first token of a rollout has no logits before it and is
    never a loss token (prompts have at least one token).
    """
    ids, positions, mask = stack(rows)
    hidden = model.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
    return ids[mask], model.lm_head(hidden[:, :-1][mask[:, 1:]])


def rows_loss(
    model: Any, rows: Sequence[MicroBatch], batch_loss_tokens: int, objective: Objective, tally: Tally
) -> torch.Tensor:
    """Loss of some rows, to be summed over all rows of the batch and ranks; adds its figures to `tally`.

    The engine's logprobs are raw (temperature not applied), so raw is compared with raw whatever the temperature.
    """
    targets, logits = token_logits(model, rows)
    every = torch.log_softmax(logits.float(), -1)
    logprobs = every.gather(1, targets[:, None]).squeeze(1)
    behaviour = _gather(rows, "inference_logprobs")
    advantages = _gather(rows, "advantages") * _weights(rows)
    ratio = (logprobs - behaviour).exp()
    bounded = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    losses = -torch.minimum(ratio * advantages, bounded * advantages)
    if objective.kl:
        # The non-negative, low-variance estimate of Schulman ("Approximating KL Divergence", k3).
        drift = _gather(rows, "ref_logprobs") - logprobs
        losses = losses + objective.kl * (drift.exp() - drift - 1)
    with torch.no_grad():
        tally.tokens += len(targets)
        tally.loss += float(losses.sum())
        tally.clipped += float((ratio * advantages > bounded * advantages).sum())
        tally.ratio += float(ratio.sum())
        tally.entropy -= float((every.exp() * every).sum())
    return losses.sum() / batch_loss_tokens


def _gather(rows: Sequence[MicroBatch], name: str) -> torch.Tensor:
    columns = [getattr(row, name) for row in rows]
    if any(column is None for column in columns):
        raise Invalid(f"the batch has no {name}; have the generator send it, or set kl to 0", name=name)
    return torch.cat([torch.from_numpy(c[row.loss_mask]) for c, row in zip(columns, rows, strict=True)])


def _weights(rows: Sequence[MicroBatch]) -> torch.Tensor:
    """Sampling weight of every loss token, float32 [k]; 1 where the strategy gives none."""
    spread = []
    for row in rows:
        n = len(row.rewards)
        weights = np.ones(n, np.float32) if row.sampling_weights is None else row.sampling_weights
        per_token = np.repeat(weights, np.diff(row.cu_seqlens[: n + 1]))
        spread.append(torch.from_numpy(per_token[row.loss_mask[: len(per_token)]]))
    return torch.cat(spread)
