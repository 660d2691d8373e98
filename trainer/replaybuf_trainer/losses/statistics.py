"""Statistics of a step's loss tokens, over all of them and by the staleness of their rollouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from replaybuf_trainer.losses.correction import log_mismatch
from replaybuf_trainer.losses.regularisers import kl_estimate
from replaybuf_trainer.losses.surrogates import PolicyTerm
from replaybuf_trainer.losses.tokens import LossTokens

MOST_STALENESS = 8
"""Rollouts of this staleness and more share one line."""
_SUMS = ("ratio_mean", "clip_fraction", "kl", "ref_kl", "entropy", "mismatch", "weight_mean", "weight_squared")


@dataclasses.dataclass(slots=True)
class Tally:
    """Sums over loss tokens: `loss` of the objective per token, and `by_staleness` [MOST_STALENESS + 1, 9].

    The columns of `by_staleness` are the number of tokens and the sums of `_SUMS`: probability ratio, clipped tokens,
    KL of the engine's policy and of the reference (k3), entropy, |log old - log inference|, and the weight of the
    policy loss (correction x sampling weight). Without a reference its KL is 0.
    """

    loss: float = 0.0
    by_staleness: torch.Tensor = dataclasses.field(
        default_factory=lambda: torch.zeros(MOST_STALENESS + 1, 1 + len(_SUMS), dtype=torch.float64)
    )

    @property
    def tokens(self) -> int:
        """Return the number of loss tokens."""
        return int(self.by_staleness[:, 0].sum())

    @torch.no_grad()
    def add(self, tokens: LossTokens, term: PolicyTerm, losses: torch.Tensor, weights: torch.Tensor) -> None:
        """Add k loss tokens: their policy term, whole losses [k] and the weights [k] of their policy losses."""
        self.loss += float(losses.sum())
        # Tokens are sampled from the engine's policy, so this estimates KL(inference || pi).
        drift = tokens.inference_logprobs - tokens.logprobs
        ref_drift = torch.zeros_like(drift) if tokens.ref_logprobs is None else tokens.logprobs - tokens.ref_logprobs
        sums = (
            torch.ones_like(drift),
            term.ratio,
            term.clipped,
            kl_estimate(drift, "k3"),
            kl_estimate(ref_drift, "k3"),
            tokens.entropies,
            log_mismatch(tokens).abs(),
            weights,
            weights.square(),
        )
        lines = tokens.staleness.clamp(0, MOST_STALENESS).long()[tokens.rollout]
        table = torch.stack([values.double() for values in sums], 1)
        self.by_staleness.index_add_(0, lines.cpu(), table.cpu())

    def keep_tokens(self, tokens: LossTokens, term: PolicyTerm, shares: torch.Tensor) -> None:
        """Do nothing; a tally for tables of tokens overrides it. `shares` [k]: their parts of the batch's loss."""

    def add_ranks(self, total: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Add the sums of all other ranks; `total` sums a tensor over the ranks."""
        sums = total(torch.cat([torch.tensor([self.loss], dtype=torch.float64), self.by_staleness.flatten()]))
        self.loss, self.by_staleness = float(sums[0]), sums[1:].view_as(self.by_staleness)

    def figures(self) -> dict[str, float]:
        """Return the mean of each sum over all loss tokens; 0 without loss tokens."""
        return {"loss": self.loss / max(1, self.tokens), **_means(self.by_staleness.sum(0))}

    def staleness_figures(self) -> dict[str, dict[str, float]]:
        """Return the same by staleness, without the loss; the last key is like "8+"."""
        return {
            f"{staleness}+" if staleness == MOST_STALENESS else str(staleness): _means(row)
            for staleness, row in enumerate(self.by_staleness)
            if row[0]
        }


def _means(row: torch.Tensor) -> dict[str, float]:
    """Return means by name; `effective_share` is the effective sample size (sum w)^2 / sum w^2, per token."""
    count, *totals = row.tolist()
    sums = dict(zip(_SUMS, totals, strict=True))
    squared = count * sums.pop("weight_squared")
    means = {name: total / count if count else 0.0 for name, total in sums.items()}
    effective = sums["weight_mean"] ** 2 / squared if squared else 0.0
    return {"loss_tokens": count, **means, "effective_share": effective}
