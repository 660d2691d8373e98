"""Terms beside the policy loss: a penalty to a reference model, and an entropy bonus."""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import torch

from replaybuf_trainer.losses.tokens import LossTokens, NonNegative, Share


class ReferencePenalty(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """weight times an estimate of KL(pi || ref) per token; the key `reference` of `--loss-options`.

    With d = log pi - log ref: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (Schulman 2020,
    "Approximating KL Divergence"). On-policy, as a loss term, only k2 has the expected gradient of KL(pi || ref); that
    of k1 is 0, and that of k3 is the gradient of KL(ref || pi) (Tang and Munos 2025, arXiv:2506.09477).
    """

    weight: NonNegative
    estimate: Literal["k1", "k2", "k3"] = "k3"

    def losses(self, tokens: LossTokens) -> torch.Tensor:
        """Return the weighted penalty of each token, [k]."""
        return self.weight * kl_estimate(tokens.logprobs - tokens.column("ref_logprobs"), self.estimate)


class EntropyBonus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """-weight H on the `share` of tokens with the highest entropy H; the key `entropy` of `--loss-options`.

    The bonus is that of A3C (Mnih et al. 2016, arXiv:1602.01783, section 4). The selection of few "forking" tokens
    is that of Wang et al. 2025 (arXiv:2506.01939, section 5), who apply it to the policy loss. Deviation: the
    tokens are those of one forward pass.
    """

    weight: NonNegative
    share: Share = 0.2

    def losses(self, tokens: LossTokens) -> torch.Tensor:
        """Return the weighted negative entropy of the selected tokens, [k]; 0 for the others."""
        entropies = tokens.entropies
        chosen = torch.zeros_like(entropies, dtype=torch.bool)
        chosen[entropies.detach().topk(math.ceil(self.share * len(entropies))).indices] = True
        return torch.where(chosen, -self.weight * entropies, 0.0)


def kl_estimate(drift: torch.Tensor, estimate: Literal["k1", "k2", "k3"]) -> torch.Tensor:
    """Return an estimate of KL(p || q) from `drift` = log p - log q at tokens sampled from p, [k]."""
    if estimate == "k1":
        return drift
    return drift.square() / 2 if estimate == "k2" else (-drift).exp() - 1 + drift
