"""Windows: stages get whole micro-batches, and results return to their batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.errors import Invalid
from replaybuf.generator.stage.aggregation import MAX_WINDOWS, Aggregator, Window

SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=4)
BATCHES = st.lists(st.lists(st.integers(), max_size=9), max_size=20)


Windows = list[Window[int, int]]


def compute(
    window: Window[int, int], micro_batch: int, stage: Callable[[Sequence[int]], Sequence[int]]
) -> list[list[int]]:
    """Run one stage over a window in micro-batches; return its results by batch."""
    return window.split([result for batch in window.micro_batches(micro_batch) for result in stage(batch)])


def windows_of(sizes: Sequence[int], batches: Sequence[Sequence[int]]) -> Windows:
    aggregator: Aggregator[int, int] = Aggregator(sizes)
    windows = [aggregator.add(number, batch) for number, batch in enumerate(batches)] + [aggregator.flush()]
    return [window for window in windows if window is not None]


def test_groups_leave_together_when_they_fill_the_least_common_multiple() -> None:
    aggregator: Aggregator[str, int] = Aggregator([2, 3])
    assert aggregator.window == 6
    assert aggregator.add("a", [1, 2]) is None
    assert aggregator.add("b", [3, 4]) is None
    window = aggregator.add("c", [5, 6])
    assert window is not None and window.groups == ["a", "b", "c"]
    assert window.micro_batches(6) == [[1, 2, 3, 4, 5, 6]]
    assert aggregator.held == 0


def test_a_stage_sees_its_own_micro_batches_and_results_return_by_group() -> None:
    seen: list[list[int]] = []

    def stage(samples: Sequence[int]) -> list[int]:
        seen.append(list(samples))
        return [10 * sample for sample in samples]

    assert compute(Window(range(3), ((1, 2), (3, 4), (5, 6))), 3, stage) == [[10, 20], [30, 40], [50, 60]]
    assert seen == [[1, 2, 3], [4, 5, 6]]


def test_a_stage_without_a_size_gets_the_samples_of_one_group_per_call() -> None:
    assert Window("ab", ((1, 2, 3), (4,))).micro_batches(None) == [(1, 2, 3), (4,)]


def test_the_tail_is_flushed_with_a_shorter_last_micro_batch() -> None:
    aggregator: Aggregator[str, int] = Aggregator([4])
    aggregator.add("a", [1, 2])
    aggregator.add("b", [3])
    tail = aggregator.flush()
    assert tail is not None and tail.samples == [[1, 2], [3]]
    assert aggregator.flush() is None
    assert tail.micro_batches(2) == [[1, 2], [3]]


@pytest.mark.parametrize("sizes", [[], [0], [4, -1]])
def test_a_size_below_one_is_rejected(sizes: list[int]) -> None:
    with pytest.raises(Invalid, match="micro-batch sizes are"):
        Aggregator(sizes)


@given(SIZES, BATCHES)
def test_every_batch_leaves_once_whole_and_in_order(sizes: list[int], batches: list[list[int]]) -> None:
    left = [list(batch) for window in windows_of(sizes, batches) for batch in window.samples]
    assert left == batches


@given(SIZES, BATCHES, st.integers(1, 12))
def test_windows_give_the_results_of_single_samples(
    sizes: list[int], batches: list[list[int]], micro_batch: int
) -> None:
    def stage(samples: Sequence[int]) -> list[int]:
        assert 1 <= len(samples) <= micro_batch
        return [sample * 2 + 1 for sample in samples]

    windows = windows_of(sizes, batches)
    results = [result for window in windows for result in compute(window, micro_batch, stage)]
    assert results == [[sample * 2 + 1 for sample in batch] for batch in batches]


@given(SIZES, st.integers(1, 8), st.integers(1, 40))
def test_all_micro_batches_are_whole_if_batch_sizes_divide_the_window(sizes: list[int], batch: int, count: int) -> None:
    whole = windows_of([*sizes, batch], [[0] * batch] * count)[: count * batch // math.lcm(*sizes, batch)]
    for window in whole:
        for size in sizes:
            assert {len(batch) for batch in window.micro_batches(size)} == {size}


@given(SIZES, BATCHES)
def test_held_samples_stay_below_the_bound(sizes: list[int], batches: list[list[int]]) -> None:
    aggregator: Aggregator[int, int] = Aggregator(sizes)
    for batch in batches:
        aggregator.add(0, batch)
        divide = all(math.lcm(*sizes) % max(1, len(batch)) == 0 for batch in batches)
        assert aggregator.window == math.lcm(*sizes)
        assert (
            0
            <= aggregator.held
            < (1 if divide and len(set(map(len, batches))) == 1 else MAX_WINDOWS) * aggregator.window
        )


@given(SIZES, st.integers(1, 30), st.integers(1, 60))
def test_stages_get_the_fewest_calls_if_batches_do_not_divide_a_window(
    sizes: list[int], samples: int, count: int
) -> None:
    """Within the bound only the tail has a shorter last micro-batch."""
    windows = windows_of(sizes, [[0] * samples] * count)
    whole = math.lcm(samples, *sizes)
    if whole > MAX_WINDOWS * math.lcm(*sizes):
        return
    assert all(sum(map(len, window.samples)) == whole for window in windows[: samples * count // whole])
    for size in sizes:
        calls = sum(len(window.micro_batches(size)) for window in windows)
        assert calls == math.ceil(samples * count / size)


def test_batches_of_seven_are_computed_by_six_and_four_in_whole_micro_batches() -> None:
    """Twelve of them are 84 samples: 14 calls by 6 and 21 by 4."""
    (window,) = windows_of([6, 4], [list(range(7))] * 12)
    for size in (6, 4):
        assert {len(batch) for batch in window.micro_batches(size)} == {size}


def test_batches_that_never_add_up_leave_at_the_bound() -> None:
    """One above a multiple of 6, however many come."""
    aggregator: Aggregator[int, int] = Aggregator([6])
    windows = [aggregator.add(0, [0] * size) for size in (1, *[6] * MAX_WINDOWS)]
    assert windows[-1] is not None and not any(windows[:-1])
    assert sum(map(len, windows[-1].samples)) == 6 * MAX_WINDOWS + 1
