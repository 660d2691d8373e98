"""Normalisation: the factor of each token's loss, so that the sum over all ranks is the batch's loss."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias

import torch

from replaybuf_trainer.losses.tokens import LossTokens

Normalisation: TypeAlias = Literal["token", "sequence", "constant"]


@dataclasses.dataclass(frozen=True, slots=True)
class BatchTotals:
    """Loss tokens and rollouts of the whole batch, all ranks together."""

    loss_tokens: int
    rollouts: int


def token_factors(
    tokens: LossTokens, totals: BatchTotals, normalise: Normalisation, constant: int | None
) -> torch.Tensor:
    """Return the factor of each token's loss, [k].

    - token: 1 / T of the batch, so every token counts the same (DAPO)
    - sequence: 1 / (N T_i), so every rollout counts the same (GRPO)
    - constant: 1 / (N constant), so a rollout's weight grows with its length (Dr. GRPO)

    N rollouts of the batch; T = loss tokens, T_i of rollout i. Rollouts without loss tokens count in N.
    """
    if normalise == "token":
        return tokens.logprobs.new_full((len(tokens.rollout),), 1 / max(1, totals.loss_tokens))
    if normalise == "constant":
        return tokens.logprobs.new_full((len(tokens.rollout),), 1 / (totals.rollouts * (constant or 1)))
    return 1 / (totals.rollouts * tokens.lengths[tokens.rollout].to(tokens.logprobs.dtype))
