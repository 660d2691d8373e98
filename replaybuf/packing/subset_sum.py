"""Which of a few sizes fill a room best: what a batch looks ahead for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

_BITS = 1 << 16
"""Sums that are told apart: in a larger room sizes are rounded up to a 65,536th of it."""


def closest(sizes: Sequence[int], room: int, enough: int, at_most: int | None = None) -> list[int]:
    """Choose positions whose sizes sum up to between `enough` and `room`, the earliest ones that do.

    `at_most` so many of them; None = no bound. Where no choice reaches `enough`: the earliest that come closest to it.
    Sizes > 0. The reachable sums of what follows each position are the bits of one integer, so 64 sizes cost about a
    tenth of a millisecond. Where a count binds there is one such integer for each count, each of as many bits fewer.
    """
    bound = at_most is not None and sum(itertools.islice(sorted(sizes), at_most + 1)) <= room and at_most < len(sizes)
    left = at_most if at_most is not None and bound else 0
    unit = max(1, -(-room // (_BITS // (left + 1))))
    scaled, most, least = [-(-size // unit) for size in sizes], room // unit, -(-enough // unit)
    within = (1 << most + 1) - 1
    sums = [1] * (left + 1)  # of at most 0, 1, 2, ... sizes; without a bound of any number
    reachable = [sums]  # of the sizes from a position on, last position first
    for size in reversed(scaled):
        if size <= most:
            fewer = [0, *sums[:-1]] if bound else sums
            sums = [known | (one_less << size) & within for known, one_less in zip(sums, fewer, strict=True)]
        reachable.append(sums)
    reachable.reverse()
    least = min(least, reachable[0][left].bit_length() - 1)
    chosen: list[int] = []
    for position, size in enumerate(scaled):
        if least <= 0:
            break
        after = left - 1 if bound else 0
        rest = reachable[position + 1][after]
        lowest = max(0, least - size)
        if size <= most and rest & (((1 << most - size + 1) - 1) >> lowest << lowest):
            chosen.append(position)
            most -= size
            least -= size
            left = after
    return chosen
