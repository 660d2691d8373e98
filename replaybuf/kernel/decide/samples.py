"""Choose the rollouts of a trained step that stay readable, from the rewards alone.

Two choices, so that few frames are read: first groups by their mean rewards, then rollouts inside each chosen group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from replaybuf.kernel.state.history import RecordedBatch
from replaybuf.kernel.state.run_state import RunState
from replaybuf.wire.answer.samples import Why

MOST_BEHIND = 100
"""Newest steps that a new leader still takes samples of; a run may have thousands that are freed."""


def find_unsampled(state: RunState, sampled: int) -> list[tuple[int, RecordedBatch]]:
    """List the trained steps whose batch is newer than ledger entry `sampled`, oldest first, with their batches.

    Batches of one history ascend with their steps, so a step that a rewind made trained again has its samples already.
    """
    unsampled: list[tuple[int, RecordedBatch]] = []
    step = state.step - 1
    while len(unsampled) < MOST_BEHIND and (made := state.records.get(step)) and made.entry > sampled:
        unsampled.append((step, made))
        step -= 1
    return unsampled[::-1]


def choose_groups(
    reward_means: npt.NDArray[Any], rollouts: npt.NDArray[Any], most: int, seed: Sequence[int]
) -> list[tuple[int, Why]]:
    """Choose up to `most` times a group by its position in the step, with the reason.

    The best has the highest mean reward, the worst the lowest. Then come groups by chance: those without a choice
    first, and none more often than it has rollouts. Columns [n] with n >= 1 groups.
    """
    most = min(most, int(rollouts.sum()))
    best, worst = int(np.argmax(reward_means)), len(reward_means) - 1 - int(np.argmin(reward_means[::-1]))
    chosen: list[tuple[int, Why]] = [(best, "best"), (worst, "worst")]
    chosen = chosen[:most]
    order = np.random.default_rng([*seed]).permutation(len(rollouts))
    order = order[np.argsort(np.isin(order, [best, worst]), kind="stable")]
    left = rollouts.astype(np.int64)
    for position, _ in chosen:
        left[position] -= 1
    while len(chosen) < most:
        free = order[left[order] > 0][: most - len(chosen)]
        left[free] -= 1
        chosen += [(position, "chance") for position in free.tolist()]
    return chosen


def choose_rollouts(rewards: npt.NDArray[Any], reasons: Sequence[Why], seed: Sequence[int]) -> list[int]:
    """Choose a different rollout of a group for each reason, by place; `rewards` [n] with n >= len(reasons)."""
    free: list[int] = np.argsort(rewards, kind="stable").tolist()  # worst first
    draw = np.random.default_rng([*seed])
    places: list[int] = []
    for why in reasons:
        at = {"best": len(free) - 1, "worst": 0}.get(why)
        places.append(free.pop(int(draw.integers(len(free))) if at is None else at))
    return places
