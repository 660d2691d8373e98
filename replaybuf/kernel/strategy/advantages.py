"""Advantage estimators: from the rewards of one group to one advantage per rollout, or per token.

The run configuration's `advantage` names the estimator. Each is a pure function of rewards float64 [n] and sampled
tokens float64 [n] of n rollouts, and returns advantages float64 [n]. With r the rewards and T the tokens:

==============  ====================================  =======================================
`grpo`          (r - mean(r)) / (std(r) + 1e-6)       sum over rollouts is 0
`dr-grpo`       r - mean(r)                           sum over rollouts is 0
`rloo`          r_i - mean of the other rewards       sum over rollouts is 0
`rloo-length`   rloo_i * mean(T) / T_i                sum over all tokens is 0
`process`       `grpo`, or one per token, see below   sum over process rewards is 0
==============  ====================================  =======================================

If all rewards are equal, all advantages are exactly 0: the service flags such a group and does not drop it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from replaybuf.errors import Invalid
from replaybuf.kernel.rows.index import mean_of
from replaybuf.wire.group import LARGEST_SCORE, Float32s, Float64s, Group, Int32s

ProcessReward: TypeAlias = tuple[int, float]
"""End of a section of a completion (one past its last token), and the reward of the section."""

GRPO_EPSILON = 1e-6
"""Keeps the division finite if the rewards hardly differ; in units of reward."""


def grpo(rewards: Float64s, tokens: Float64s) -> Float64s:
    """Return (r - mean) / (std + 1e-6).

    Shao et al. 2024, "DeepSeekMath", section 4.1.2 (outcome supervision). The paper leaves the kind of standard
    deviation open; this is the population's (divided by n). The epsilon is ours.
    """
    centred = rewards - mean_of(rewards)
    normalised: Float64s = centred / (math.sqrt(mean_of(np.square(centred))) + GRPO_EPSILON)
    return normalised


def dr_grpo(rewards: Float64s, tokens: Float64s) -> Float64s:
    """Return r - mean.

    Liu et al. 2025, "Understanding R1-Zero-Like Training: A Critical Perspective", section 3.2. Dividing by the
    standard deviation gives more weight to groups that are nearly always or nearly never solved. The paper's
    second change, a constant instead of the response length in the loss, belongs to the trainer.
    """
    centred: Float64s = rewards - mean_of(rewards)
    return centred


def rloo(rewards: Float64s, tokens: Float64s) -> Float64s:
    """Return r_i - mean of the other rewards, which is (r_i - mean) * n / (n - 1).

    Kool et al. 2019, "Buy 4 REINFORCE Samples, Get a Baseline for Free!"; Ahmadian et al. 2024, "Back to Basics",
    section 3.1. The baseline leaves out the rollout's own reward, so the gradient has no bias.
    """
    rollouts = len(rewards)
    against_others: Float64s = (rewards - mean_of(rewards)) * (rollouts / max(rollouts - 1, 1))
    return against_others


def rloo_length(rewards: Float64s, tokens: Float64s) -> Float64s:
    """Return rloo_i * mean(T) / T_i, so that long and short rollouts have the same weight.

    For a loss that is a mean over all tokens: up to the constant mean(T) it becomes the leave-one-out loss with GRPO's
    factor 1 / |o_i| (Shao et al. 2024, equation 3). If the loss itself divides by the length of each rollout, use
    `rloo`. A rollout without sampled tokens has T_i = 1.
    """
    lengths = np.maximum(tokens, 1.0)
    weighted: Float64s = rloo(rewards, tokens) * (mean_of(lengths) / lengths)
    return weighted


def process_advantages(rewards: Sequence[Sequence[ProcessReward]], lengths: Int32s) -> Float32s:
    """Compute advantages per completion token, float32 [C], from the process rewards of each of n rollouts.

    `rewards[i]`: rewards of rollout i in any order, with ends in 1..`lengths[i]`. All rewards of the group are
    normalised together as in `grpo`; the advantage of a token is the sum of those whose section ends at or after it:
    Shao et al. 2024, "DeepSeekMath", section 4.1.3 (process supervision). With one reward at the end of each rollout
    the result is that of `grpo`.
    Raises `Invalid` without any reward, for an end out of range, and as `advantages` does.
    """
    rewards_of_steps = np.array([reward for rollout in rewards for _, reward in rollout], np.float64)
    normalised = iter(advantages("grpo", rewards_of_steps))
    columns: list[Float64s] = []
    for number, (rollout, length) in enumerate(zip(rewards, lengths.tolist(), strict=True)):
        ending = np.zeros(length, np.float64)
        for end, _ in rollout:
            if not 1 <= end <= length:
                detail = f"a process reward of rollout {number} ends at token {end}; its completion has {length}"
                raise Invalid(detail, name="process_rewards", value=end, bound=length)
            ending[end - 1] += next(normalised)
        columns.append(ending[::-1].cumsum()[::-1])
    summed = np.concatenate(columns)
    if not (np.abs(summed) <= LARGEST_SCORE).all():
        raise _too_large(rewards_of_steps)
    return summed.astype(np.float32)


PROCESS = "process"
"""Estimator that uses process rewards; without them it equals `grpo`."""
ESTIMATORS: dict[str, Callable[[Float64s, Float64s], Float64s]] = {
    "dr-grpo": dr_grpo,
    "grpo": grpo,
    PROCESS: grpo,
    "rloo": rloo,
    "rloo-length": rloo_length,
}
"""Estimators by name."""


def check_estimator(name: str) -> None:
    """Raise `Invalid` with the valid names unless `name` is an estimator."""
    if name not in ESTIMATORS:
        valid = sorted(ESTIMATORS)
        raise Invalid(f"advantage is {name!r}; valid: {', '.join(valid)}", name="advantage", value=name, bound=valid)


def advantages(name: str, rewards: Float64s, tokens: Float64s | None = None) -> Float64s:
    """Compute the advantages of one group, float64 [n], from its rewards, float64 [n], n >= 1.

    `tokens`: sampled tokens of each rollout, float64 [n]; None = all equal. Raises `Invalid` for an unknown name, for
    no rewards, and for rewards that are not finite or give advantages beyond float32, which the trainer gets.
    """
    check_estimator(name)
    if not len(rewards):
        raise Invalid("rewards is empty; a group has at least one rollout", name="rewards", value=0, bound=1)
    with np.errstate(over="ignore", invalid="ignore"):  # the result is checked below
        lengths = np.ones_like(rewards) if tokens is None else tokens
        result = np.zeros_like(rewards) if zero_variance(rewards) else ESTIMATORS[name](rewards, lengths)
        variance = mean_of(np.square(rewards - mean_of(rewards)))
    # Check the spread too: if squares overflow, dividing by it gives zeros, as if all rewards were equal.
    if not (math.isfinite(variance) and np.maximum.reduce(np.abs(result)) <= LARGEST_SCORE):
        raise _too_large(rewards)
    return result


def _too_large(rewards: Float64s) -> Invalid:
    lowest, highest = float(rewards.min()), float(rewards.max())
    detail = f"rewards from {lowest:g} to {highest:g} give no finite advantages in float32"
    return Invalid(detail, name="rewards", value=[lowest, highest], bound=LARGEST_SCORE)


def group_advantages(name: str, group: Group) -> Float64s:
    """Compute the advantages of a group, float64 [n]. Raises `Invalid` as `advantages` does."""
    tokens = group.sampled_lengths.astype(np.float64) if ESTIMATORS.get(name) is rloo_length else None
    return advantages(name, group.rewards, tokens)


def zero_variance(rewards: Float64s) -> bool:
    """Return whether all rewards are equal; rounding can make their standard deviation a tiny number above 0."""
    return bool(np.logical_and.reduce(rewards == rewards[0]))
