"""Packing: every rollout once, rows within seq_len, ranks with equal counts and even costs, few rows."""

from __future__ import annotations

import hashlib
import math
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replaybuf.errors import Invalid
from replaybuf.packing import exchange
from replaybuf.packing.cost import rollout_costs
from replaybuf.packing.pack import best_fit_decreasing, fillers, pack, padding_fraction
from replaybuf.wire.config import MAX_RANKS, Cost

SEQ_LEN = 8192
Lengths = npt.NDArray[np.int32]


def lognormal_lengths(count: int, seed: int) -> Lengths:
    """Draw lengths like a reasoning run: median 665 tokens, a long tail cut at seq_len."""
    drawn = np.random.default_rng(seed).lognormal(6.5, 0.9, count)
    return np.clip(drawn, 16, SEQ_LEN).astype(np.int32)


def first_fit_decreasing(lengths: Lengths, seq_len: int) -> int:
    """Count the bins of the textbook method, which looks through all bins for each item."""
    rooms: list[int] = []
    for size in sorted(lengths.tolist(), reverse=True):
        at = next((n for n, room in enumerate(rooms) if room >= size), None)
        if at is None:
            rooms.append(seq_len - size)
        else:
            rooms[at] -= size
    return len(rooms)


def rank_costs(lengths: Lengths, grid: list[list[list[int]]]) -> npt.NDArray[np.float64]:
    """Cost of each rank, [ranks]."""
    costs = rollout_costs(lengths)
    return np.array([sum(float(costs[row].sum()) for row in rank if row) for rank in grid])


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Lengths, int, int]:
    """Draw lengths, seq_len and ranks: also all of one length, all full, none at all."""
    seq_len = draw(st.integers(2, 200))
    size = st.integers(1, seq_len) | st.integers(max(1, seq_len // 3), max(1, seq_len // 2)) | st.just(seq_len)
    lengths = draw(st.lists(size, max_size=40))
    return np.array(lengths, np.int32), seq_len, draw(st.integers(1, 12))


@given(jobs())
@settings(max_examples=300)
def test_every_rollout_is_placed_once_in_a_row_that_holds_it(job: tuple[Lengths, int, int]) -> None:
    lengths, seq_len, ranks = job
    grid = pack(lengths, seq_len, ranks)
    placed = [item for rank in grid for row in rank for item in row]
    assert sorted(placed) == list(range(len(lengths)))
    assert all(sum(int(lengths[item]) for item in row) <= seq_len for rank in grid for row in rank)


@given(jobs())
@settings(max_examples=300)
def test_ranks_have_equal_numbers_of_rows_and_no_more_than_the_bins_need(job: tuple[Lengths, int, int]) -> None:
    lengths, seq_len, ranks = job
    grid = pack(lengths, seq_len, ranks)
    bins = len(best_fit_decreasing(lengths, seq_len))
    least = math.ceil(int(lengths.sum()) / seq_len)
    assert len(grid) == ranks and {len(rank) for rank in grid} == {len(grid[0])}
    assert max(1, math.ceil(least / ranks)) <= len(grid[0]) <= max(1, math.ceil(bins / ranks))


@given(jobs())
@settings(max_examples=300)
def test_a_filler_row_appears_only_where_rollouts_are_fewer_than_rows(job: tuple[Lengths, int, int]) -> None:
    lengths, seq_len, ranks = job
    rows = [row for rank in pack(lengths, seq_len, ranks) for row in rank]
    assert fillers([rows]) == max(0, len(rows) - len(lengths))


@given(jobs())
@settings(max_examples=300)
def test_the_rows_of_a_rank_are_ordered_by_cost(job: tuple[Lengths, int, int]) -> None:
    """So that the slots of all ranks, which wait for each other, cost about the same."""
    lengths, seq_len, ranks = job
    costs = rollout_costs(lengths)
    for rank in pack(lengths, seq_len, ranks):
        in_order = [float(costs[row].sum()) if row else 0.0 for row in rank]
        assert in_order == sorted(in_order, reverse=True)


@given(jobs())
def test_the_same_lengths_give_the_same_grid(job: tuple[Lengths, int, int]) -> None:
    lengths, seq_len, ranks = job
    assert pack(lengths, seq_len, ranks) == pack(lengths.copy(), seq_len, ranks)


@given(jobs())
def test_no_two_rows_of_the_bins_would_fit_into_one(job: tuple[Lengths, int, int]) -> None:
    """A new row is opened only if no open row has space, so there are fewer than twice the least."""
    lengths, seq_len, _ = job
    rows = best_fit_decreasing(lengths, seq_len)
    filled = sorted(int(lengths[row].sum()) for row in rows)
    assert len(filled) < 2 or filled[0] + filled[1] > seq_len
    assert sorted(item for row in rows for item in row) == list(range(len(lengths)))


@pytest.mark.parametrize(("count", "seeds"), [(512, 30), (4096, 4)])
def test_bins_are_as_few_as_first_fit_makes_and_close_to_the_least_possible(count: int, seeds: int) -> None:
    """Least possible: tokens / seq_len. On average within 1 percent of it, in no case more than one bin above."""
    ratios = []
    for seed in range(seeds):
        lengths = lognormal_lengths(count, seed)
        bins, least = len(pack(lengths, SEQ_LEN, 1)[0]), math.ceil(int(lengths.sum()) / SEQ_LEN)
        assert bins <= first_fit_decreasing(lengths, SEQ_LEN)
        assert bins <= max(least + 1, 1.01 * least)
        ratios.append(bins / least)
    assert np.mean(ratios) <= 1.01


@pytest.mark.parametrize(("count", "seeds", "most"), [(512, 30, 0.012), (4096, 6, 0.005)])
def test_little_of_the_bins_is_unused(count: int, seeds: int, most: float) -> None:
    """On average; half a bin of about 62, or of about 500, cannot be avoided."""
    batches = [lognormal_lengths(count, seed) for seed in range(seeds)]
    assert np.mean([padding_fraction(lengths, pack(lengths, SEQ_LEN, 1), SEQ_LEN) for lengths in batches]) <= most


def steps(work: Callable[[], object]) -> int:
    """Count the lines of Python that a call runs, each turn of a loop as one: no clock is asked."""
    count = 0

    def trace(_frame: types.FrameType, event: str, _argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_packing_4096_rollouts_takes_a_tenth_of_the_steps_of_a_naive_first_fit() -> None:
    lengths = lognormal_lengths(4096, 0)

    assert steps(lambda: first_fit_decreasing(lengths, SEQ_LEN)) > 10 * steps(lambda: pack(lengths, SEQ_LEN, 8))


def test_one_rank_has_the_rows_of_best_fit_and_packs_in_few_more_steps() -> None:
    """Its rows are not evened out, only ordered by cost."""
    lengths = lognormal_lengths(4096, 0)
    (rows,) = pack(lengths, SEQ_LEN, 1)
    assert sorted(rows) == sorted(best_fit_decreasing(lengths, SEQ_LEN))
    alone = steps(lambda: best_fit_decreasing(lengths, SEQ_LEN))
    assert steps(lambda: pack(lengths, SEQ_LEN, 1)) <= 1.2 * alone


def test_no_exchange_is_searched_if_the_costliest_rank_has_only_the_costliest_rollout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No grid is more even."""
    monkeypatch.setattr(exchange, "_find", lambda *_: pytest.fail("an exchange was looked for"))
    for seed in range(3):
        grid = pack(lognormal_lengths(4096, seed), SEQ_LEN, 512)
        assert {len(rank) for rank in grid} == {1}


def test_costs_of_8_ranks_differ_by_at_most_half_a_percent() -> None:
    """512 rollouts, 7 to 9 rows per rank; the seeds include batches whose rows are full to the last per mille."""
    for seed in range(100):
        lengths = lognormal_lengths(512, seed)
        costs = rank_costs(lengths, pack(lengths, SEQ_LEN, 8))
        assert costs.max() / costs.mean() <= 1.005, seed


def test_rows_full_to_the_last_token_are_dealt_so_that_ranks_are_even() -> None:
    """No rank can pack its share alone here: all 64 rows are full, and only whole rows of like cost can move."""
    rng = np.random.default_rng(0)
    cuts = [np.sort(rng.choice(np.arange(64, SEQ_LEN, 64), 7, replace=False)) for _ in range(64)]
    lengths = np.concatenate([np.diff(cut, prepend=0, append=SEQ_LEN) for cut in cuts]).astype(np.int32)
    grid = pack(lengths, SEQ_LEN, 8)
    assert sum(map(len, grid)) == len(best_fit_decreasing(lengths, SEQ_LEN)) == 64
    costs = rank_costs(lengths, grid)
    assert costs.max() / costs.mean() <= 1.005


def test_exchanging_between_ranks_never_overfills_a_row() -> None:
    """Rows almost full of a few rollouts or many: ranks cannot pack alone, and most exchanges would not fit."""
    for seed in range(200):
        rng = np.random.default_rng(seed)
        seq_len, rows, pieces = 1000, 12, int(rng.integers(3, 30))
        cuts = [np.sort(rng.choice(np.arange(1, 900), pieces, replace=False)) for _ in range(rows)]
        ends = seq_len - rng.integers(0, 25, rows)
        lengths = np.concatenate([np.diff(c, prepend=0, append=e) for c, e in zip(cuts, ends, strict=True)])
        grid = pack(lengths.astype(np.int32), seq_len, 4)
        assert max(sum(int(lengths[i]) for i in row) for rank in grid for row in rank) <= seq_len
        assert sorted(i for rank in grid for row in rank for i in row) == list(range(len(lengths)))


@pytest.mark.parametrize("seed", [571, 1121, 1153])
def test_a_rollout_moves_only_to_a_row_with_space(seed: int) -> None:
    """Batches, found by search, in which the best exchange would be a move into a row that is too full for it."""
    rng = np.random.default_rng(seed)
    mean, sigma = rng.uniform(4.5, 7.5), rng.uniform(0.5, 1.3)
    ranks = int(rng.choice([2, 3, 4, 8, 16]))
    lengths = np.clip(rng.lognormal(mean, sigma, int(rng.integers(32, 300))), 16, 2048).astype(np.int32)
    assert max(int(lengths[row].sum()) for rank in pack(lengths, 2048, ranks) for row in rank) <= 2048


def test_slots_of_all_ranks_cost_about_the_same() -> None:
    """Ranks wait for each other after every micro-batch: the costliest of each slot, over the mean."""
    shares = []
    for seed in range(20):
        lengths = lognormal_lengths(512, seed)
        costs = rollout_costs(lengths)
        slots = np.array([[float(costs[row].sum()) for row in rank] for rank in pack(lengths, SEQ_LEN, 8)])
        shares.append(slots.max(axis=0).sum() / slots.mean(axis=0).sum())
    assert np.mean(shares) <= 1.08


@st.composite
def adapter_jobs(draw: st.DrawFn) -> tuple[Lengths, int, int, Lengths]:
    """Draw a job and an adapter code per rollout."""
    lengths, seq_len, ranks = draw(jobs())
    codes = draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    return lengths, seq_len, ranks, np.array(codes, np.int32)


@given(adapter_jobs())
def test_two_adapters_never_share_a_row(job: tuple[Lengths, int, int, Lengths]) -> None:
    lengths, seq_len, ranks, adapters = job
    grid = pack(lengths, seq_len, ranks, adapters=adapters)
    rows = [row for rank in grid for row in rank]
    assert all(len(set(adapters[row].tolist())) <= 1 for row in rows)
    assert sorted(item for row in rows for item in row) == list(range(len(lengths)))
    assert all(int(lengths[row].sum()) <= seq_len for row in rows)
    assert len({len(rank) for rank in grid}) == 1


@given(adapter_jobs())
def test_with_adapters_rows_are_no_more_than_their_bins_need_and_fillers_as_few_as_can_be(
    job: tuple[Lengths, int, int, Lengths],
) -> None:
    lengths, seq_len, ranks, adapters = job
    grid = pack(lengths, seq_len, ranks, adapters=adapters)
    bins = sum(len(best_fit_decreasing(lengths[adapters == code], seq_len)) for code in set(adapters.tolist()))
    assert len(grid[0]) <= max(1, math.ceil(bins / ranks))
    assert fillers(grid) == max(0, ranks * len(grid[0]) - len(lengths))


def test_ranks_are_even_if_four_adapters_share_a_batch() -> None:
    for seed in range(30):
        lengths = lognormal_lengths(512, seed)
        adapters = np.random.default_rng(seed).integers(0, 4, 512).astype(np.int32)
        costs = rank_costs(lengths, pack(lengths, SEQ_LEN, 8, adapters=adapters))
        assert costs.max() / costs.mean() <= 1.005, seed


def test_ranks_are_balanced_by_the_given_cost() -> None:
    """Without attention tokens are balanced; with nothing but attention their squares."""
    lengths = lognormal_lengths(512, 1)
    for cost in (Cost(1.0, 0.0), Cost(0.0, 1.0), Cost(5e10, 3e5)):
        costs = rollout_costs(lengths, cost)
        totals = np.array([sum(costs[row].sum() for row in rank) for rank in pack(lengths, SEQ_LEN, 8, cost)])
        assert totals.max() / totals.mean() <= 1.005


def test_the_grid_depends_on_the_ratio_of_the_coefficients_alone() -> None:
    lengths = lognormal_lengths(300, 2)
    assert pack(lengths, SEQ_LEN, 8, Cost(3.0, 0.25)) == pack(lengths, SEQ_LEN, 8, Cost(3.0 * 2**40, 2.0**38))


@pytest.mark.parametrize("ranks", [80, 512, MAX_RANKS])
def test_with_more_ranks_than_rows_each_has_one_and_a_filler_only_where_rollouts_run_out(ranks: int) -> None:
    lengths = lognormal_lengths(512, 3)
    grid = pack(lengths, SEQ_LEN, ranks)
    assert {len(rank) for rank in grid} == {1} and fillers(grid) == max(0, ranks - 512)


def test_the_cost_of_a_rollout_grows_faster_than_its_length() -> None:
    """a·L + b·L²; at 12288 tokens attention costs as much as the dense layers."""
    short, long = rollout_costs(np.array([1, 12288], np.int32)).tolist()
    assert long == pytest.approx(2 * 12288) and long > 12288 * short


@pytest.mark.parametrize("ranks", [0, -1, MAX_RANKS + 1, 10**9])
def test_a_number_of_ranks_outside_1_to_4096_is_rejected(ranks: int) -> None:
    with pytest.raises(Invalid, match=rf"dp_world_size is {ranks}; it must be in 1\.\.4096") as caught:
        pack(np.array([3], np.int32), 8, ranks)
    assert (caught.value.name, caught.value.value, caught.value.bound) == ("dp_world_size", ranks, 4096)


@pytest.mark.parametrize("ranks", [1, MAX_RANKS])
def test_any_number_of_ranks_from_1_to_4096_works(ranks: int) -> None:
    grid = pack(np.array([3, 8, 1], np.int32), 8, ranks)
    assert len(grid) == ranks and sorted(i for rank in grid for row in rank for i in row) == [0, 1, 2]


def test_a_rollout_longer_than_a_row_is_rejected() -> None:
    with pytest.raises(Invalid, match="a rollout has 9 tokens; the maximum is seq_len, 8") as caught:
        pack(np.array([3, 9, 1], np.int32), 8, 2)
    assert (caught.value.value, caught.value.bound) == (9, 8)


def test_nothing_to_pack_gives_one_empty_row_per_rank() -> None:
    assert pack(np.array([], np.int32), 8, 3) == [[[]], [[]], [[]]]


def test_padding_is_the_unused_share_of_all_rows() -> None:
    lengths = np.array([8, 4, 2], np.int32)
    assert padding_fraction(lengths, pack(lengths, 8, 2), 8) == pytest.approx(1 - 14 / 16)
    assert padding_fraction(lengths, [], 8) == 0.0


def test_the_grid_is_the_same_on_every_machine() -> None:
    """A change of this digest changes the bytes of batches that are redelivered: only with a new version."""
    lengths = np.array([16 + (n * n * 7919 + n * 104729) % 2500 for n in range(700)], np.int32)
    adapters = np.arange(700, dtype=np.int32) % 3
    grids = [pack(lengths, 4096, ranks, adapters=codes) for ranks in (1, 8, 24) for codes in (None, adapters)]
    assert hashlib.blake2b(repr(grids).encode(), digest_size=8).hexdigest() == "70865e2e8e732e55"
