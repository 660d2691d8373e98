"""Covariance of logprob and advantage per token, and the tokens where it is highest (for `kl-cov` and `clip-cov`)."""

from __future__ import annotations

import math

import torch

from replaybuf_trainer.losses.tokens import LossTokens


@torch.no_grad()
def covariances(tokens: LossTokens) -> torch.Tensor:
    """Return (log pi - its mean) (A - its mean) of each token, [k]; the means are over the k tokens.

    Cui et al. 2025, arXiv:2505.22617, section 4. Tokens with a high value make the entropy fall.
    """
    return (tokens.logprobs - tokens.logprobs.mean()) * (tokens.advantages - tokens.advantages.mean())


def by_covariance(values: torch.Tensor, share: float, allowed: torch.Tensor | None = None) -> torch.Tensor:
    """Select the ceil(share k) allowed tokens with the highest values; return bool [k]."""
    count = math.ceil(share * len(values))
    if allowed is not None:
        values = values.masked_fill(~allowed, -torch.inf)
    chosen = torch.zeros(len(values), dtype=torch.bool, device=values.device)
    chosen[values.topk(count).indices] = True
    return chosen if allowed is None else chosen & allowed
