"""Spill: bytes in memory, and the frames that move first."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.kernel.decide.spill import START, STOP, Movable, choose_moves, find_excess, list_movable
from replaybuf.kernel.rows.index import SPILLED, summarize_scores
from replaybuf.kernel.state.run_state import RunState
from replaybuf.kernel.state.spill import SpillState, SpillUse
from replaybuf.kernel.strategy.contract import Groups
from replaybuf.kernel.strategy.plugin_set import build_strategy
from replaybuf.wire.ledger import AddedColumns, ColumnsRecord
from tests.builders import batch_entry, batch_record, config_record, entries, group, live_groups


def state_of(*sizes: int, versions: list[int] | None = None) -> RunState:
    """A run whose groups 1.. have frames of these sizes."""
    state = RunState()
    state.apply(1, config_record())
    versions = versions or [0] * len(sizes)
    files = zip(sizes, versions, strict=True)
    values = [{"frame_bytes": size, "policy_version": v, "policy_version_max": v} for size, v in files]
    state.store(np.arange(1, len(sizes) + 1), entries(*values))
    return state


def by_version(groups: Groups) -> npt.NDArray[Any]:
    return groups.policy_version


sizes_and_keys = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 3)), min_size=1, max_size=300)


@given(sizes_and_keys, st.integers(1, 5000))
def test_the_last_to_be_drawn_move_first_and_no_more_than_needed(pairs: list[tuple[int, int]], excess: int) -> None:
    """As a full sort would choose them: largest key first, of equal keys the last stored one."""
    sizes, keys = (np.array(column, np.int32) for column in zip(*pairs, strict=True))
    numbers = np.arange(1, len(pairs) + 1)
    moved = choose_moves([Movable(numbers, sizes, keys)], excess)
    expected, left = [], excess
    for _, number in sorted(zip(keys.tolist(), numbers.tolist(), strict=True), reverse=True):
        if left > 0:
            expected.append(number)
            left -= int(sizes[number - 1])
    assert moved.tolist() == expected


@given(st.lists(st.lists(st.integers(1, 50), max_size=20), min_size=3, max_size=3), st.integers(1, 2000))
def test_a_list_moves_only_after_the_lists_before_it(parts: list[list[int]], excess: int) -> None:
    movable, first = [], 1
    for part in parts:
        movable.append(Movable(np.arange(first, first + len(part)), np.array(part, np.int32), None))
        first += len(part)
    moved = choose_moves(movable, excess).tolist()
    sizes = [size for part in parts for size in part]
    assert moved == list(range(1, len(moved) + 1))
    assert sum(sizes[: len(moved)]) >= excess or len(moved) == len(sizes)
    assert not moved or sum(sizes[: len(moved) - 1]) < excess


def test_used_groups_move_before_live_ones_and_those_in_training_last() -> None:
    state = state_of(10, 10, 10, 10, versions=[0, 0, 1, 0])
    state.apply(2, batch_record(0, [batch_entry(1)]))
    unused, live, training = list_movable(state, by_version)
    assert (unused.numbers.tolist(), live.numbers.tolist(), training.numbers.tolist()) == ([], [2, 3, 4], [1])
    assert choose_moves([unused, live, training], 40).tolist() == [3, 4, 2, 1]
    state.step = 1  # acked
    assert choose_moves(list_movable(state, by_version), 20).tolist() == [1, 3]


def test_memory_counts_frames_that_are_neither_freed_nor_spilled() -> None:
    state = state_of(10, 20, 30)
    spill = SpillState(state)
    assert spill.use == SpillUse(60, 0, 0)
    state.store(np.array([4]), entries({"frame_bytes": 40}))
    assert spill.use == SpillUse(100, 0, 0)
    spill.mark({2: 20, 4: 40})
    assert spill.use == SpillUse(40, 2, 60)
    state.store(np.array([5]), entries({"frame_bytes": 5}))
    assert spill.use == SpillUse(45, 2, 60)
    state.pool.free(state.index.rows_of([2, 3]))
    state.entries += 1
    assert spill.use == SpillUse(15, 1, 40)
    spill.load({1: 10})
    assert state.index[SPILLED].tolist() == [10, 0, 0, 0, 0]
    assert spill.use == SpillUse(45, 1, 10)


def test_late_columns_of_a_spilled_group_are_in_memory_until_they_move_too() -> None:
    """They came under keys of their own, after the frame had moved."""
    state = state_of(10, 20)
    spill = SpillState(state)
    spill.mark({1: 10, 2: 20})
    added = AddedColumns(number=1, crc32c={"ref_logprobs": 0}, frame_bytes=7, **summarize_scores(group()))
    state.apply(2, ColumnsRecord(groups=[added], at_s=0.0))
    assert spill.use == SpillUse(7, 2, 30)
    assert [
        (part.numbers.tolist(), part.sizes.tolist()) for part in list_movable(state, by_version) if len(part.sizes)
    ] == [([1], [7])]
    spill.mark(spill.sizes_of([1]))
    assert spill.use == SpillUse(0, 2, 37)


def test_frames_move_from_the_upper_mark_down_to_the_lower_one() -> None:
    limit = 1000
    assert find_excess(int(limit * START), limit) == 0
    assert find_excess(int(limit * START) + 1, limit) == int(limit * START) + 1 - int(limit * STOP)


def test_freed_rows_take_their_mark_with_them() -> None:
    """Rows of freed groups are removed when they are many: marks stay with their groups."""
    state = state_of(*[1] * 3000)
    spill = SpillState(state)
    spill.mark(dict.fromkeys(range(2900, 3001), 1))
    state.pool.free(state.index.rows_of(np.arange(1, 2001)))
    state.entries += 1
    assert spill.use == SpillUse(899, 101, 101)
    state.store(np.arange(3001, 3101), entries(*[{"frame_bytes": 1}] * 100))
    assert spill.use == SpillUse(999, 101, 101)


@pytest.mark.parametrize(
    ("name", "options", "last"),
    [
        ("one-step-off-policy", {}, 3),
        ("on-policy", {}, 3),
        ("replay", {"order": "fifo"}, 3),
        ("replay", {"order": "newest"}, 1),
        ("replay", {"order": "blocks"}, 3),
        ("replay", {"order": "prioritized"}, 2),
        ("replay", {"order": "uniform"}, 1),
    ],
)
def test_a_strategy_names_the_group_that_it_draws_last(name: str, options: dict[str, Any], last: int) -> None:
    """Group 1 has the oldest version, group 2 the lowest priority, group 3 the newest version."""
    made = live_groups([5, 5, 5], [0, 1, 2])
    columns = {name: getattr(made, name) for name in Groups.COLUMNS}
    groups = Groups(**columns | {"advantage_abs_mean": np.array([1.0, 0.1, 2.0], np.float32)})
    order = np.asarray(build_strategy(name, options).draw_order(groups), np.float64)
    assert choose_moves([Movable(groups.row, np.ones(3, np.int32), order)], 1).tolist() == [last]
