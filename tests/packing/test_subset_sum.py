"""Sizes that fill a room: the earliest choice that is good enough, else the closest one."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from replaybuf.packing.subset_sum import closest


@given(
    st.lists(st.integers(1, 40), max_size=9), st.integers(0, 120), st.integers(-5, 130), st.none() | st.integers(0, 9)
)
def test_the_earliest_sufficient_choice_wins_else_the_closest(
    sizes: list[int], room: int, enough: int, max_count: int | None
) -> None:
    """Against all subsets within the count."""
    chosen = closest(sizes, room, min(enough, room), max_count)
    total = sum(sizes[at] for at in chosen)
    most = len(sizes) if max_count is None else min(max_count, len(sizes))
    subsets = [s for n in range(most + 1) for s in itertools.combinations(range(len(sizes)), n)]
    sums = {s: sum(sizes[at] for at in s) for s in subsets}
    least = min(min(enough, room), max(t for t in sums.values() if t <= room))
    good = [s for s, t in sums.items() if least <= t <= room]
    assert least <= total <= room

    def takes_early(subset: tuple[int, ...]) -> list[int]:
        return [0 if at in subset else 1 for at in range(len(sizes))]

    # Of those that are good, none takes an earlier one, but by adding what is not needed.
    assert tuple(chosen) in good
    first = min(good, key=takes_early)
    assert chosen == list(first[: len(chosen)])


@given(st.lists(st.integers(1, 10**6), max_size=64), st.integers(0, 10**7))
def test_a_capacity_of_millions_is_filled_to_a_thousandth_and_never_exceeded(sizes: list[int], room: int) -> None:
    """Sizes are rounded up there: 64 of them by less than a thousandth of the room."""
    total = sum(sizes[at] for at in closest(sizes, room, room))
    plainly = 0
    for size in sizes:
        plainly += size if plainly + size <= room else 0
    assert total <= room and total >= plainly - room / 1000


@given(st.lists(st.integers(1, 10**6), max_size=64), st.integers(0, 10**7), st.integers(0, 64))
def test_a_count_is_never_exceeded_and_costs_little_exactness(sizes: list[int], room: int, max_count: int) -> None:
    """Against the first that fit: with n sizes each is rounded up by less than (n + 1) 65,536ths of the room."""
    chosen = closest(sizes, room, room, max_count)
    total, plainly, taken = sum(sizes[at] for at in chosen), 0, 0
    for size in sizes:
        if taken < max_count and plainly + size <= room:
            plainly, taken = plainly + size, taken + 1
    assert len(chosen) <= max_count and total <= room
    assert total >= plainly - (taken + 1) * (max_count + 1) * (room / 65536 + 1)


def test_sizes_that_cannot_fit_cost_nothing() -> None:
    assert closest([2**31, 5, 2**31], 10, 10) == [1]


def test_a_size_that_fills_a_large_capacity_exactly_is_chosen() -> None:
    """65,537 is rounded up above the scaled capacity."""
    assert closest([65537], 65537, 65537) == [0]
