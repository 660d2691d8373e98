"""Adapters share the budget of a batch in turns that go on from batch to batch."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.kernel.rotation import AdapterProgress, AdapterShare, Rotation, share_batch
from replaybuf.kernel.strategy import LOOK_AHEAD, Budget, Waiting, fill
from replaybuf.wire.ledger import AdapterStep
from tests.builders import live_groups, steady

NAMES = "abcd"
QUEUES = st.dictionaries(st.sampled_from(NAMES), st.lists(st.integers(1, 40), max_size=12), min_size=1)
SIZES = st.fixed_dictionaries({name: st.integers(1, 6) for name in NAMES})
TOKENS = st.none() | st.integers(40, 120)


class Queues:
    """Adapters with groups in waiting, oldest first, by their tokens; a portion is complete or ended by the budget."""

    def __init__(self, queues: dict[str, list[int]]) -> None:
        self.queues = {name: list(queue) for name, queue in queues.items()}

    def offer(self, name: str, tokens: int | None, lacking: int | None) -> AdapterShare | None:
        assert lacking is not None
        taken: list[int] = []
        room = float("inf") if tokens is None else tokens
        for position, size in enumerate(self.queues[name]):
            if len(taken) < lacking and size <= room:
                taken.append(position)
                room -= size
        sizes = [self.queues[name][position] for position in taken]
        if not taken or len(taken) == len(self.queues[name]) < lacking:
            return None
        return AdapterShare(np.array(taken, np.int64), None, sum(sizes))

    def remove(self, name: str, portion: AdapterShare) -> None:
        gone = set(portion.rows.tolist())
        self.queues[name] = [size for at, size in enumerate(self.queues[name]) if at not in gone]


def batch(
    queues: Queues, turns: Rotation, sizes: dict[str, int], tokens: int | None
) -> tuple[dict[str, AdapterShare], Rotation]:
    portions, following = share_batch(turns, {name: sizes[name] for name in queues.queues}, tokens, queues.offer)
    for name, portion in portions.items():
        queues.remove(name, portion)
    parts = {}
    for name, portion in portions.items():
        given = turns.progress(name).groups + len(portion.rows)
        parts[name] = AdapterStep(turns.progress(name).steps, 0, len(portion.rows), given == sizes[name])
    return portions, turns.after(parts, following)


@given(QUEUES, SIZES, TOKENS, st.sampled_from(["", "a", "c", "z"]))
@steady
def test_batches_keep_the_budget_and_no_portion_crosses_the_end_of_an_own_step(
    queues: dict[str, list[int]], sizes: dict[str, int], tokens: int | None, first: str
) -> None:
    held, turns = Queues(queues), Rotation(first)
    for _ in range(1 + sum(map(len, queues.values()))):  # each batch takes a group while an adapter is ready
        before = turns
        portions, turns = batch(held, turns, sizes, tokens)
        assert tokens is None or sum(portion.tokens for portion in portions.values()) <= tokens
        for name, portion in portions.items():
            old, new = before.progress(name), turns.progress(name)
            assert old.groups + len(portion.rows) <= sizes[name]
            assert new.steps - old.steps == (old.groups + len(portion.rows) == sizes[name])
    # what no batch took is what nobody could complete, whatever the budget
    assert all(held.offer(name, tokens, 1) is None or len(queue) < sizes[name] for name, queue in held.queues.items())


@given(SIZES, st.integers(40, 60), st.lists(st.integers(1, 40), min_size=4, max_size=4))
@steady
def test_whoever_is_ready_is_served_before_the_others_have_completed_an_own_step_each(
    sizes: dict[str, int], tokens: int, lengths: list[int]
) -> None:
    """The fast do not starve the slow: all of them are always ready, each with groups of one length."""
    held = Queues({name: [length] * 400 for name, length in zip(NAMES, lengths, strict=True)})
    turns = Rotation()
    unserved = dict.fromkeys(NAMES, 0)
    for _ in range(40):
        portions, turns = batch(held, turns, sizes, tokens)
        for name in NAMES:
            unserved[name] = 0 if name in portions else unserved[name] + 1
            assert unserved[name] <= sum(sizes.values()) - sizes[name]


def test_an_adapter_that_the_budget_cut_is_the_first_of_the_next_batch() -> None:
    held = Queues({"a": [10] * 9, "b": [10] * 9, "c": [10] * 9})
    sizes = {"a": 3, "b": 3, "c": 3}
    portions, turns = batch(held, Rotation(), sizes, 50)
    assert {name: len(portion.rows) for name, portion in portions.items()} == {"a": 3, "b": 2}
    assert turns == Rotation("b", {"a": AdapterProgress(1, 0, 3), "b": AdapterProgress(0, 2, 2)})
    portions, turns = batch(held, turns, sizes, 50)
    assert {name: len(portion.rows) for name, portion in portions.items()} == {"b": 1, "c": 3, "a": 1}
    assert turns.next == "a"
    assert turns.progress("b") == AdapterProgress(1, 0, 3)
    assert turns.progress("a") == AdapterProgress(1, 1, 4)


def test_an_adapter_whose_group_found_no_room_comes_before_one_that_was_served_after_it() -> None:
    held = Queues({"a": [30] * 9, "b": [40] * 9, "c": [10] * 9})
    portions, turns = batch(held, Rotation(), {"a": 1, "b": 1, "c": 1}, 50)
    assert [*portions] == ["a", "c"]
    assert turns.next == "b"


def test_an_adapter_that_is_not_ready_holds_nobody_up_and_keeps_no_turn() -> None:
    held = Queues({"a": [10], "b": [10] * 9})
    portions, turns = batch(held, Rotation(), {"a": 2, "b": 2}, 50)
    assert [*portions] == ["b"]
    assert turns == Rotation("a", {"b": AdapterProgress(1, 0, 2)})
    assert batch(Queues({"a": [], "b": [10]}), turns, {"a": 2, "b": 2}, 50) == ({}, turns)


@given(QUEUES, SIZES, st.integers(40, 120))
@steady
def test_no_group_of_an_adapter_that_gave_some_fits_beside_the_portions_of_a_batch(
    queues: dict[str, list[int]], sizes: dict[str, int], tokens: int
) -> None:
    """Portions have both bounds, always: what is left of the tokens, and what the adapter's own batch lacks."""

    def offer(name: str, room: int | None, lacking: int | None) -> AdapterShare | None:
        assert lacking is not None
        budget = Budget(room, lacking, seq_len=64)
        chosen = fill(live_groups(queues[name], first_row=0), np.arange(len(queues[name])), budget)
        if isinstance(chosen, Waiting):
            return None
        return AdapterShare(chosen.rows, None, sum(queues[name][row] for row in chosen.rows.tolist()))

    portions, _ = share_batch(Rotation(), {name: sizes[name] for name in queues}, tokens, offer)
    room = tokens - sum(portion.tokens for portion in portions.values())
    assert room >= 0
    for name, portion in portions.items():
        left = [size for row, size in enumerate(queues[name][:LOOK_AHEAD]) if row not in portion.rows]
        assert len(portion.rows) == sizes[name] or min(left, default=tokens + 1) > room
