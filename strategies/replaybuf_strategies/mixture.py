"""Shares of sources in a batch: whose group takes the next place."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from replaybuf_strategies.draws import Pieces, Positions

_ROUNDING = 1e-9
_FIRST_BLOCK = 2048
_NOBODY = -1


class Mix:
    """Order of the sources in which, after every place t, each source i has s_i * t places, within one.

    The rule of Tijdeman ("The chairman assignment problem", 1980): with n sources and d = 1 / (2n - 2), the next place
    goes to the source with the least (x_i + 1 - d) / s_i of those with s_i * t - x_i >= d. Then, for every t,
    |x_i - s_i * t| <= 1 - d. The places of a source without further groups go to the others, by their shares.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        self._shares = dict(enumerate(shares))
        self._restart()

    def _restart(self) -> None:
        total = sum(self._shares.values())
        self._parts = {source: share / total for source, share in self._shares.items()}
        self._places = dict.fromkeys(self._shares, 0)

    def order(self) -> list[int]:
        """Return the sources with further groups, the one that gets the next place first."""
        count = len(self._parts)
        if count < 2:
            return list(self._parts)
        slack = 1 / (2 * count - 2)
        place = 1 + sum(self._places.values())

        def urgency(source: int) -> tuple[bool, float]:
            part, places = self._parts[source], self._places[source]
            return part * place - places < slack - _ROUNDING, (places + 1 - slack) / part

        return sorted(self._parts, key=urgency)

    def count(self, source: int, places: int = 1) -> None:
        """Count places of a source."""
        self._places[source] += places

    def remove(self, source: int) -> None:
        """Remove a source without further groups."""
        del self._shares[source]
        self._restart()


def interleave(open_pieces: Callable[[int], Pieces], shares: Sequence[float], *, strict: bool = False) -> Pieces:
    """Merge one order per source into one, by the rule of `Mix`; a source without further groups is left out.

    `strict`: the order ends there, because no other source may take its place.

    Pieces are read in the order of the places that need them, so that random orders draw the same groups as place
    after place.
    """
    sources = _Sources(open_pieces, len(shares))
    left, following, place, length = list(range(len(shares))), [_NOBODY], 0, _FIRST_BLOCK
    while left:
        rest = tuple(shares[source] for source in left)
        first = left.index(following[0]) if following[0] in left else _NOBODY
        order = np.array(left)[turns(rest, place + length, first)]
        end, short = sources.read(order[place : place + length])
        if end:
            yield sources.take(order[place : place + end])
        place, length = place + end, 2 * length
        if strict and short != _NOBODY:
            return
        if short != _NOBODY:  # its place goes to the source that follows in the order of the mix
            if place or short not in following:
                following = _rank(rest, left, order[:place])
            following = [source for source in following if source != short] or [_NOBODY]
            left.remove(short)
            place = 0


def _rank(shares: Sequence[float], left: Sequence[int], places: npt.NDArray[np.int64]) -> list[int]:
    """Return the sources in the order of the mix after these places."""
    mix = Mix(shares)
    for at, source in enumerate(left):
        mix.count(at, int(np.count_nonzero(places == source)))
    return [left[at] for at in mix.order()]


class _Sources:
    """Groups of each source that were read and have no place yet."""

    def __init__(self, open_pieces: Callable[[int], Pieces], count: int) -> None:
        self._open_pieces = open_pieces
        self._pieces: dict[int, Pieces] = {}
        self._read: list[Positions] = [np.empty(0, np.int64)] * count
        self._ended: set[int] = set()

    def read(self, block: npt.NDArray[np.int64]) -> tuple[int, int]:
        """Read pieces until each turn of the block has a group; return its length, and the source that ended it."""
        turns_of = [np.flatnonzero(block == source) for source in range(len(self._read))]
        while True:
            lacking = [
                (int(turns[len(read)]), source)
                for source, (turns, read) in enumerate(zip(turns_of, self._read, strict=True))
                if len(turns) > len(read)
            ]
            end, source = min(lacking, default=(len(block), _NOBODY))
            if source == _NOBODY or source in self._ended:
                return end, source
            if source not in self._pieces:
                self._pieces[source] = self._open_pieces(source)
            piece = next(self._pieces[source], None)
            if piece is None:
                self._ended.add(source)
            else:
                self._read[source] = np.concatenate([self._read[source], piece])

    def take(self, block: npt.NDArray[np.int64]) -> Positions:
        """Return a group for each turn of the block."""
        merged = np.empty(len(block), np.int64)
        for source, read in enumerate(self._read):
            own = block == source
            count = int(np.count_nonzero(own))
            merged[own], self._read[source] = read[:count], read[count:]
        return merged


def turns(shares: tuple[float, ...], count: int, first: int = _NOBODY) -> npt.NDArray[np.int64]:
    """Return the sources of the first `count` places by the rule of `Mix`; place 1 goes to `first`, if given."""
    if len(shares) < 2:
        return np.zeros(count, np.int64)
    rounded = _FIRST_BLOCK << max(0, (count - 1) // _FIRST_BLOCK).bit_length()
    return _turns(shares, rounded, first)[:count]


@functools.lru_cache(maxsize=16)
def _turns(shares: tuple[float, ...], count: int, first: int) -> npt.NDArray[np.int64]:
    """Schedule places as jobs with a release and a deadline, the earliest deadline first; kept, as runs repeat them.

    The j-th place of source i (from 0) is released at the first place t with s_i * t - j >= d, and is due at
    (j + 1 - d) / s_i.
    """
    parts = np.array(shares) / sum(shares)
    slack = 1 / (2 * len(parts) - 2)
    number = np.concatenate([np.arange(int(part * count) + 2) for part in parts])
    source = np.repeat(np.arange(len(parts)), (parts * count).astype(np.int64) + 2)
    release = np.ceil((number + slack - _ROUNDING) / parts[source])
    due = (number + 1 - slack) / parts[source]
    if first != _NOBODY:
        at = np.flatnonzero(source == first)[0]
        release[at], due[at] = 1, -1.0
    by_due = np.lexsort((source, due))
    rank = np.empty(len(by_due), np.int64)
    rank[by_due] = np.arange(len(by_due))
    by_release = np.argsort(release, kind="stable")
    released = np.searchsorted(release[by_release], np.arange(1, count + 1), side="right").tolist()
    return source[by_due[_earliest(rank[by_release].tolist(), released)]]


def _earliest(ranks: list[int], released: list[int]) -> list[int]:
    """Return the rank that each place takes: the lowest of those released and not taken."""
    waiting: list[int] = []
    taken: list[int] = []
    done = 0
    for end in released:
        while done < end:
            heapq.heappush(waiting, ranks[done])
            done += 1
        taken.append(heapq.heappop(waiting))
    return taken
