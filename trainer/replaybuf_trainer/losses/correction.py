"""Correction of the mismatch between engine and trainer: the same weights, computed by different code.

Engine and trainer give one token slightly different logprobs, because kernels, types and batch sizes differ. A loss
with the ratio pi / old treats the tokens as samples of `old`, but the engine sampled them.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
import torch

from replaybuf_trainer.losses.tokens import LossTokens, NonNegative, Positive, Share

Level: TypeAlias = Literal["token", "sequence", "geometric"]
LARGEST_LOG = 20.0
"""Bound of a log ratio before exp; without it the product over a long rollout overflows."""


class Correction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weights and masks from w = old / inference; the key `correction` of `--loss-options`.

    - `level`: w of the token, the product over its rollout (sequence), or the geometric mean over it (geometric)
    - `mode`: truncate = weight clip(w, lower, upper); mask = weight w inside the bounds, 0 outside; reject = weight 1
      inside, 0 outside
    - `veto`: a rollout with a token whose w is below it gets weight 0

    Truncated token weights: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training".
    Masked tokens: IcePop (Ling team 2025, arXiv:2510.18855). Sequence and geometric masks, and the veto: Liu et al.
    2025, "When Speed Kills Stability". Deviations: rejected tokens stay in the denominator of the mean; they have no KL
    penalty or entropy bonus either, which TRL keeps.
    """

    level: Level = "token"
    mode: Literal["truncate", "mask", "reject"] = "truncate"
    lower: NonNegative = 0.0
    upper: Positive = 2.0
    veto: Share = 0.0

    def weights(self, tokens: LossTokens) -> torch.Tensor:
        """Return the weight of each token, [k], without gradient; 0 = rejected."""
        mismatch = log_mismatch(tokens)
        ratio = _at_level(mismatch, tokens, self.level).clamp(-LARGEST_LOG, LARGEST_LOG).exp()
        if self.mode == "truncate":
            weights = ratio.clamp(self.lower, self.upper)
        else:
            inside = (ratio >= self.lower) & (ratio <= self.upper)
            weights = torch.where(inside, ratio if self.mode == "mask" else torch.ones_like(ratio), 0.0)
        if self.veto:
            refused = tokens.rollout_sums((mismatch.exp() < self.veto).to(mismatch.dtype)) > 0  # [n]
            weights = weights.masked_fill(refused[tokens.rollout], 0.0)
        return weights


def log_mismatch(tokens: LossTokens) -> torch.Tensor:
    """Return log old - log inference of each token, [k], without gradient.

    Without `old_logprobs` the trained policy takes its place, so the value also holds what training changed since.
    """
    old = tokens.logprobs if tokens.old_logprobs is None else tokens.old_logprobs
    return old.detach() - tokens.inference_logprobs


def _at_level(mismatch: torch.Tensor, tokens: LossTokens, level: Level) -> torch.Tensor:
    if level == "token":
        return mismatch
    per_rollout = tokens.rollout_sums(mismatch) if level == "sequence" else tokens.rollout_means(mismatch)
    return per_rollout[tokens.rollout]
