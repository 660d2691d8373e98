"""Orders in which `replay` looks at groups: positions in pieces, each once, made only as far as a batch needs them.

A piece is an int64 array of positions. `may` returns a mask of usable groups from their columns, and sees only the
groups that are looked at: choosing 512 of a million does not touch the million.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from replaybuf.strategy import Groups

Positions = npt.NDArray[np.int64]
Column = npt.NDArray[np.integer]
Pieces = Iterator[Positions]
May = Callable[[Groups], npt.NDArray[np.bool_]]

_PIECE = 8192
_LONG_PIECE = 65_536
_PASSES = 8
_FEW = 4096
"""Below this many groups, keys for all of them cost less than drawing with rejection."""
_LEAST_ACCEPTANCE = 1 / 64
_SPARSE = 64
"""Fewer than one in so many positions are sorted to find repetitions; more are marked in an array of all."""
_LARGEST = float(np.finfo(np.float32).max)
FLOOR = 1e-6
"""Added to every priority, so that a group of priority 0 is rare but not lost (Schaul et al. 2016, section 3.3)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Propensity:
    """Weight of a group in the draw: p_i = (x_i + 1e-6) ** exponent, x_i = its `column`.

    NaN and negative priorities count as 0, infinity as the largest float32.
    """

    column: str
    exponent: float

    def of(self, groups: Groups) -> npt.NDArray[np.float64]:
        """Return p, float64 [len(groups)], each > 0 and finite."""
        priorities = np.minimum(np.fmax(getattr(groups, self.column), 0.0), _LARGEST, dtype=np.float64)
        powers: npt.NDArray[np.float64] = (priorities + FLOOR) ** self.exponent
        return powers

    def largest(self, groups: Groups) -> float:
        """Return the largest p of these groups."""
        largest = np.max(getattr(groups, self.column), initial=0.0)
        if np.isnan(largest):
            largest = np.fmax.reduce(getattr(groups, self.column), initial=0.0)
        return float((min(float(largest), _LARGEST) + FLOOR) ** self.exponent)


def ascending(*columns: Column) -> Pieces:
    """Order positions by the columns, the first one first: a stable sort, in pieces.

    Each tuple of values takes one pass over the columns: a staleness window has few policy versions, and most batches
    are full within the oldest. After `_PASSES` tuples the rest is sorted at once.
    """
    tuples = _tuples(columns)
    for values in itertools.islice(tuples, _PASSES):
        for start in range(0, len(columns[0]), _LONG_PIECE):
            equal = (
                column[start : start + _LONG_PIECE] == value for column, value in zip(columns, values, strict=True)
            )
            yield np.flatnonzero(functools.reduce(np.logical_and, equal)) + start
    following = next(tuples, None)
    if following is None:
        return
    later = np.ones(len(columns[0]), bool)
    for column, value in zip(reversed(columns), reversed(following), strict=True):
        later = (column > value) | ((column == value) & later)
    rest = np.flatnonzero(later)
    yield rest[np.lexsort([column[rest] for column in reversed(columns)])]


def _tuples(columns: tuple[Column, ...]) -> Iterator[tuple[int, ...]]:
    """Yield all combinations of the columns' values, ascending, including those that no position has."""
    if not columns:
        yield ()
        return
    larger = columns[0]
    while len(larger):
        value = int(larger.min())
        for others in _tuples(columns[1:]):
            yield value, *others
        larger = larger[larger > value]


def first_in_first_out(groups: Groups, may: May) -> Pieces:
    """Order groups by last use (never used first), then by policy version, then by storing: a used group queues again.

    By storing alone the oldest groups would use up all their uses before any other, and a slow group would queue behind
    younger ones until it is too stale.
    """
    for piece in ascending(groups.last_step, groups.policy_version):
        yield piece[may(groups.take(piece))]


def least_slack_first(groups: Groups, may: May, slack: Column) -> Pieces:
    """Order groups by slack (`reuse.slack`), then by policy version, then by storing."""
    for piece in ascending(slack, groups.policy_version):
        yield piece[may(groups.take(piece))]


def in_blocks(groups: Groups, may: May) -> Pieces:
    """Order groups by storing, those that were used before first: a batch comes again until its uses are up, a a b b.

    A group that becomes usable late, because it waited for columns, so starts with the next block.
    """
    for piece in ascending((groups.times_sampled == 0).view(np.int8)):
        yield piece[may(groups.take(piece))]


def newest_first(groups: Groups, may: May) -> Pieces:
    """Order groups from the last stored one back. Each piece is twice as long as the one before."""
    end, length = len(groups), _PIECE
    while end > 0:
        positions = np.arange(end - 1, max(0, end - length) - 1, -1)
        yield positions[may(groups.take(positions))]
        end, length = end - length, 2 * length


def drawn(groups: Groups, may: May, propensity: Propensity | None, rng: np.random.Generator, wanted: int) -> Pieces:
    """Draw without replacement: each next group with probability p_i / (sum of p over those not drawn yet).

    `propensity` None: p = 1. `wanted`: expected number of groups to draw. Uniform positions are accepted with
    probability p_i / max p, if `may` allows and they were not drawn before, which gives the above distribution. If too
    few are accepted, the rest is ordered by keys E_i / p_i with exponential E_i (Efraimidis & Spirakis 2006): the same
    distribution, at a cost that grows with all groups.
    """
    seen = np.empty(0, np.int64)
    count = len(groups)
    if count > _FEW:
        largest = 1.0 if propensity is None else propensity.largest(groups)
        size = 2 * wanted + 64
        while size < count // 4 and len(seen) < count // 4:
            positions = rng.integers(0, count, size)
            accepted = may(groups.take(positions))
            positions = positions[accepted]
            if propensity is not None:
                lots = rng.random(size)[accepted] * largest
                positions = positions[lots < propensity.of(groups.take(positions))]
            new = _unseen(positions, seen, count)
            seen = np.concatenate([seen, new])
            yield new
            acceptance = (len(new) + 1) / size
            if acceptance < _LEAST_ACCEPTANCE:
                break
            size = int(wanted / acceptance) + 64
    yield from _by_keys(groups, may, propensity, rng, wanted, seen)


def _unseen(positions: Positions, seen: Positions, count: int) -> Positions:
    """Return the first occurrence of each position below `count`, in order, without those in `seen`."""
    if len(positions) * _SPARSE < count:
        ordered = np.sort(positions)
        if (ordered[1:] == ordered[:-1]).any():
            _, first = np.unique(positions, return_index=True)
            positions = positions[np.sort(first)]
        return positions[~np.isin(positions, seen)] if len(seen) else positions
    drawn_at = np.empty(count, np.int64)  # only written entries are read
    order = np.arange(len(positions))
    drawn_at[positions[::-1]] = order[::-1]  # the last value assigned stays: that of the first occurrence
    drawn_at[seen] = -1
    new: Positions = positions[drawn_at[positions] == order]
    return new


def _by_keys(
    groups: Groups, may: May, propensity: Propensity | None, rng: np.random.Generator, wanted: int, seen: Positions
) -> Pieces:
    """Order usable groups outside `seen` by exponential keys, and sort only as many of them as are needed."""
    allowed = may(groups).copy()
    allowed[seen] = False
    rest = np.flatnonzero(allowed)
    if not len(rest):
        return
    keys = rng.standard_exponential(len(rest))
    if propensity is not None:
        keys /= propensity.of(groups.take(rest))
    most = 2 * wanted + 64
    ends = [end for end in (most // 8, most // 4, most // 2, most) if end < len(rest)]
    parted = np.argpartition(keys, ends) if ends else np.arange(len(rest))
    for start, end in itertools.pairwise([0, *ends, len(rest)]):
        part = parted[start:end]
        yield rest[part[np.argsort(keys[part])]]
