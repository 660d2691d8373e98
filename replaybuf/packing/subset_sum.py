"""Choose the sizes that fill a capacity best (subset sum); selection uses it at the end of a batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

_BITS = 1 << 16
"""Distinct sums: for a larger capacity, sizes are rounded up to a 65,536th of it."""


def closest(sizes: Sequence[int], capacity: int, enough: int, max_count: int | None = None) -> list[int]:
    """Choose the earliest positions whose sizes add up to between `enough` and `capacity`.

    At most `max_count` positions; None = no bound. If no choice reaches `enough`, choose the earliest that come
    closest. Sizes > 0. Dynamic programming: the sums that sizes after a position can reach are the bits of one
    integer, so 64 sizes take about 0.1 ms. If `max_count` binds, there is one integer per count, with fewer bits each.
    """
    bound = (
        max_count is not None
        and sum(itertools.islice(sorted(sizes), max_count + 1)) <= capacity
        and max_count < len(sizes)
    )
    left = max_count if max_count is not None and bound else 0
    unit = max(1, -(-capacity // (_BITS // (left + 1))))
    most, least = capacity // unit, -(-enough // unit)
    # A size that fits alone must still fit after rounding: it then fills the whole scaled capacity.
    scaled = [min(-(-size // unit), most) if size <= capacity else most + 1 for size in sizes]
    within = (1 << most + 1) - 1
    sums = [1] * (left + 1)  # of at most 0, 1, 2, ... sizes; without a bound of any number
    reachable = [sums]  # of the sizes from a position on, last position first
    for size in reversed(scaled):
        if size <= most:
            fewer = [0, *sums[:-1]] if bound else sums
            sums = [reached | (one_less << size) & within for reached, one_less in zip(sums, fewer, strict=True)]
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
