"""Group-relative advantages: from the rewards of one group to one number per rollout.

A registry by the name that the run configuration's `advantage` holds. All are pure functions
`rewards float64 [n] -> advantages float64 [n]`; every token of a rollout gets the rollout's advantage.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from replaybuf.errors import Invalid
from replaybuf.group import Float64s

GRPO_EPSILON = 1e-6
"""Keeps the division finite where a group's rewards hardly differ; in units of reward."""


def grpo(rewards: Float64s) -> Float64s:
    """Return (r - mean) / (std + 1e-6); zeros where all rewards are equal.

    Shao et al. 2024, "DeepSeekMath", section 4.1.2 (outcome supervision). The paper does not say which standard
    deviation; this is the population's (divided by n), and the epsilon is ours.
    """
    spread = rewards.std()
    return np.zeros_like(rewards) if _all_equal(rewards) else (rewards - rewards.mean()) / (spread + GRPO_EPSILON)


def dr_grpo(rewards: Float64s) -> Float64s:
    """Return r - mean; zeros where all rewards are equal.

    Liu et al. 2025, "Understanding R1-Zero-Like Training: A Critical Perspective", section 3.2: without the division by
    the standard deviation, groups that are nearly solved or nearly hopeless weigh no more than others. The paper's
    second change, a constant instead of the response length in the loss, is the trainer's.
    """
    return np.zeros_like(rewards) if _all_equal(rewards) else rewards - rewards.mean()


ESTIMATORS: dict[str, Callable[[Float64s], Float64s]] = {"dr-grpo": dr_grpo, "grpo": grpo}
"""Every estimator by its name in the run configuration."""


def check_estimator(name: str) -> None:
    """Raise `Invalid` naming the valid ones where there is no estimator `name`."""
    if name not in ESTIMATORS:
        valid = sorted(ESTIMATORS)
        raise Invalid(f"advantage is {name!r}; valid: {', '.join(valid)}", name="advantage", value=name, bound=valid)


def advantages(name: str, rewards: Float64s) -> Float64s:
    """Compute the advantages of one group, float64 [n], from its rewards, float64 [n], n >= 1.

    Raises `Invalid` for an unknown name, for no rewards, and where a reward is not finite or too large to average.
    """
    check_estimator(name)
    if not len(rewards):
        raise Invalid("rewards is empty; a group has at least one rollout", name="rewards", value=0, bound=1)
    with np.errstate(over="ignore", invalid="ignore"):  # judged below, by the result
        result = ESTIMATORS[name](rewards)
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


def _all_equal(rewards: Float64s) -> bool:
    # Not by the standard deviation: rounding makes that of equal rewards a tiny number above zero.
    return bool((rewards == rewards[0]).all())
