"""Losses on packed micro-batches, composed of few parts.

    loss = sum over tokens of  factor  x  sampling weight  x  (correction x policy + reference + entropy)
           normalisation.py    tokens.py        correction.py   policy.py   regularisers.py

A plug-in is a class that inherits `PolicyLoss`, registered in the entry-point group `replaybuf.losses`.
"""

from __future__ import annotations

from replaybuf_trainer.losses.normalisation import BatchTotals
from replaybuf_trainer.losses.objective import Objective, load_objective
from replaybuf_trainer.losses.policy import PolicyLoss
from replaybuf_trainer.losses.statistics import Tally
from replaybuf_trainer.losses.surrogates import PolicyTerm, clipped_surrogate, weighted_score
from replaybuf_trainer.losses.tokens import LossTokens, Row, loss_tokens

__all__ = [
    "BatchTotals",
    "LossTokens",
    "Objective",
    "PolicyLoss",
    "PolicyTerm",
    "Row",
    "Tally",
    "clipped_surrogate",
    "load_objective",
    "loss_tokens",
    "weighted_score",
]
