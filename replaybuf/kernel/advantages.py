"""Group-relative advantages: from the rewards of one group to one number per rollout.

A registry by the name that the run configuration's `advantage` holds. All are pure functions
`rewards float64 [n], tokens float64 [n] -> advantages float64 [n]`, `tokens` the sampled tokens of each rollout. Every
token of a rollout gets the rollout's advantage, but with process rewards, of which `process_advantages` makes one per
token. With r the rewards, T the tokens, of n rollouts:

==============  ====================================  =======================================
`grpo`          (r - mean(r)) / (std(r) + 1e-6)       sum over rollouts is 0
`dr-grpo`       r - mean(r)                           sum over rollouts is 0
`rloo`          r_i - mean of the other rewards       sum over rollouts is 0
`rloo-length`   rloo_i * mean(T) / T_i                sum over all tokens is 0
`process`       `grpo`, or one per token, see below   sum over process rewards is 0
==============  ====================================  =======================================

All give exact zeros where all rewards are equal: such a group teaches nothing, and is flagged, not dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from replaybuf.errors import Invalid
from replaybuf.wire.group import Float32s, Float64s, Group, Int32s

ProcessReward: TypeAlias = tuple[int, float]
"""Reward of a stretch of a completion: where the stretch ends, and the reward."""

GRPO_EPSILON = 1e-6
"""Keeps the division finite where a group's rewards hardly differ; in units of reward."""


def grpo(rewards: Float64s, tokens: Float64s) -> Float64s:
    """Return (r - mean) / (std + 1e-6).

    Shao et al. 2024, "DeepSeekMath", section 4.1.2 (outcome supervision). The paper does not say which standard
    deviation; this is the population's (divided by n), and the epsilon is ours.
    """
    normed: Float64s = (rewards - rewards.mean()) / (rewards.std() + GRPO_EPSILON)
    return normed


def dr_grpo(rewards: Float64s, tokens: Float64s) -> Float64s:
    """Return r - mean.

    Liu et al. 2025, "Understanding R1-Zero-Like Training: A Critical Perspective", section 3.2: without the division by
    the standard deviation, groups that are nearly solved or nearly hopeless weigh no more than others. The paper's
    second change, a constant instead of the response length in the loss, is the trainer's.
    """
    centred: Float64s = rewards - rewards.mean()
    return centred


def rloo(rewards: Float64s, tokens: Float64s) -> Float64s:
    """Return r_i - mean of the rewards but r_i, which is (r_i - mean) * n / (n - 1).

    Kool et al. 2019, "Buy 4 REINFORCE Samples, Get a Baseline for Free!"; Ahmadian et al. 2024, "Back to Basics",
    section 3.1. A baseline that does not contain the rollout's own reward leaves the gradient without bias.
    """
    rollouts = len(rewards)
    against_others: Float64s = (rewards - rewards.mean()) * (rollouts / max(rollouts - 1, 1))
    return against_others


def rloo_length(rewards: Float64s, tokens: Float64s) -> Float64s:
    """Return rloo_i * mean(T) / T_i: every rollout weighs the same, however long it is.

    For a loss that is a mean over all tokens, in which a long rollout would weigh more. With this it is the
    leave-one-out loss with the 1 / |o_i| of each rollout that GRPO has (Shao et al. 2024, equation 3), up to the
    constant mean(T). A loss that divides by the length of each rollout itself wants `rloo`. A rollout without a sampled
    token counts as one of one token.
    """
    lengths = np.maximum(tokens, 1.0)
    levelled: Float64s = rloo(rewards, tokens) * (lengths.mean() / lengths)
    return levelled


def process_advantages(rewards: Sequence[Sequence[ProcessReward]], lengths: Int32s) -> Float32s:
    """Compute advantages per completion token, float32 [C], from the process rewards of each of n rollouts.

    `rewards[i]`: (one past the last token of the stretch, its reward), ends in 1..`lengths[i]`, in any order. All
    rewards of the group are normalised together, and a token has the sum of those that end at it or later: Shao et al.
    2024, "DeepSeekMath", section 4.1.3 (process supervision); standard deviation and epsilon as in `grpo`, which this
    is where every rollout has one reward at its end. Tokens behind the last end have 0, and all where all rewards are
    equal. Raises `Invalid` where there is no reward, an end is out of range, or as `advantages`.
    """
    normalised = iter(
        advantages("grpo", np.array([reward for rollout in rewards for _, reward in rollout], np.float64))
    )
    columns: list[Float64s] = []
    for number, (rollout, length) in enumerate(zip(rewards, lengths.tolist(), strict=True)):
        ending = np.zeros(length, np.float64)
        for end, _ in rollout:
            if not 1 <= end <= length:
                raise Invalid(
                    f"a process reward of rollout {number} ends at token {end}; its completion has {length}",
                    name="process_rewards",
                    value=end,
                    bound=length,
                )
            ending[end - 1] += next(normalised)
        columns.append(ending[::-1].cumsum()[::-1])
    return np.concatenate(columns).astype(np.float32)


PROCESS = "process"
"""The estimator that heeds process rewards; without any, the reward counts as one at the end."""
ESTIMATORS: dict[str, Callable[[Float64s, Float64s], Float64s]] = {
    "dr-grpo": dr_grpo,
    "grpo": grpo,
    PROCESS: grpo,
    "rloo": rloo,
    "rloo-length": rloo_length,
}
"""Every estimator by its name in the run configuration."""


def check_estimator(name: str) -> None:
    """Raise `Invalid` naming the valid ones where there is no estimator `name`."""
    if name not in ESTIMATORS:
        valid = sorted(ESTIMATORS)
        raise Invalid(f"advantage is {name!r}; valid: {', '.join(valid)}", name="advantage", value=name, bound=valid)


def advantages(name: str, rewards: Float64s, tokens: Float64s | None = None) -> Float64s:
    """Compute the advantages of one group, float64 [n], from its rewards, float64 [n], n >= 1.

    `tokens`: sampled tokens of each rollout, float64 [n]; all the same where it is None.
    Raises `Invalid` for an unknown name, for no rewards, and where a reward is not finite or too large to average.
    """
    check_estimator(name)
    if not len(rewards):
        raise Invalid("rewards is empty; a group has at least one rollout", name="rewards", value=0, bound=1)
    with np.errstate(over="ignore", invalid="ignore"):  # the result is checked below
        lengths = np.ones_like(rewards) if tokens is None else tokens
        result = np.zeros_like(rewards) if zero_variance(rewards) else ESTIMATORS[name](rewards, lengths)
        spread = rewards.std()
    # The spread too: where squares overflow, dividing by it would give zeros, as if all rewards were equal.
    if not np.isfinite(spread) or not np.isfinite(result).all():
        raise Invalid(
            f"rewards from {rewards.min():g} to {rewards.max():g} give no finite advantages",
            name="rewards",
            value=[float(reward) for reward in rewards],
            bound="finite",
        )
    return result


def group_advantages(name: str, group: Group) -> Float64s:
    """Compute the advantages of a group, float64 [n]. Raises `Invalid` as `advantages` does."""
    return advantages(name, group.rewards, group.sampled_lengths.astype(np.float64))


def zero_variance(rewards: Float64s) -> bool:
    """Say whether all rewards are equal. Not by the standard deviation, which rounding makes a tiny number above 0."""
    return bool((rewards == rewards[0]).all())
