"""Histograms of groups: lengths, uses, ages, and how many prompts were trained or lost.

All counts are whole numbers, so the order of adding changes no sum: every machine and every restart agree::

    never taken back:                     a group was stored; a batch used a group, once per use
    taken back by a rewind (`resample`):  a group is dropped (evicted unused, or a dead letter); a prompt is trained

    stored  = lengths["stored"]             groups_used = lengths["used"] = sum(reuse)
    dropped = lengths["dropped"] = sum(drop_ages[...].versions) = sum(evicted) + sum(dead_lettered)

Each group with a prompt index counts as one prompt: a ticket is issued for one group only, and groups without a ticket
count as one prompt each. So the counts need no set of prompts. Prompts are counted by source: the first `MOST_SOURCES`
in the order of arrival, and all others together with those of no source.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from replaybuf.kernel.rows.index import DEAD, Index, Positions
from replaybuf.wire.answer.run_status import Coverage, LengthBias, PromptCounts, Reuse

STORED, USED, DROPPED = KINDS = ("stored", "used", "dropped")
"""Three length histograms side by side show whether the buffer favours short groups (length bias)."""

_LOWEST_POWER = 4
TOKENS = tuple(2**power for power in range(_LOWEST_POWER, 21))
"""Upper edges of the buckets of lengths, in tokens."""
VERSIONS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
"""Upper edges of the buckets of ages in policy versions."""
AGE_MS = tuple(round(1000 * s) for s in (0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600, 1800, 3600, 4 * 3600, 24 * 3600))
"""Upper edges of the buckets of ages in milliseconds."""
UNKNOWN_AGE = -1
"""Age where the record has no time."""
MOST_SOURCES = 64
"""Sources whose prompts are counted apart."""
_NO_SOURCE = 0
LEAST_STORED = 100
"""Stored groups before a difference of lengths is called a bias."""
LEAST_DROPPED = 0.05
"""Share of the stored groups that must be dropped before a difference of lengths is called a bias."""
LEAST_BIAS = 0.1
"""Relative difference of mean lengths that is called a bias."""
_MAX_AGE_S = 2_000_000
"""23 days: milliseconds must fit a column of 32 bits."""

Rows = Positions | slice


@functools.cache
def _edges(edges: tuple[int, ...]) -> npt.NDArray[np.int64]:
    return np.array(edges)


@dataclasses.dataclass(slots=True)
class Histogram:
    """Whole numbers >= 0 in buckets: `edges[i - 1] < value <= edges[i]` is counted in `counts[i]`.

    The last count holds the values above all edges; `sum` adds up the values.
    """

    edges: tuple[int, ...]
    counts: list[int] = dataclasses.field(default_factory=list)
    sum: int = 0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.edges) + 1)

    def __add__(self, other: Histogram) -> Histogram:
        counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        return Histogram(self.edges, counts, self.sum + other.sum)

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)

    def add(self, values: npt.NDArray[np.integer], times: int = 1) -> None:
        """Count `values` [n], each `times` times; -1 takes them back. Values below 0 are unknown and ignored."""
        known = values if values.min(initial=0) >= 0 else values[values >= 0]
        found_counts = np.bincount(_buckets(self.edges, known), minlength=len(self.counts)).tolist()
        self.counts = [count + times * more for count, more in zip(self.counts, found_counts, strict=True)]
        self.sum += times * int(known.sum(dtype=np.int64))

    def add_one(self, value: int) -> None:
        """Count one value."""
        self.counts[bisect.bisect_left(self.edges, value)] += 1
        self.sum += value


class Counts:
    """Base of dataclasses of counts, which add up field by field; tables of counts add up name by name."""

    __slots__ = ()

    def __add__(self, other: Self) -> Self:
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        return type(self)(*(add_up(getattr(self, name), getattr(other, name)) for name in names))


def add_up(first: Any, second: Any) -> Any:
    """Add two numbers, or two tables of them name by name."""
    if type(first) is not dict:
        return first + second
    both = {name: add_up(first[name], second[name]) for name in first.keys() & second.keys()}
    return {**first, **second, **both}


def _lengths() -> Histogram:
    return Histogram(TOKENS)


@dataclasses.dataclass(slots=True)
class Lengths(Counts):
    """Groups by the mean tokens of their rollouts, rounded down, and by the tokens of their longest rollout."""

    mean: Histogram = dataclasses.field(default_factory=_lengths)
    longest: Histogram = dataclasses.field(default_factory=_lengths)

    def add(self, index: Index, rows: Rows, sign: int = 1) -> None:
        """Count groups, or take them back with `sign` -1."""
        mean = index["tokens"][rows] / np.maximum(index["rollouts"][rows], 1)  # exact, and faster than whole numbers
        self.mean.add(mean.astype(np.int64), sign)
        self.longest.add(index["longest_tokens"][rows], sign)


def _ages() -> Histogram:
    return Histogram(AGE_MS)


@dataclasses.dataclass(slots=True)
class Ages(Counts):
    """Dropped groups by age: policy versions at the step of the drop, milliseconds since they arrived."""

    versions: Histogram = dataclasses.field(default_factory=lambda: Histogram(VERSIONS))
    ms: Histogram = dataclasses.field(default_factory=_ages)


@dataclasses.dataclass(slots=True)
class Prompts(Counts):
    """Prompts of a source by what became of their groups."""

    stored: int = 0
    trained: int = 0
    dropped: int = 0

    def counts(self) -> PromptCounts:
        """Return them as the state of a run has them."""
        ended = self.trained + self.dropped
        share = self.trained / ended if ended else 0.0
        return PromptCounts(stored=self.stored, trained=self.trained, dropped=self.dropped, share=share)


@dataclasses.dataclass(slots=True)
class GroupHistograms(Counts):
    """All histograms of one adapter; see the module docstring.

    `reuse`: uses by `times_sampled`, which includes the use itself; `age_at_use`: milliseconds from arrival to batch;
    `drop_ages`: by reason; `prompts`: groups with a prompt index by source, see `Coverage`.
    """

    lengths: dict[str, Lengths] = dataclasses.field(default_factory=lambda: {kind: Lengths() for kind in KINDS})
    reuse: Counter[int] = dataclasses.field(default_factory=Counter)
    age_at_use: Histogram = dataclasses.field(default_factory=_ages)
    drop_ages: dict[str, Ages] = dataclasses.field(default_factory=dict)
    prompts: dict[int, Prompts] = dataclasses.field(default_factory=dict)

    def store(self, index: Index, rows: Rows) -> None:
        """Count groups as stored."""
        self.lengths[STORED].add(index, rows)
        for prompts, count in self._by_source(index["source"][rows], index["prompt_index"][rows] >= 0):
            prompts.stored += count

    def use(self, index: Index, rows: Rows, at_s: float) -> None:
        """Count one use of each of these groups, which `times_sampled` includes already."""
        times = index["times_sampled"][rows]
        self.lengths[USED].add(index, rows)
        self.age_at_use.add(ages_ms(index["arrival_s"][rows], at_s))
        self.reuse.update(times.tolist())
        first = (times == 1) & (index["prompt_index"][rows] >= 0)
        for prompts, count in self._by_source(index["source"][rows], first):
            prompts.trained += count

    def void_use(self, index: Index, rows: npt.NDArray[np.int64]) -> None:
        """Count prompts as untrained whose groups have no use left, after `times_sampled` was lowered."""
        sources = index["source"][rows]
        unused = (index["times_sampled"][rows] == 0) & (index["prompt_index"][rows] >= 0)
        for prompts, count in self._by_source(sources, unused):
            prompts.trained -= count
        for prompts, count in self._by_source(sources, unused & (index["state"][rows] == DEAD)):
            prompts.dropped += count

    def drop(
        self,
        index: Index,
        rows: npt.NDArray[np.int64],
        reason: str,
        versions: npt.NDArray[np.integer],
        age_ms: npt.NDArray[np.integer],
        sign: int = 1,
    ) -> None:
        """Count groups as dropped at these `versions` of the policy [n], or take that back with `sign` -1."""
        self.lengths[DROPPED].add(index, rows, sign)
        ages = self.drop_ages.setdefault(reason, Ages())
        ages.versions.add(np.maximum(versions - index["policy_version"][rows], 0), sign)
        ages.ms.add(age_ms, sign)
        untrained = (index["times_sampled"][rows] == 0) & (index["prompt_index"][rows] >= 0)
        for prompts, count in self._by_source(index["source"][rows], untrained):
            prompts.dropped += sign * count

    def _by_source(
        self, sources: npt.NDArray[np.int32], counted: npt.NDArray[np.bool_]
    ) -> Iterator[tuple[Prompts, int]]:
        """Yield the prompts of each source, with how many rows of it are `counted` [rows]."""
        # In the order of the rows, as every server has it, because the first sources are counted apart.
        for source, count in Counter(sources[counted].tolist()).items():
            own = source if source in self.prompts or len(self.prompts) < MOST_SOURCES else _NO_SOURCE
            yield self.prompts.setdefault(own, Prompts()), count

    def coverage(self, issued: int, failed: int, names: Mapping[int, str] | None = None) -> Coverage:
        """Count prompts by their fate: `issued` of them had a ticket and `failed` are recorded as failed.

        `names`: of sources, by their hashes; a source without a name here is shown by its hash.
        """
        total = sum(self.prompts.values(), Prompts())
        issued = max(issued, total.stored + failed)
        ended = total.trained + total.dropped + failed
        named = {code: (names or {}).get(code, f"#{code:08x}") for code in self.prompts if code}
        rest = {_NO_SOURCE: "*"} if named and _NO_SOURCE in self.prompts else {}
        return Coverage(
            issued=issued,
            stored=total.stored,
            trained=total.trained,
            dropped=total.dropped,
            failed=failed,
            pending=issued - ended,
            share=total.trained / ended if ended else 0.0,
            sources={name: self.prompts[code].counts() for code, name in (named | rest).items()},
            lengths=self._length_bias(),
        )

    def _length_bias(self) -> LengthBias | None:
        """Compare the lengths of used groups with those of stored ones; None while nothing was used."""
        stored, used, dropped = (self.lengths[kind].mean for kind in KINDS)
        if not used.count or not stored.sum:
            return None
        ratio = (used.sum / used.count) / (stored.sum / stored.count)
        many = stored.count >= LEAST_STORED and dropped.count > LEAST_DROPPED * stored.count
        biased = many and abs(ratio - 1) > LEAST_BIAS
        return LengthBias(used.sum / used.count, stored.sum / stored.count, biased)

    def reuse_figures(self) -> Reuse:
        """Count groups by their uses, and what was generated for them."""
        groups = self.groups_by_uses()
        uses, used = self.reuse.total(), sum(groups.values())
        return Reuse(
            groups_by_uses={str(times): count for times, count in groups.items()},
            uses_per_group=uses / used if used else None,
            generated_share=self.lengths[STORED].mean.count / uses if uses else None,
        )

    def groups_by_uses(self) -> dict[int, int]:
        """Count groups by their uses: n times, but not n + 1 times. Exact if no use was voided."""
        exact = {times: uses - self.reuse[times + 1] for times, uses in sorted(self.reuse.items())}
        return {times: groups for times, groups in exact.items() if groups > 0}


def _buckets(edges: tuple[int, ...], values: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
    """Find the bucket of each value: the position of the lowest edge >= value."""
    if edges != TOKENS:
        return np.searchsorted(_edges(edges), values)
    # Done for every stored group: the binary exponent of value - 1 is ten times as fast as a bisection.
    exponents: npt.NDArray[np.int32] = np.frexp(values - 1.0)[1]
    return np.minimum(np.maximum(exponents - _LOWEST_POWER, 0), len(edges))


def ages_ms(arrival_s: npt.NDArray[np.float64], at_s: float) -> npt.NDArray[np.int64]:
    """Return milliseconds from arrival to `at_s`, 0 where clocks disagree; all `UNKNOWN_AGE` where `at_s` is 0."""
    if not at_s:
        return np.full(len(arrival_s), UNKNOWN_AGE, np.int64)
    # A writer that bypasses the service may store a NaN, and machines cast NaN to different integers.
    ages_s = np.nan_to_num(np.clip(at_s - arrival_s, 0, _MAX_AGE_S), nan=0.0)
    return (ages_s * 1000).astype(np.int64)
