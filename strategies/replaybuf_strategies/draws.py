"""Orders in which `replay` looks at groups: positions in pieces, each once, made as far as a batch asks for.

A piece is an int64 array of positions. `may` judges groups by their columns and is asked only about those that are
looked at, so that choosing 512 of a million does not touch the million.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from replaybuf.strategy import Groups

Positions = npt.NDArray[np.int64]
Pieces = Iterator[Positions]
May = Callable[[Groups], npt.NDArray[np.bool_]]

_PIECE = 8192
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
        return self._power(getattr(groups, self.column))

    def largest(self, groups: Groups) -> float:
        """Return the largest p among these groups."""
        column = getattr(groups, self.column)
        largest = np.max(column, initial=0.0)
        if np.isnan(largest):
            largest = np.fmax.reduce(column, initial=0.0)
        return float(self._power(np.atleast_1d(largest))[0])

    def _power(self, values: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
        known = np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=_LARGEST)
        powers: npt.NDArray[np.float64] = (np.clip(known, 0.0, _LARGEST) + FLOOR) ** self.exponent
        return powers


def in_order(groups: Groups, may: May, *, newest: bool) -> Pieces:
    """Go through the groups in the order they were stored, or from the newest back."""
    for start in range(0, len(groups), _PIECE):
        positions = np.arange(start, min(start + _PIECE, len(groups)))
        if newest:
            positions = len(groups) - 1 - positions
        yield positions[may(groups.take(positions))]


def drawn(groups: Groups, may: May, propensity: Propensity | None, rng: np.random.Generator, wanted: int) -> Pieces:
    """Draw without replacement: each next group with probability p_i / (sum of p over those not drawn yet).

    `propensity` None: p = 1. `wanted` is about how many will be asked for. Uniform positions are drawn and kept with
    probability p_i / max p, where `may` allows and they were not drawn before: what is kept next is distributed as
    above, whatever was drawn earlier. Where too few are kept, what is left is ordered by keys E_i / p_i with
    exponential E_i (Efraimidis & Spirakis 2006): the same distribution, at a cost that grows with all groups.
    """
    seen: dict[int, None] = {}
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
            new = [position for position in dict.fromkeys(positions[kept].tolist()) if position not in seen]
            seen.update(dict.fromkeys(new))
            yield np.array(new, np.int64)
            acceptance = (len(new) + 1) / size
            if acceptance < _LEAST_ACCEPTANCE:
                break
            size = int(wanted / acceptance) + 64
    yield from _keyed(groups, may, propensity, rng, wanted, np.array(list(seen), np.int64))


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
