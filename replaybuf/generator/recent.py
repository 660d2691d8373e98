"""Means over the newest stored groups: reward, completion length, and KL to the models of the extra logprobs.

Groups are merged by their rollouts and tokens, so short groups and partial groups weigh less. KL is an estimate in nats
per sampled token of KL(engine || other), by the logprobs of the engine p and of the other model q (Schulman 2020, k3)::

    mean over tokens of  q/p - 1 - log(q/p)

`ref`: distance from the reference; `teacher`: from the teacher; `old`: engine and proximal policy disagree, which is
0 for equal weights and equal arithmetic. There is no KL without such a column: the engine's own logprobs of two
versions are of different tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from replaybuf.wire.group import Float32s, Group, Int32s

WINDOW_GROUPS = 128
LARGEST_LOG_RATIO = 20.0
"""Larger ones count as this, so that one token with an impossible logprob leaves the mean finite."""
COLUMNS = ("ref_logprobs", "old_logprobs", "teacher_logprobs")


class RecentMeans(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the newest `groups` stored groups; `kl` by the name of the other model, such as `ref`."""

    groups: int
    reward: float
    completion_tokens: float
    kl: dict[str, float] = {}


class _Sums(NamedTuple):
    """Sums over one group and its completion `lengths`, int32 [n]; `kl` over `kl_tokens` sampled tokens, by name."""

    rollouts: int
    reward: float
    lengths: Int32s
    kl: dict[str, float]
    kl_tokens: int


class RecentGroups:
    """The newest `WINDOW_GROUPS` stored groups, as sums."""

    def __init__(self) -> None:
        self._groups: deque[_Sums] = deque(maxlen=WINDOW_GROUPS)

    def add(self, group: Group) -> None:
        """Add a stored group; the oldest leaves."""
        kl = dict(_kl_sums(group))
        self._groups.append(
            _Sums(
                group.rollouts,
                float(group.rewards.sum()),
                group.completion_lengths,
                kl,
                int(np.count_nonzero(group.completion_mask)) if kl else 0,
            )
        )

    def means(self) -> RecentMeans | None:
        """Merge the groups; None before the first."""
        if not self._groups:
            return None
        rollouts = sum(group.rollouts for group in self._groups)
        names = sorted({name for group in self._groups for name in group.kl})
        return RecentMeans(
            groups=len(self._groups),
            reward=sum(group.reward for group in self._groups) / rollouts,
            completion_tokens=sum(int(group.lengths.sum()) for group in self._groups) / rollouts,
            kl={name: self._mean_kl(name) for name in names},
        )

    def lengths(self) -> list[Int32s]:
        """List the completion lengths of every group, int32 [n]."""
        return [group.lengths for group in self._groups]

    def _mean_kl(self, name: str) -> float:
        having = [group for group in self._groups if name in group.kl]
        return sum(group.kl[name] for group in having) / max(1, sum(group.kl_tokens for group in having))


def _kl_sums(group: Group) -> Iterator[tuple[str, float]]:
    for column in COLUMNS:
        values: Float32s | None = getattr(group, column)
        if values is not None:
            log_ratios = (values.astype(np.float64) - group.inference_logprobs)[group.completion_mask]
            log_ratios = np.clip(log_ratios, -np.inf, LARGEST_LOG_RATIO)
            yield column.removesuffix("_logprobs"), float((np.expm1(log_ratios) - log_ratios).sum())
