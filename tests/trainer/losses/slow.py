"""The losses once more, slowly: plain Python floats, one loop per token, derivatives written by hand.

Nothing here is shared with `replaybuf_trainer.losses`. A loss is a function from rollouts to one (value, derivative)
per token; the derivative is by the token's own logprob.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from replaybuf_trainer.losses import LossTokens


@dataclasses.dataclass(frozen=True, slots=True)
class Token:
    """One loss token."""

    logprob: float
    inference: float
    old: float
    ref: float
    entropy: float
    advantage: float


@dataclasses.dataclass(frozen=True, slots=True)
class SlowRollout:
    """The loss tokens of one rollout, its sampling weight and staleness."""

    tokens: list[Token]
    weight: float
    staleness: int


Terms = list[list[tuple[float, float]]]
"""Value and derivative per token, by rollout."""


def drawn(seed: int, lengths: Sequence[int] = (5, 1, 9, 0, 3)) -> list[SlowRollout]:
    """Draw rollouts whose ratios lie on both sides of every clip."""
    rng = random.Random(seed)
    made = []
    for number, length in enumerate(lengths):
        advantage = rng.gauss(0, 1)
        tokens = []
        for _ in range(length):
            logprob = -rng.expovariate(0.5)
            old = logprob + rng.gauss(0, 0.4)
            inference = old + rng.gauss(0, 0.3)
            tokens.append(Token(logprob, inference, old, logprob + rng.gauss(0, 0.5), rng.uniform(0, 3), advantage))
        made.append(SlowRollout(tokens, rng.uniform(0.5, 1.5), number % 3))
    return made


def as_columns(rollouts: Sequence[SlowRollout], **changed: Any) -> LossTokens:
    """Return the same as tensors, float64; logprobs and entropies are leaves with gradient."""
    every = [token for rollout in rollouts for token in rollout.tokens]

    def column(name: str) -> torch.Tensor:
        return torch.tensor([getattr(token, name) for token in every], dtype=torch.float64)

    numbers = [number for number, rollout in enumerate(rollouts) for _ in rollout.tokens]
    columns: dict[str, Any] = {
        "logprobs": column("logprob").requires_grad_(),
        "entropies": column("entropy").requires_grad_(),
        "inference_logprobs": column("inference"),
        "old_logprobs": column("old"),
        "ref_logprobs": column("ref"),
        "advantages": column("advantage"),
        "rollout": torch.tensor(numbers, dtype=torch.int64),
        "sampling_weights": torch.tensor([rollout.weight for rollout in rollouts], dtype=torch.float64),
        "staleness": torch.tensor([rollout.staleness for rollout in rollouts], dtype=torch.int32),
    }
    return LossTokens(**columns | changed)


def per_token(formula: Callable[..., tuple[float, float]]) -> Callable[..., Terms]:
    """Apply a formula (ratio, token, options) to every token."""

    def terms(rollouts: Sequence[SlowRollout], ratio_to: str = "inference", **options: Any) -> Terms:
        return [
            [formula(math.exp(token.logprob - getattr(token, ratio_to)), token, **options) for token in rollout.tokens]
            for rollout in rollouts
        ]

    return terms


def ppo(
    ratio: float, token: Token, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
) -> tuple[float, float]:
    """One branch per case of sign and ratio."""
    advantage = token.advantage
    if advantage >= 0:
        if ratio > 1 + clip_high:
            return -(1 + clip_high) * advantage, 0.0
        return -ratio * advantage, -ratio * advantage
    if ratio < 1 - clip_low:
        return -(1 - clip_low) * advantage, 0.0
    if dual_clip is not None and ratio > dual_clip:
        return -dual_clip * advantage, 0.0
    return -ratio * advantage, -ratio * advantage


def cispo(ratio: float, token: Token, clip_low: float = 1.0, clip_high: float = 0.28) -> tuple[float, float]:
    """The weight is a constant of the derivative."""
    weight = 1 + clip_high if ratio > 1 + clip_high else 1 - clip_low if ratio < 1 - clip_low else ratio
    return -weight * token.advantage * token.logprob, -weight * token.advantage


def truncated(ratio: float, token: Token, bound: float = 2.0) -> tuple[float, float]:
    """As CISPO with an upper bound alone."""
    weight = bound if ratio > bound else ratio
    return -weight * token.advantage * token.logprob, -weight * token.advantage


def decoupled(ratio: float, token: Token, bound: float | None = None, **clip: float) -> tuple[float, float]:
    """`ratio` is that to the old policy."""
    value, derivative = ppo(ratio, token, **clip)
    weight = math.exp(token.old - token.inference)
    if bound is not None and weight > bound:
        weight = bound
    return weight * value, weight * derivative


def gspo(
    rollouts: Sequence[SlowRollout], ratio_to: str = "inference", clip_low: float = 3e-4, clip_high: float = 4e-4
) -> Terms:
    """One loss per rollout; its tokens share value and derivative, for the mean over the rollout's tokens."""
    terms: Terms = []
    for rollout in rollouts:
        length = len(rollout.tokens)
        drift = sum(token.logprob - getattr(token, ratio_to) for token in rollout.tokens)
        ratio = math.exp(drift / length) if length else 1.0
        # d ratio / d logprob_t = ratio / length, and the mean of `length` equal values divides by length once.
        terms.append([ppo(ratio, token, clip_low, clip_high) for token in rollout.tokens])
    return terms


def covariance_order(rollouts: Sequence[SlowRollout]) -> list[tuple[float, int, int]]:
    """Return (covariance, rollout, token), the highest first."""
    every = [token for rollout in rollouts for token in rollout.tokens]
    logprob = sum(token.logprob for token in every) / len(every)
    advantage = sum(token.advantage for token in every) / len(every)
    return sorted(
        (
            ((token.logprob - logprob) * (token.advantage - advantage), i, t)
            for i, rollout in enumerate(rollouts)
            for t, token in enumerate(rollout.tokens)
        ),
        reverse=True,
    )


def kl_cov(
    rollouts: Sequence[SlowRollout], ratio_to: str = "inference", share: float = 0.002, weight: float = 1.0
) -> Terms:
    """Penalise the tokens with the highest covariance."""
    order = covariance_order(rollouts)
    chosen = {(i, t) for _, i, t in order[: math.ceil(share * len(order))]}
    terms: Terms = []
    for i, rollout in enumerate(rollouts):
        terms.append([])
        for t, token in enumerate(rollout.tokens):
            drift = token.logprob - getattr(token, ratio_to)
            value = derivative = -math.exp(drift) * token.advantage
            if (i, t) in chosen:
                value += weight * abs(drift)
                derivative += weight * math.copysign(1.0, drift)
            terms[i].append((value, derivative))
    return terms


def clip_cov(
    rollouts: Sequence[SlowRollout],
    ratio_to: str = "inference",
    share: float = 0.0002,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    **clip: float,
) -> Terms:
    """Remove the derivative of the chosen tokens among those that the clip leaves."""
    terms = per_token(ppo)(rollouts, ratio_to, **clip)
    order = covariance_order(rollouts)
    free = [(i, t) for cov, i, t in order if cov_low <= cov <= cov_high and terms[i][t][1] != 0.0]
    for i, t in free[: math.ceil(share * len(order))]:
        terms[i][t] = (terms[i][t][0], 0.0)
    return terms


SLOW: dict[str, Callable[..., Terms]] = {
    "cispo": per_token(cispo),
    "clip-cov": clip_cov,
    "decoupled-ppo": lambda rollouts, **options: per_token(decoupled)(rollouts, "old", **options),
    "dr-grpo": per_token(ppo),
    "grpo": per_token(ppo),
    "gspo": gspo,
    "kl-cov": kl_cov,
    "truncated-ratio": per_token(truncated),
}


def factor(
    rollouts: Sequence[SlowRollout], rollout: SlowRollout, normalise: str, constant: int, elsewhere: int
) -> float:
    """Return the factor of a token; `elsewhere` rollouts of other ranks have ten tokens each."""
    count = len(rollouts) + elsewhere
    if normalise == "token":
        return 1 / (sum(len(rollout.tokens) for rollout in rollouts) + 10 * elsewhere)
    return 1 / (count * (len(rollout.tokens) if normalise == "sequence" else constant))


def correction_weights(
    rollouts: Sequence[SlowRollout], level: str, mode: str, lower: float = 0.0, upper: float = 2.0, veto: float = 0.0
) -> list[list[float]]:
    """Return the weight of each token by rollout."""
    weights = []
    for rollout in rollouts:
        drifts = [token.old - token.inference for token in rollout.tokens]
        row = []
        for drift in drifts:
            at = {"token": drift, "sequence": sum(drifts), "geometric": sum(drifts) / len(drifts)}[level]
            ratio = math.exp(at)
            if mode == "truncate":
                weight = upper if ratio > upper else lower if ratio < lower else ratio
            elif lower <= ratio <= upper:
                weight = ratio if mode == "mask" else 1.0
            else:
                weight = 0.0
            if any(math.exp(other) < veto for other in drifts):
                weight = 0.0
            row.append(weight)
        weights.append(row)
    return weights


def reference(token: Token, estimate: str, weight: float) -> tuple[float, float]:
    """Return penalty and derivative."""
    drift = token.logprob - token.ref
    if estimate == "k1":
        return weight * drift, weight
    if estimate == "k2":
        return weight * drift * drift / 2, weight * drift
    return weight * (math.exp(-drift) - 1 + drift), weight * (1 - math.exp(-drift))
