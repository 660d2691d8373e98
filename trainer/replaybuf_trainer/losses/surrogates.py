"""Surrogate objectives: the formulas of which the named losses are composed. Tensors are [k], one value per token."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PolicyTerm:
    """What a policy loss returns for k loss tokens.

    `losses`: with gradient; the objective weights and sums them. `ratio`: the probability ratio that the loss used.
    `clipped`: bool, tokens whose gradient the loss limited or removed. The last two are for statistics.
    """

    losses: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float, dual: float | None = None
) -> PolicyTerm:
    """Return -min(r A, clip(r, 1 - low, 1 + high) A), and at most -dual A for A < 0.

    PPO (Schulman et al. 2017, arXiv:1707.06347, equation 7). Different bounds are "clip-higher" (DAPO, Yu et al.
    2025, arXiv:2503.14476, section 3.1). The dual clip bounds the loss of a large ratio with a negative advantage
    (Ye et al. 2020, arXiv:1912.09729).
    """
    plain, bounded = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
    objective = torch.minimum(plain, bounded)
    clipped = plain > bounded
    if dual is not None:
        floor = dual * advantages
        too_low = (advantages < 0) & (objective < floor)
        objective = torch.where(too_low, floor, objective)
        clipped = clipped | too_low
    return PolicyTerm(-objective, ratio.detach(), clipped)


def weighted_score(
    logprobs: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor, least: float, most: float
) -> PolicyTerm:
    """Return -stop_gradient(clip(r, least, most)) A log p: a bounded weight on the policy gradient of every token.

    Unlike the clipped surrogate, a bound removes no gradient: it only stops growing with the ratio.
    """
    fixed = ratio.detach()
    weight = fixed.clamp(least, most)
    return PolicyTerm(-weight * advantages * logprobs, fixed, weight != fixed)
