"""A tally that keeps the values of every loss token of a step."""

from __future__ import annotations

import torch

from replaybuf_trainer.losses.statistics import Tally
from replaybuf_trainer.losses.surrogates import PolicyTerm
from replaybuf_trainer.losses.tokens import LossTokens

RECORDED = ("trainer_logprob", "ratio", "clipped", "entropy", "loss_share")


class TokenRecord(Tally):
    """Values of the loss tokens in the order of the forward passes: 20 bytes per token, on the device of the model."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[torch.Tensor] = []

    @torch.no_grad()
    def keep_tokens(self, tokens: LossTokens, term: PolicyTerm, shares: torch.Tensor) -> None:
        """Keep the values of k loss tokens; `shares` [k]: their parts of the loss of the batch."""
        columns = (tokens.logprobs, term.ratio, term.clipped, tokens.entropies, shares)
        self._parts.append(torch.stack([column.detach().float() for column in columns]))

    def values(self) -> dict[str, torch.Tensor]:
        """Return the columns `RECORDED` on the CPU, float32 [K] for the K loss tokens of the step."""
        whole = torch.cat(self._parts, 1).cpu() if self._parts else torch.empty(len(RECORDED), 0)
        return dict(zip(RECORDED, whole, strict=True))
