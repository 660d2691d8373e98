"""What became of groups, counted: how long, how often used, how old, and of how many prompts.

`RunState` keeps one `GroupHistograms` as it folds, so the counts are the same on every machine and after every restart.
Only whole numbers are added up: no order of adding changes a sum. There are two kinds of counts::

    events, never taken back:       a group was stored; a batch used a group (each use counts, also one that a rewind
                                    voids later, as in `groups_used` and `used_staleness`)
    standings, which a rewind with
    `resample` takes back:          a group is dropped (evicted unused, or a dead letter), as in `evicted`;
                                    a prompt is trained in the surviving history

    stored  = lengths["stored"]             groups_used = lengths["used"] = sum(reuse)
    dropped = lengths["dropped"] = sum(drop_ages[...].versions) = sum(evicted) + sum(dead_lettered)

A group with a prompt index stands for that prompt. One that came with a ticket is the only one of its prompt; those
without a ticket count as a prompt each. So prompts are counted without keeping any of them.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools

import numpy as np
import numpy.typing as npt

from replaybuf.kernel.index import DEAD, Index
from replaybuf.wire.run_status import Coverage

STORED, USED, DROPPED = KINDS = ("stored", "used", "dropped")
"""Groups whose lengths are told side by side: apart, they show what the buffer does to long ones (length bias)."""

_LEAST_POWER = 4
TOKENS = tuple(2**power for power in range(_LEAST_POWER, 21))
"""Upper edges of the buckets of lengths, in tokens."""
VERSIONS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
"""Upper edges of the buckets of ages in policy versions."""
AGE_MS = tuple(round(1000 * s) for s in (0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600, 1800, 3600, 4 * 3600, 24 * 3600))
"""Upper edges of the buckets of ages in time, in milliseconds."""
UNKNOWN_AGE = -1
"""Age of what happened at a time that its record does not tell."""
_LONGEST_AGE_S = 2_000_000
"""23 days; a column of 32 bits holds no more milliseconds."""

Rows = npt.NDArray[np.int64] | slice


@functools.cache
def _edges(edges: tuple[int, ...]) -> npt.NDArray[np.int64]:
    return np.array(edges)


@dataclasses.dataclass(slots=True)
class Histogram:
    """Whole numbers >= 0 by bucket: `counts[i]` of those up to `edges[i]` and above the edge before it.

    The last count is of those above all edges; `sum` adds up the numbers themselves.
    """

    edges: tuple[int, ...]
    counts: list[int] = dataclasses.field(default_factory=list)
    sum: int = 0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.edges) + 1)

    @property
    def count(self) -> int:
        """How many numbers are counted."""
        return sum(self.counts)

    def add(self, values: npt.NDArray[np.integer], times: int = 1) -> None:
        """Count `values` [n], each so many `times`; -1 takes them back. Those below 0 are not known and left out."""
        known = values if values.min(initial=0) >= 0 else values[values >= 0]
        found = np.bincount(_buckets(self.edges, known), minlength=len(self.counts)).tolist()
        self.counts = [count + times * more for count, more in zip(self.counts, found, strict=True)]
        self.sum += times * int(known.sum(dtype=np.int64))

    def add_one(self, value: int) -> None:
        """Count one number."""
        self.counts[bisect.bisect_left(self.edges, value)] += 1
        self.sum += value


@dataclasses.dataclass(slots=True)
class Lengths:
    """Groups by the mean tokens of their rollouts, rounded down, and by the tokens of their longest rollout."""

    mean: Histogram = dataclasses.field(default_factory=lambda: Histogram(TOKENS))
    longest: Histogram = dataclasses.field(default_factory=lambda: Histogram(TOKENS))

    def add(self, index: Index, rows: Rows, sign: int = 1) -> None:
        """Count groups, or take them back with `sign` -1."""
        mean = index["tokens"][rows] / np.maximum(index["rollouts"][rows], 1)  # exact, and faster than whole numbers
        self.mean.add(mean.astype(np.int64), sign)
        self.longest.add(index["longest_tokens"][rows], sign)


@dataclasses.dataclass(slots=True)
class Ages:
    """Dropped groups by age: in policy versions at the step of the drop, in milliseconds since they arrived."""

    versions: Histogram = dataclasses.field(default_factory=lambda: Histogram(VERSIONS))
    ms: Histogram = dataclasses.field(default_factory=lambda: Histogram(AGE_MS))


@dataclasses.dataclass(slots=True)
class GroupHistograms:
    """All counts; see the module docstring.

    `reuse`: uses by `times_sampled`, which counts the use itself; `age_at_use`: milliseconds from arrival to batch;
    `drop_ages`: by reason; `prompts_...`: groups that stand for a prompt, see `Coverage`.
    """

    lengths: dict[str, Lengths] = dataclasses.field(default_factory=lambda: {kind: Lengths() for kind in KINDS})
    reuse: dict[int, int] = dataclasses.field(default_factory=dict)
    age_at_use: Histogram = dataclasses.field(default_factory=lambda: Histogram(AGE_MS))
    drop_ages: dict[str, Ages] = dataclasses.field(default_factory=dict)
    prompts_stored: int = 0
    prompts_trained: int = 0
    prompts_dropped: int = 0

    def store(self, index: Index, rows: Rows) -> None:
        """Count groups that were stored."""
        self.lengths[STORED].add(index, rows)
        self.prompts_stored += int(np.count_nonzero(index["prompt_index"][rows] >= 0))

    def use(self, index: Index, rows: Rows, at_s: float) -> None:
        """Count one use of each of these groups, which is in `times_sampled` already."""
        times = index["times_sampled"][rows]
        self.lengths[USED].add(index, rows)
        self.age_at_use.add(ages_ms(index["arrival_s"][rows], at_s))
        for value, number in enumerate(np.bincount(times).tolist()):
            if number:
                self.reuse[value] = self.reuse.get(value, 0) + number
        self.prompts_trained += int(np.count_nonzero((times == 1) & (index["prompt_index"][rows] >= 0)))

    def unuse(self, index: Index, rows: npt.NDArray[np.int64]) -> None:
        """Take note that a use of these groups is void, which `times_sampled` counts no more."""
        left = rows[(index["times_sampled"][rows] == 0) & (index["prompt_index"][rows] >= 0)]
        self.prompts_trained -= len(left)
        self.prompts_dropped += int(np.count_nonzero(index["state"][left] == DEAD))

    def drop(
        self,
        index: Index,
        rows: npt.NDArray[np.int64],
        reason: str,
        version: npt.NDArray[np.int64] | int,
        age_ms: npt.NDArray[np.integer],
        sign: int = 1,
    ) -> None:
        """Count groups dropped at `version` of the policy, or take that back with `sign` -1."""
        if not len(rows):
            return
        self.lengths[DROPPED].add(index, rows, sign)
        ages = self.drop_ages.setdefault(reason, Ages())
        ages.versions.add(np.maximum(version - index["policy_version"][rows], 0), sign)
        ages.ms.add(age_ms, sign)
        untrained = (index["times_sampled"][rows] == 0) & (index["prompt_index"][rows] >= 0)
        self.prompts_dropped += sign * int(np.count_nonzero(untrained))

    def coverage(self, issued: int, failed: int) -> Coverage:
        """Tell what became of prompts, of which `issued` had a ticket and `failed` are recorded as failed."""
        seen = max(issued, self.prompts_stored + failed)
        ended = self.prompts_trained + self.prompts_dropped + failed
        return Coverage(
            issued=seen,
            stored=self.prompts_stored,
            trained=self.prompts_trained,
            dropped=self.prompts_dropped,
            failed=failed,
            pending=seen - ended,
            share=self.prompts_trained / ended if ended else 0.0,
        )

    def groups_by_uses(self) -> dict[int, int]:
        """Count groups by their uses: those used n times but not n + 1 times. Right where no use was voided."""
        exact = {times: uses - self.reuse.get(times + 1, 0) for times, uses in sorted(self.reuse.items())}
        return {times: groups for times, groups in exact.items() if groups > 0}


def _buckets(edges: tuple[int, ...], values: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
    """Find the bucket of each value: the position of the lowest edge that is not below it."""
    if edges != TOKENS:
        return np.searchsorted(_edges(edges), values)
    # Of every group stored: the exponent of value - 1 tells the power of two, ten times as fast as a bisection.
    exponents: npt.NDArray[np.int32] = np.frexp(values - 1.0)[1]
    return np.minimum(np.maximum(exponents - _LEAST_POWER, 0), len(edges))


def ages_ms(arrival_s: npt.NDArray[np.float64], at_s: float) -> npt.NDArray[np.int64]:
    """Milliseconds from arrival to `at_s`, 0 where clocks disagree; all `UNKNOWN_AGE` where `at_s` is 0."""
    if not at_s:
        return np.full(len(arrival_s), UNKNOWN_AGE, np.int64)
    # Whoever writes to Redis past the service may leave a NaN; what it is cast to differs between machines.
    ages_s = np.nan_to_num(np.clip(at_s - arrival_s, 0, _LONGEST_AGE_S), nan=0.0)
    return (ages_s * 1000).astype(np.int64)
