"""Learning-rate schedules: pure functions from the step to a factor of the learning rate, from 0 to 1."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypeAlias

ScheduleName: TypeAlias = Literal["constant", "linear", "cosine", "wsd"]
WSD_DECAY_SHARE = 0.2
"""Share of all steps in which `wsd` decays."""


def learning_rate_factor(schedule: ScheduleName, step: int, warm_up: int, steps: int | None) -> float:
    """Return the factor of step `step`, from 0; `steps` is the number of all steps, which only constant does not need.

    The factor rises linearly to 1 in `warm_up` steps, (step + 1) / warm_up. Then it is 1 (constant), or falls so that
    it would be 0 at step `steps`. Each decay gets the share of the remaining steps that is done, from 0 to below 1.
    """
    if step < warm_up:
        return (step + 1) / warm_up
    if schedule == "constant" or steps is None:
        return 1.0
    done = (step - warm_up) / max(1, steps - warm_up)
    return _DECAY[schedule](min(1.0, done))


def _linear(done: float) -> float:
    return 1 - done


def _cosine(done: float) -> float:
    """Return the half cosine (Loshchilov and Hutter 2017, SGDR, arXiv:1608.03983, equation 5) without restarts."""
    return (1 + math.cos(math.pi * done)) / 2


def _wsd(done: float) -> float:
    """Return 1, and in the last `WSD_DECAY_SHARE` 1 - sqrt(share of the decay that is done).

    Hägele et al. 2024, arXiv:2405.18392, section 3.1: this cool-down beats a linear one and needs no length in advance.
    """
    decayed = 1 - (1 - done) / WSD_DECAY_SHARE
    return 1 - math.sqrt(decayed) if decayed > 0 else 1.0


_DECAY: dict[ScheduleName, Callable[[float], float]] = {"linear": _linear, "cosine": _cosine, "wsd": _wsd}
