"""Groups by their columns: each query gives what a comparison of every group gives, in bounded windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.kernel.rows.index import ENTRY
from replaybuf.kernel.state import group_query
from replaybuf.kernel.state.group_query import GroupMatcher, GroupOrder, GroupQuery, Ranking
from replaybuf.kernel.state.run_state import RunState
from replaybuf.wire.group import hash_name
from tests.builders import batch_entry, batch_record, config_record
from tests.kernel.listing import list_numbers


def state_of(count: int, seed: int = 0) -> RunState:
    """Build a run of `count` live groups with few different rewards, versions, sources."""
    rng = np.random.default_rng(seed)
    state, entries = RunState(), np.zeros(count, ENTRY)
    state.apply(1, config_record())
    entries["tokens"], entries["rollouts"], entries["prompt_index"] = 8, 2, -1
    entries["reward_mean"] = rng.integers(0, 8, count) / 7
    entries["policy_version"] = entries["policy_version_max"] = rng.integers(0, 4, count)
    entries["source"] = np.where(rng.random(count) < 0.5, hash_name("gsm8k"), 0)
    state.store(np.arange(1, count + 1), entries)
    return state


CONDITIONS: dict[str, Callable[[Any, int], Any]] = {
    "min_reward": lambda row, value: row["reward_mean"] >= np.float32(value / 7),
    "max_reward": lambda row, value: row["reward_mean"] <= np.float32(value / 7),
    "min_staleness": lambda row, value: 0 - row["policy_version"] >= -value,
    "max_staleness": lambda row, value: 0 - row["policy_version"] <= -value,
    "version": lambda row, value: row["policy_version"] == value,
}
SCALES: dict[str, Callable[[int], float]] = {
    "min_reward": lambda value: value / 7,
    "max_reward": lambda value: value / 7,
    "min_staleness": lambda value: -value,
    "max_staleness": lambda value: -value,
}


@given(st.dictionaries(st.sampled_from(sorted(CONDITIONS)), st.integers(0, 4)), st.booleans(), st.integers(1, 40))
def test_pages_hold_the_groups_that_a_comparison_one_by_one_finds(
    conditions: dict[str, int], desc: bool, limit: int
) -> None:
    state = state_of(100)
    columns = {name: state.index[name] for name in ("reward_mean", "policy_version")}
    rows = [{name: column[row] for name, column in columns.items()} for row in range(100)]
    expected = [n + 1 for n, row in enumerate(rows) if all(CONDITIONS[k](row, v) for k, v in conditions.items())]
    expected = expected[::-1] if desc else expected
    given_values = {name: SCALES.get(name, float)(value) for name, value in conditions.items()}
    with patch.object(group_query, "WINDOW", 7):
        pages, after = list[int](), 0
        while page := list_numbers(state, None, after, limit, desc=desc, **given_values):
            pages += page
            after = page[-1]
    assert pages == expected


def test_a_step_names_its_groups_and_a_source_those_of_its_name() -> None:
    state = state_of(20)
    state.apply(2, batch_record(0, [batch_entry(n) for n in (3, 9, 4)]))
    assert list_numbers(state, None, 0, 9, step=0) == [3, 4, 9]
    assert list_numbers(state, "live", 0, 9, step=0) == [] == list_numbers(state, None, 0, 9, step=1)
    named = list_numbers(state, None, 0, 20, source="gsm8k")
    assert sorted(named + list_numbers(state, None, 0, 20, source="")) == list(range(1, 21)) and 0 < len(named) < 20


@pytest.mark.parametrize(
    ("order", "column"),
    [("reward", "reward_mean"), ("reward_std", "reward_std"), ("longest_tokens", "longest_tokens")],
)
def test_an_order_compares_its_column(order: GroupOrder, column: str) -> None:
    state = state_of(200)
    keys, numbers = GroupMatcher(state, GroupQuery(order=order)).keys_of(state.index["number"])
    assert keys.tolist() == state.index[column].tolist()
    assert numbers.tolist() == list(range(1, 201))


@pytest.mark.parametrize("desc", [False, True])
def test_a_ranking_sorts_by_key_then_number_and_goes_on_behind_a_position(desc: bool) -> None:
    state = state_of(200)
    matcher = GroupMatcher(state, GroupQuery(order="reward", desc=desc))
    keys, numbers = matcher.keys_of(state.index["number"])
    expected = sorted(zip(keys.tolist(), numbers.tolist(), strict=True), reverse=desc)
    ranked_numbers, after = list[int](), None
    while True:
        ranking = Ranking(30, after, desc=desc)
        for part in np.array_split(np.random.default_rng(1).permutation(200), 5):
            ranking.add(keys[part], numbers[part])
        ranked_numbers += ranking.numbers
        if len(ranking.numbers) < 30:
            break
        after = float(keys[ranking.numbers[-1] - 1]), ranking.numbers[-1]
    assert ranked_numbers == [number for _, number in expected]


def test_a_million_groups_are_compared_in_windows_of_a_bounded_size() -> None:
    state = state_of(1_000_000)
    matcher = GroupMatcher(state, GroupQuery(min_reward=2.0, max_staleness=5, source="gsm8k"))
    edge, windows = 0, 0
    while window := matcher.next_window(edge):
        assert window.high - window.low < group_query.WINDOW
        edge, windows = window.high, windows + 1
    assert edge == 1_000_000 and windows == 16
