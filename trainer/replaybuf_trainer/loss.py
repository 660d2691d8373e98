"""Packed forward pass and the clipped GRPO objective against the logprobs of the policy that sampled.

GRPO (Shao et al. 2024, "DeepSeekMath", section 4.1) with these deviations: the ratio is against the inference
logprobs of the engine that sampled (one-step off-policy, no second forward pass of the old policy), the mean is over
all loss tokens of the whole batch (DAPO, Yu et al. 2025, section 3.3), and the KL term is off by default.

Only their restarting positions separate the rollouts of a packed row: `use_cache=False` and no attention mask. With a
mask of ones, or with the default cache, they would attend to each other without any warning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.nn.utils.rnn import pad_sequence

from replaybuf.errors import Invalid
from replaybuf_trainer.options import Objective

Row: TypeAlias = Mapping[str, torch.Tensor]
"""One micro-batch, see `replaybuf_trainer.reading.TensorBatch`: L tokens of n rollouts."""


@dataclasses.dataclass(slots=True)
class Tally:
    """Sums over loss tokens; divide by `tokens` for means."""

    tokens: int = 0
    loss: float = 0.0
    clipped: float = 0.0
    ratio: float = 0.0
    entropy: float = 0.0

    def mean(self, name: str) -> float:
        """Return the mean of a sum over all loss tokens; 0 without loss tokens."""
        return float(getattr(self, name)) / self.tokens if self.tokens else 0.0


def token_logits(model: Any, rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Run B packed rows; return the targets [k] of all their loss tokens, row by row, and the logits [k, V] for them.

    Position t holds token t, so its logits stand at t-1. The first token of a rollout has no logits before it and is
    never a loss token (prompts have at least one token).
    """
    # [B, longest L]; padding has position 0 at every token, so each padding token is a segment of its own
    ids, positions, mask = (
        pad_sequence([row[name] for row in rows], batch_first=True)
        for name in ("input_ids", "position_ids", "loss_mask")
    )
    hidden = model.model(input_ids=ids.long(), position_ids=positions.long(), use_cache=False).last_hidden_state
    return ids[mask].long(), model.lm_head(hidden[:, :-1][mask[:, 1:]])


def rows_loss(
    model: Any, rows: Sequence[Row], batch_loss_tokens: int, objective: Objective, tally: Tally
) -> torch.Tensor:
    """Return the loss of some rows, to be summed over all rows and ranks of the batch; add its figures to `tally`.

    The engine's logprobs are raw (before temperature), so both sides of the ratio are raw whatever the temperature.
    """
    targets, logits = token_logits(model, rows)  # [k], [k, V]
    distribution = torch.log_softmax(logits.float(), -1)
    logprobs = distribution.gather(1, targets[:, None]).squeeze(1)  # [k]
    advantages = _loss_tokens(rows, "advantages") * _weights(rows)
    ratio = (logprobs - _loss_tokens(rows, "inference_logprobs")).exp()
    bounded = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    losses = -torch.minimum(ratio * advantages, bounded * advantages)
    if objective.kl:
        # The non-negative, low-variance estimate of Schulman ("Approximating KL Divergence", k3).
        drift = _loss_tokens(rows, "ref_logprobs") - logprobs
        losses = losses + objective.kl * (drift.exp() - drift - 1)
    with torch.no_grad():
        tally.tokens += len(targets)
        tally.loss += float(losses.sum())
        tally.clipped += float((ratio * advantages > bounded * advantages).sum())
        tally.ratio += float(ratio.sum())
        tally.entropy -= float((distribution.exp() * distribution).sum())
    return losses.sum() / batch_loss_tokens


def _loss_tokens(rows: Sequence[Row], name: str) -> torch.Tensor:
    """Return a column of all loss tokens, float32 [k]. Raises `Invalid` if a row lacks the column."""
    if any(name not in row for row in rows):
        raise Invalid(f"the batch has no {name}; have the generator send it, or set kl to 0", name=name)
    return torch.cat([row[name][row["loss_mask"]] for row in rows])


def _weights(rows: Sequence[Row]) -> torch.Tensor:
    """Return the sampling weight of every loss token, float32 [k]; 1 if the strategy gives no weights."""
    weights = []
    for row in rows:
        n = len(row["rewards"])
        per_rollout = row.get("sampling_weights", torch.ones(n))
        lengths = row["cu_seqlens"][: n + 1].diff()
        per_token = per_rollout.repeat_interleave(lengths)  # [L without padding]
        weights.append(per_token[row["loss_mask"][: len(per_token)]])
    return torch.cat(weights)
