"""Adapters share the budget in turns that go on from batch to batch."""

from __future__ import annotations

from collections import Counter

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.strategy import Budget
from replaybuf.turns import Progress, Turns, share
from tests.builders import steady

QUEUES = st.dictionaries(st.sampled_from("abcd"), st.lists(st.integers(1, 40), max_size=8), min_size=1)
BUDGETS = st.builds(
    Budget, tokens=st.none() | st.integers(40, 120), groups=st.none() | st.integers(1, 9), seq_len=st.just(64)
)


@given(QUEUES, BUDGETS, st.sampled_from(["", "a", "c", "z"]), st.integers(1, 6))
@steady
def test_a_share_is_of_whole_groups_within_the_budget_and_leaves_nothing_that_fits(
    queues: dict[str, list[int]], budget: Budget, following: str, size: int
) -> None:
    found = share(queues, dict.fromkeys(queues, size), budget, Turns(following))
    tokens = sum(sum(queues[name][:count]) for name, count in found.groups.items())
    groups = sum(found.groups.values())
    assert budget.tokens is None or tokens <= budget.tokens
    assert budget.groups is None or groups <= budget.groups
    for name, count in found.groups.items():
        assert count <= min(size, len(queues[name]))
        ended = count in (size, len(queues[name])) or groups == budget.groups
        assert ended or (budget.tokens is not None and tokens + queues[name][count] > budget.tokens)


@given(st.integers(1, 4), st.integers(1, 7), st.integers(1, 12))
@steady
def test_adapters_with_equal_groups_never_differ_by_more_than_one(adapters: int, per_batch: int, batches: int) -> None:
    """Whatever part of a round fits a batch: the turn goes on where it stopped."""
    names = "abcd"[:adapters]
    turns, total = Turns(), Counter(dict.fromkeys(names, 0))
    for _ in range(batches):
        found = share(
            {name: [10] * 100 for name in names},
            dict.fromkeys(names, 1000),
            Budget(10 * per_batch, None, 64),
            turns,
        )
        total.update(found.groups)
        turns = found.turns
        assert max(total.values()) - min(total.values()) <= 1


def test_a_step_of_an_adapter_is_complete_when_it_gave_its_own_batch_size() -> None:
    """Batch sizes 2 and 3, three groups per batch."""
    turns, steps = Turns(), []
    for _ in range(5):
        found = share({"a": [1] * 9, "b": [1] * 9}, {"a": 2, "b": 3}, Budget(None, 3, 64), turns)
        turns = found.turns
        steps.append((found.groups, found.completed))
    assert steps == [
        ({"a": 2, "b": 1}, ("a",)),
        ({"a": 1, "b": 2}, ("b",)),
        ({"a": 1, "b": 2}, ("a",)),
        ({"a": 2, "b": 1}, ("a", "b")),
        ({"a": 1, "b": 2}, ()),
    ]
    assert turns.progress == {"a": Progress(3, 1), "b": Progress(2, 2)}


def test_an_adapter_whose_group_did_not_fit_comes_first_in_the_next_batch() -> None:
    queues, sizes = {"a": [10] * 9, "b": [60] * 9, "c": [10] * 9}, dict.fromkeys("abc", 9)
    first = share(queues, sizes, Budget(70, None, 64), Turns("c"))
    assert first.groups == {"a": 3, "b": 0, "c": 4} and first.turns.next == "b"
    assert share(queues, sizes, Budget(70, None, 64), first.turns).groups == {"a": 0, "b": 1, "c": 1}


def test_an_adapter_that_left_hands_its_turn_to_the_next_name() -> None:
    found = share({"a": [1], "c": [1]}, {"a": 1, "c": 1}, Budget(None, 1, 64), Turns("b"))
    assert found.groups == {"a": 0, "c": 1}


def test_turns_survive_being_written_down() -> None:
    turns = share({"a": [1], "b": [1]}, {"a": 2, "b": 1}, Budget(None, 2, 64), Turns()).turns
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(turns), type=Turns) == turns
