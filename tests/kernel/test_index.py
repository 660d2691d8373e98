"""Index columns compared with a dict of rows, and the index entry of a group."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replaybuf.kernel.rows.index import ENTRY, EVICTED, FREED, IN_BATCHES, LIVE, NEVER, Index, encode_entry
from replaybuf.kernel.strategy.contract import Groups
from replaybuf.wire.group import Group, group_from_json
from replaybuf.wire.group_check import GroupLimits, Rejection, check_group
from tests.builders import entries, group, groups, rollout, wire_group

KEPT = [name for name in ENTRY.names or () if name not in ("crc32c", "staleness_at_write")]
SQUEEZED_ABOVE = 1024
"""Up to this size freed rows are not removed."""


def random_entries(count: int, seed: int) -> npt.NDArray[Any]:
    rng = np.random.default_rng(seed)
    values = np.zeros(count, ENTRY)
    for name in ENTRY.names or ():
        values[name] = rng.integers(0, 1000, count)
    return values


class IndexMachine(RuleBasedStateMachine):
    """Insert, use and free rows, in chunks large enough that columns grow and freed rows are removed."""

    @initialize()
    def start(self) -> None:
        self.index = Index()
        self.rows: dict[int, dict[str, float]] = {}
        self.seen = 0

    @rule(count=st.integers(1, 700), gap=st.integers(0, 3))
    def insert(self, count: int, gap: int) -> None:
        first = self.seen + 1 + gap
        numbers = np.arange(first, first + count, dtype=np.int64)
        values = random_entries(count, seed=first)
        self.index.insert(numbers, values)
        self.seen = int(numbers[-1])
        for number, value in zip(numbers.tolist(), values, strict=True):
            row = {name: value[name].item() for name in KEPT}
            row |= {"state": LIVE, "reason": 0, "times_sampled": 0, "last_step": NEVER, "evicted_at": NEVER}
            self.rows[number] = row | {"priority": row["advantage_abs_mean"]}

    def some(self, seed: int, share: float) -> npt.NDArray[np.int64]:
        """Draw numbers of stored, freed and unknown groups, in any order."""
        count = int(share * (self.seen + 3))
        return np.random.default_rng(seed).permutation(self.seen + 3)[:count].astype(np.int64)

    @precondition(lambda self: self.seen)
    @rule(seed=st.integers(0, 99), share=st.sampled_from([0.0, 0.1, 0.6, 1.0]))
    def free(self, seed: int, share: float) -> None:
        numbers = self.some(seed, share)
        self.index.free(self.index.rows_of(numbers))
        for number in numbers.tolist():
            self.rows.pop(number, None)
        assert len(self.index) <= max(SQUEEZED_ABOVE, 2 * len(self.rows)), "freed rows are at most half of many"

    @precondition(lambda self: self.seen)
    @rule(seed=st.integers(0, 99), step=st.integers(0, 50))
    def use(self, seed: int, step: int) -> None:
        numbers = self.some(seed, 0.2)
        rows = self.index.rows_of(numbers)
        self.index["state"][rows] = IN_BATCHES
        self.index["last_step"][rows] = step
        self.index["times_sampled"][rows] += 1
        for number in self.rows.keys() & set(numbers.tolist()):
            self.rows[number] |= {"state": IN_BATCHES, "last_step": step}
            self.rows[number]["times_sampled"] += 1

    @precondition(lambda self: self.seen)
    @rule(seed=st.integers(0, 99))
    def rows_of_returns_rows_in_the_order_of_the_numbers(self, seed: int) -> None:
        numbers = self.some(seed, 0.3)
        stored = self.index["number"][self.index.rows_of(numbers)].tolist()
        assert stored == [number for number in numbers.tolist() if number in self.rows]

    @invariant()
    def the_columns_equal_the_dict(self) -> None:
        index, kept = self.index, self.index["state"] != FREED
        assert index["number"][kept].tolist() == list(self.rows)
        for name in (*KEPT, "state", "times_sampled", "last_step", "evicted_at", "priority"):
            assert index[name][kept].tolist() == [row[name] for row in self.rows.values()], name

    @invariant()
    def rows_stay_sorted_by_number(self) -> None:
        assert (np.diff(self.index["number"]) > 0).all()

    @invariant()
    def live_rows_are_those_that_may_be_sampled(self) -> None:
        live = [number for number, row in self.rows.items() if row["state"] == LIVE]
        assert self.index["number"][self.index.live()].tolist() == live


TestIndexAgainstADict = IndexMachine.TestCase
TestIndexAgainstADict.settings = settings(max_examples=25, stateful_step_count=20, derandomize=True, deadline=None)


def test_a_strategy_sees_read_only_columns_of_the_rows() -> None:
    """Columns that it has read do not change, and it cannot write to the index."""
    index = Index()
    index.insert(np.array([4, 5, 9]), random_entries(3, seed=1))
    seen = index.groups(np.array([2, 0]))
    tokens = seen.tokens.tolist()
    index["tokens"][:] = 0
    assert (seen.row.tolist(), seen.tokens.tolist()) == ([9, 4], tokens)
    for name in Groups.COLUMNS:
        column = getattr(seen, name)
        assert len(column) == 2
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 1
        with pytest.raises(ValueError, match="cannot set WRITEABLE flag"):
            column.flags.writeable = True
        with pytest.raises(AttributeError, match=f"Groups are read-only; '{name}' cannot be set"):
            setattr(seen, name, column)


@given(st.lists(st.integers(0, 11), max_size=8))
def test_groups_show_any_rows_in_the_given_order(rows: list[int]) -> None:
    """Both for copied rows and for views of rows without a gap."""
    index = Index()
    index.insert(np.arange(1, 13), random_entries(12, seed=2))
    seen = index.groups(np.array(rows, np.int64))
    for name in Groups.COLUMNS:
        assert getattr(seen, name).tolist() == index["number" if name == "row" else name][rows].tolist()
        with pytest.raises(ValueError, match="read-only"):
            getattr(seen, name)[:0] = 1
    assert seen.take(np.arange(len(rows) // 2)).row.tolist() == [row + 1 for row in rows[: len(rows) // 2]]


def test_rows_without_a_gap_are_not_copied() -> None:
    """A copy of a million groups at every step would be slow."""
    index = Index()
    index.insert(np.arange(1, 13), random_entries(12, seed=2))
    index["state"][:5] = EVICTED
    assert np.shares_memory(index.groups(index.live()).tokens, index["tokens"])
    index["state"][7] = EVICTED
    assert not np.shares_memory(index.groups(index.live()).tokens, index["tokens"])


def test_columns_have_the_types_of_the_strategy_interface() -> None:
    seen = Index().groups(np.array([], np.int64))
    int32s = {"adapter", "policy_version", "policy_version_max", "tokens", "rollouts", "times_sampled", "last_step"}
    int32s |= {"source", "longest_tokens", "truncated"}
    for name in Groups.COLUMNS:
        expected = {"row": np.int64, "prompt_index": np.int64, "arrival_s": np.float64}.get(
            name, np.int32 if name in int32s else np.float32
        )
        assert getattr(seen, name).dtype == expected, name


@pytest.mark.parametrize("count", [100_000, 1_000_000])
def test_a_group_takes_at_most_160_bytes_in_chunks_of_any_size(count: int) -> None:
    """The most bytes per group are used just after the columns grow."""
    index = Index()
    values = random_entries(4096, seed=0)
    worst, done = 0.0, 0
    while done < count:
        before = index.nbytes
        index.insert(np.arange(done + 1, done + 4097), values)
        done += 4096
        if index.nbytes != before:
            worst = max(worst, index.nbytes / done)
    assert worst <= 160


def test_inserting_groups_one_by_one_rarely_copies_the_columns() -> None:
    """The number of copies grows with the logarithm of the groups."""
    index = Index()
    row = random_entries(1, seed=0)
    sizes = set()
    for number in range(1, 20_001):
        index.insert(np.array([number]), row)
        sizes.add(index.nbytes)
    assert len(sizes) <= 10


def test_a_large_index_grows_one_column_at_a_time() -> None:
    """All columns of a million groups take 0.13 s of the processor, and every call of every run waits."""
    index, values, copied = Index(), random_entries(250, seed=0), 0
    index.reserve(100_000)
    for first in range(1, 200_001, 250):
        before = {name: index[name].base for name in index.columns}
        index.insert(np.arange(first, first + 250), values)
        moved = [name for name in index.columns if index[name].base is not before[name]]
        assert len(moved) <= 1
        copied += len(moved)
    assert copied > len(index.columns)
    for name in KEPT:
        assert (index[name].reshape(-1, 250) == values[name]).all()
    assert np.shares_memory(index.groups(None).tokens, index["tokens"])


@given(groups())
def test_an_index_entry_summarises_its_group(made: Group) -> None:
    entry = np.frombuffer(encode_entry(made, 640, 0xFEDCBA98, 9, 1234.5), ENTRY)[0]
    lengths = made.lengths.tolist()
    assert (entry["tokens"], entry["rollouts"], entry["longest_tokens"]) == (sum(lengths), len(lengths), max(lengths))
    assert (entry["policy_version"], entry["policy_version_max"]) == (made.policy_version, made.policy_version_max)
    assert entry["staleness_at_write"] == 9 - made.policy_version
    assert (entry["frame_bytes"], entry["crc32c"], entry["arrival_s"]) == (640, 0xFEDCBA98, 1234.5)
    assert entry["prompt_index"] == (-1 if made.prompt_index is None else made.prompt_index)
    assert entry["reward_mean"] == pytest.approx(made.rewards.mean(), rel=1e-6, abs=1e-30)
    assert entry["reward_std"] == pytest.approx(made.rewards.std(), rel=1e-6, abs=1e-30)
    expected = 0.0 if made.advantages is None else np.abs(made.advantages).mean()
    assert entry["advantage_abs_mean"] == pytest.approx(expected, rel=1e-6, abs=1e-30)


def test_the_largest_accepted_values_fit_into_an_index_entry() -> None:
    """The largest values that `check_group` accepts cause no overflow and no warning."""
    largest = group(rollout(reward=3.4e38, advantage=-3.4e38), prompt_index=2**53 - 1)
    assert check_group(largest, GroupLimits()) is None
    entry = np.frombuffer(encode_entry(largest, 1, 1, 0, 0.0), ENTRY)[0]
    assert np.isfinite(entry["reward_mean"]) and np.isfinite(entry["advantage_abs_mean"])
    for beyond in (wire_group(prompt_index=2**53), wire_group(rollout(reward=1e39))):
        assert isinstance(check_group(group_from_json(beyond), GroupLimits()), Rejection)


def test_a_column_is_assigned_by_number_and_freed_groups_are_skipped() -> None:
    index = Index()
    index.insert(np.arange(1, 6), entries(*[{}] * 5))
    index.free(index.rows_of([2]))
    index.assign("last_step", {5: 50, 2: 20, 9: 90, 1: 10})
    assert index["last_step"][index.rows_of([1, 3, 4, 5])].tolist() == [10, -1, -1, 50]
    index.assign("last_step", {})
