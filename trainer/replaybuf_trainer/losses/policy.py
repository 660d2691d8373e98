"""Policy losses by name. Each is a set of options and one pure method; `BUILT_IN` is the table of names.

Notation: pi = the policy that is trained, mu = the policy of the ratio's denominator (`ratio_to`), r = pi / mu,
A = advantage. Formulas are for one token; `Objective` adds weights, penalties and the mean.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import msgspec
import torch

from replaybuf_trainer.losses.normalisation import Normalisation
from replaybuf_trainer.losses.surrogates import PolicyTerm, clipped_surrogate, weighted_score
from replaybuf_trainer.losses.tokens import LossTokens, NonNegative, Positive, Share


class PolicyLoss(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a policy loss; fields are the keys of `--loss-options`. A plug-in inherits it and defines `term`.

    `ratio_to`: denominator of the ratio. inference: the engine that sampled, without a second forward pass; old: the
    weights before this step, from the column `old_logprobs`.
    """

    ratio_to: Literal["inference", "old"] = "inference"

    normalise: ClassVar[Normalisation] = "token"
    """The mean that the paper uses; `--normalise` overrides it."""
    weights_mismatch: ClassVar[bool] = False
    """Whether the loss weights tokens by old / inference itself."""

    @property
    def columns(self) -> frozenset[str]:
        """Return the names of the optional columns that the loss needs."""
        return frozenset({"old_logprobs"} if self.ratio_to == "old" else ())

    def log_ratios(self, tokens: LossTokens) -> torch.Tensor:
        """Return log pi - log mu, [k], with gradient."""
        return tokens.logprobs - tokens.column(f"{self.ratio_to}_logprobs")

    def term(self, tokens: LossTokens) -> PolicyTerm:
        """Return the losses of k tokens, before weights and the mean."""
        raise NotImplementedError


class Grpo(PolicyLoss, frozen=True, kw_only=True):
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), with an optional dual clip.

    GRPO (Shao et al. 2024, arXiv:2402.03300, section 4.1.1). Deviations: the mean is over all loss tokens of the batch
    (DAPO, arXiv:2503.14476, section 3.3; `--normalise sequence` is GRPO's own), the denominator is the engine by
    default, and the KL penalty is off by default (`reference`).
    """

    clip_low: Share = 0.2
    clip_high: NonNegative = 0.2
    dual_clip: float | None = None
    """Bound above 1 for tokens with a negative advantage; None = off."""

    def term(self, tokens: LossTokens) -> PolicyTerm:
        """Return the clipped surrogate of each token."""
        ratio = self.log_ratios(tokens).exp()
        return clipped_surrogate(ratio, tokens.advantages, self.clip_low, self.clip_high, self.dual_clip)


class DrGrpo(Grpo, frozen=True, kw_only=True):
    """The GRPO clip, summed over a rollout and divided by a constant.

    Dr. GRPO (Liu et al. 2025, arXiv:2503.20783, section 3.2): no mean over the length of a rollout. The other half,
    advantages without division by the standard deviation, is the estimator `dr-grpo` of the generator.
    """

    normalise: ClassVar[Normalisation] = "constant"


class Cispo(PolicyLoss, frozen=True, kw_only=True):
    """-stop_gradient(clip(r, 1 - clip_low, 1 + clip_high)) A log pi.

    CISPO (MiniMax-M1, 2025, arXiv:2506.13585, section 3.1, equations 4 and 5): every token keeps its gradient. As in
    the paper, the lower bound is off by default. TRL names the upper bound itself, 1 + clip_high, `epsilon_high`.
    """

    clip_low: Share = 1.0
    clip_high: NonNegative = 0.28

    def term(self, tokens: LossTokens) -> PolicyTerm:
        """Return the weighted score of each token."""
        ratio = self.log_ratios(tokens).exp()
        return weighted_score(tokens.logprobs, ratio, tokens.advantages, 1 - self.clip_low, 1 + self.clip_high)


class Gspo(PolicyLoss, frozen=True, kw_only=True):
    """The clipped surrogate of s = exp(mean over the rollout's tokens of log r), the same for all its tokens.

    GSPO (Zheng et al. 2025, arXiv:2507.18071, section 4.1), in the token form of section 4.3,
    s_t = stop_gradient(s / pi_t) pi_t, which has the same value and gradient if a rollout has one advantage.
    """

    clip_low: Share = 3e-4
    clip_high: NonNegative = 4e-4

    normalise: ClassVar[Normalisation] = "sequence"

    def term(self, tokens: LossTokens) -> PolicyTerm:
        """Return the clipped surrogate of each token's sequence ratio."""
        with torch.no_grad():
            of_rollout = tokens.rollout_means(self.log_ratios(tokens)).exp()  # [n]
        ratio = of_rollout[tokens.rollout] * (tokens.logprobs - tokens.logprobs.detach()).exp()
        return clipped_surrogate(ratio, tokens.advantages, self.clip_low, self.clip_high)


class TruncatedRatio(PolicyLoss, frozen=True, kw_only=True):
    """-stop_gradient(min(r, bound)) A log pi: the policy gradient with a truncated importance weight.

    Truncated importance sampling (Ionides 2008), the weight rho of V-trace (IMPALA, Espeholt et al. 2018,
    arXiv:1802.01561, section 4.1), here per token and without a value function.
    """

    bound: Positive = 2.0

    def term(self, tokens: LossTokens) -> PolicyTerm:
        """Return the weighted score of each token."""
        ratio = self.log_ratios(tokens).exp()
        return weighted_score(tokens.logprobs, ratio, tokens.advantages, 0.0, self.bound)


class DecoupledPpo(Grpo, frozen=True, kw_only=True):
    """min(old / inference, bound) times the clipped surrogate of r = pi / old.

    Decoupled PPO (Hilton et al. 2022, arXiv:2110.00641, section 3) as in AReaL (Fu et al. 2025, arXiv:2505.24298,
    section 5.2): clip around a recent policy, weight by the one that sampled. `bound` is our addition.
    """

    ratio_to: Literal["old"] = "old"
    bound: Positive = math.inf

    weights_mismatch: ClassVar[bool] = True

    def term(self, tokens: LossTokens) -> PolicyTerm:
        """Return the weighted clipped surrogate of each token."""
        clipped = Grpo.term(self, tokens)
        weight = (tokens.column("old_logprobs") - tokens.inference_logprobs).exp().clamp(max=self.bound)
        return PolicyTerm(weight * clipped.losses, clipped.ratio, clipped.clipped)


class KlCov(PolicyLoss, frozen=True, kw_only=True):
    """-r A, plus weight |log r| on the `share` of tokens with the highest covariance.

    KL-Cov (Cui et al. 2025, arXiv:2505.22617, section 4.2). Deviations: the tokens are those of one forward
    pass, and the penalty is |log r| as in the authors' code, where the paper has a KL divergence.
    """

    share: Share = 0.002
    weight: NonNegative = 1.0

    def term(self, tokens: LossTokens) -> PolicyTerm:
        """Return the surrogate of each token and the penalty of the selected tokens."""
        log_ratios = self.log_ratios(tokens)
        ratio = log_ratios.exp()
        selected = by_covariance(covariances(tokens), self.share)
        penalty = torch.where(selected, self.weight * log_ratios.abs(), 0.0)
        return PolicyTerm(-ratio * tokens.advantages + penalty, ratio.detach(), selected)


class ClipCov(Grpo, frozen=True, kw_only=True):
    """The GRPO clip without the gradient of a `share` of the tokens whose covariance is in [cov_low, cov_high].

    Clip-Cov (Cui et al. 2025, arXiv:2505.22617, section 4.2). Deviation: the paper draws the tokens at
    random; this takes those with the highest covariance, so a repeated step has the same loss.
    """

    share: Share = 0.0002
    cov_low: float = 1.0
    cov_high: float = 5.0

    def term(self, tokens: LossTokens) -> PolicyTerm:
        """Return the clipped surrogate; selected tokens keep their value without gradient."""
        clipped = Grpo.term(self, tokens)
        values = covariances(tokens)
        inside = (values >= self.cov_low) & (values <= self.cov_high) & ~clipped.clipped
        selected = by_covariance(values, self.share, inside)
        losses = torch.where(selected, clipped.losses.detach(), clipped.losses)
        return PolicyTerm(losses, clipped.ratio, clipped.clipped | selected)


BUILT_IN: dict[str, type[PolicyLoss]] = {
    "cispo": Cispo,
    "clip-cov": ClipCov,
    "decoupled-ppo": DecoupledPpo,
    "dr-grpo": DrGrpo,
    "grpo": Grpo,
    "gspo": Gspo,
    "kl-cov": KlCov,
    "truncated-ratio": TruncatedRatio,
}
"""The losses that `--loss` knows without plug-ins."""


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
