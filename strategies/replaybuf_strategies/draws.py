"""Orders in which `replay` looks at groups: positions in pieces, each once, made as far as a batch asks for.

A piece is an int64 array of positions. `may` judges groups by their columns and is asked only about those that are
looked at, so that choosing 512 of a million does not touch the million.
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
"""Below this many groups keys for all cost less than drawing with rejection."""
_LEAST_ACCEPTANCE = 1 / 64
_LARGEST = float(np.finfo(np.float32).max)
FLOOR = 1e-6
"""Added to every priority, so that a group of priority 0 is rare but not lost (Schaul et al. 2016, section 3.3)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Propensity:
    """How likely a group is drawn: p_i = (x_i + 1e-6) ** exponent, x_i = its `column`.

    What is not a priority counts as one that is: NaN and negative numbers as 0, infinity as the largest float32.
    """

    column: str
    exponent: float

    def of(self, groups: Groups) -> npt.NDArray[np.float64]:
        """Return p, float64 [len(groups)], each > 0 and finite."""
        known = np.minimum(np.fmax(getattr(groups, self.column), 0.0), _LARGEST, dtype=np.float64)
        powers: npt.NDArray[np.float64] = (known + FLOOR) ** self.exponent
        return powers

    def largest(self, groups: Groups) -> float:
        """Return the largest p among these groups."""
        largest = np.max(getattr(groups, self.column), initial=0.0)
        if np.isnan(largest):
            largest = np.fmax.reduce(getattr(groups, self.column), initial=0.0)
        return float((min(float(largest), _LARGEST) + FLOOR) ** self.exponent)


def ascending(*columns: Column) -> Pieces:
    """Order positions by the first column, equal ones by the next, at last as they stand: a stable sort, in pieces.

    One pass over the columns for each tuple of values, for as long as a batch asks: there are few policy versions
    within a staleness window, and most batches are full within the oldest. What `_PASSES` leave is sorted at once.
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
    """Go through what the columns' values could make, ascending, also what no position has."""
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
    """Go through the groups as through a queue that a used group joins anew: by last use (never first), then by the
    version that began them, then by storing.

    By storing alone the oldest would use up all their uses before anybody else's turn came, and a group that took long
    to generate would stand behind younger ones until it is too stale.
    """
    for piece in ascending(groups.last_step, groups.policy_version):
        yield piece[may(groups.take(piece))]


def newest_first(groups: Groups, may: May) -> Pieces:
    """Go through the groups from the last stored one back."""
    for end in range(len(groups), 0, -_PIECE):
        positions = np.arange(end - 1, max(0, end - _PIECE) - 1, -1)
        yield positions[may(groups.take(positions))]


def drawn(groups: Groups, may: May, propensity: Propensity | None, rng: np.random.Generator, wanted: int) -> Pieces:
    """Draw without replacement: each next group with probability p_i / (sum of p over those not drawn yet).

    `propensity` None: p = 1. `wanted` is about how many will be asked for. Uniform positions are drawn and kept with
    probability p_i / max p, where `may` allows and they were not drawn before: what is kept next is distributed as
    above, whatever was drawn earlier. Where too few are kept, what is left is ordered by keys E_i / p_i with
    exponential E_i (Efraimidis & Spirakis 2006): the same distribution, at a cost that grows with all groups.
    """
    seen = np.empty(0, np.int64)
    count = len(groups)
    if count > _FEW:
        largest = 1.0 if propensity is None else propensity.largest(groups)
        size = 2 * wanted + 64
        while size < count // 4 and len(seen) < count // 4:
            positions = rng.integers(0, count, size)
            there = groups.take(positions)
            kept = may(there)
            if propensity is not None:
                kept = kept & (rng.random(size) * largest < propensity.of(there))
            new = _not_yet(positions[kept], seen)
            seen = np.concatenate([seen, new])
            yield new
            acceptance = (len(new) + 1) / size
            if acceptance < _LEAST_ACCEPTANCE:
                break
            size = int(wanted / acceptance) + 64
    yield from _keyed(groups, may, propensity, rng, wanted, seen)


def _not_yet(positions: Positions, seen: Positions) -> Positions:
    """Keep each position the first time it comes, in order, unless it was seen before."""
    ordered = np.sort(positions)
    if (ordered[1:] == ordered[:-1]).any():
        _, first = np.unique(positions, return_index=True)
        positions = positions[np.sort(first)]
    return positions[~np.isin(positions, seen)] if len(seen) else positions


def _keyed(
    groups: Groups, may: May, propensity: Propensity | None, rng: np.random.Generator, wanted: int, seen: Positions
) -> Pieces:
    """Order what is allowed and not seen by exponential keys: the first ones first, the others only when asked for."""
    allowed = may(groups).copy()
    allowed[seen] = False
    rest = np.flatnonzero(allowed)
    if not len(rest):
        return
    keys = rng.standard_exponential(len(rest))
    if propensity is not None:
        keys /= propensity.of(groups.take(rest))
    first = min(2 * wanted + 64, len(rest))
    if first < len(rest):
        parted = np.argpartition(keys, first)
        nearest, others = parted[:first], parted[first:]
        yield rest[nearest[np.argsort(keys[nearest])]]
        yield rest[others[np.argsort(keys[others])]]
    else:
        yield rest[np.argsort(keys)]
