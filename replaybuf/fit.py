"""Which of a few sizes fill a room best: what a batch looks ahead for."""

from __future__ import annotations

from collections.abc import Sequence

_BITS = 1 << 16
"""Sums that are told apart: in a larger room sizes are rounded up to a 65,536th of it."""


def closest(sizes: Sequence[int], room: int, enough: int) -> list[int]:
    """Choose positions whose sizes sum up to between `enough` and `room`, the earliest ones that do.

    Where no choice reaches `enough`: the earliest that come closest to it. Sizes > 0. The reachable sums of what
    follows each position are the bits of one integer, so 64 sizes cost about a tenth of a millisecond.
    """
    unit = max(1, -(-room // _BITS))
    scaled, most, least = [-(-size // unit) for size in sizes], room // unit, -(-enough // unit)
    within = (1 << most + 1) - 1
    reachable = [1]  # of the sizes from a position on, last position first
    for size in reversed(scaled):
        reachable.append((reachable[-1] | reachable[-1] << size) & within if size <= most else reachable[-1])
    reachable.reverse()
    least = min(least, reachable[0].bit_length() - 1)
    chosen: list[int] = []
    for position, size in enumerate(scaled):
        if least <= 0:
            break
        rest = reachable[position + 1]
        lowest = max(0, least - size)
        if size <= most and rest & (((1 << most - size + 1) - 1) >> lowest << lowest):
            chosen.append(position)
            most -= size
            least -= size
    return chosen
