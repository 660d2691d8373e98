"""Adapters share the budget of a batch in turns, across batches."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.kernel.state.rotation import AdapterProgress, AdapterShare, Rotation, share_batch
from replaybuf.kernel.strategy.contract import LOOK_AHEAD, Budget, Waiting, fill
from replaybuf.wire.ledger import AdapterStep
from tests.builders import live_groups

NAMES = "abcd"
QUEUES = st.dictionaries(st.sampled_from(NAMES), st.lists(st.integers(1, 40), max_size=12), min_size=1)
SIZES = st.fixed_dictionaries({name: st.integers(1, 6) for name in NAMES})
TOKENS = st.none() | st.integers(40, 120)


class Queues:
    """Tokens of the waiting groups of each adapter, oldest first; a share ends at a step's end or at the budget."""

    def __init__(self, queues: dict[str, list[int]]) -> None:
        self.queues = {name: list(queue) for name, queue in queues.items()}

    def offer(self, name: str, tokens: int | None, missing: int | None) -> AdapterShare | None:
        assert missing is not None
        taken: list[int] = []
        room = float("inf") if tokens is None else tokens
        for position, size in enumerate(self.queues[name]):
            if len(taken) < missing and size <= room:
                taken.append(position)
                room -= size
        sizes = [self.queues[name][position] for position in taken]
        if not taken or len(taken) == len(self.queues[name]) < missing:
            return None
        return AdapterShare(np.array(taken, np.int64), None, sum(sizes))

    def remove(self, name: str, share: AdapterShare) -> None:
        gone = set(share.numbers.tolist())
        self.queues[name] = [size for at, size in enumerate(self.queues[name]) if at not in gone]


def batch(
    queues: Queues, turns: Rotation, sizes: dict[str, int], tokens: int | None
) -> tuple[dict[str, AdapterShare], Rotation]:
    shares, following = share_batch(turns, {name: sizes[name] for name in queues.queues}, tokens, queues.offer)
    for name, share in shares.items():
        queues.remove(name, share)
    parts = {}
    for name, share in shares.items():
        groups = turns.progress(name).groups + len(share.numbers)
        parts[name] = AdapterStep(turns.progress(name).steps, 0, len(share.numbers), groups == sizes[name])
    return shares, turns.after(parts, following)


@given(QUEUES, SIZES, TOKENS, st.sampled_from(["", "a", "c", "z"]))
def test_batches_keep_the_budget_and_no_share_crosses_the_end_of_a_step(
    queues: dict[str, list[int]], sizes: dict[str, int], tokens: int | None, first: str
) -> None:
    held, turns = Queues(queues), Rotation(first)
    for _ in range(1 + sum(map(len, queues.values()))):  # each batch takes a group while an adapter is ready
        before = turns
        shares, turns = batch(held, turns, sizes, tokens)
        assert tokens is None or sum(share.tokens for share in shares.values()) <= tokens
        for name, share in shares.items():
            old, new = before.progress(name), turns.progress(name)
            assert old.groups + len(share.numbers) <= sizes[name]
            assert new.steps - old.steps == (old.groups + len(share.numbers) == sizes[name])
    # the groups left over cannot complete a step of their adapter
    assert all(held.offer(name, tokens, 1) is None or len(queue) < sizes[name] for name, queue in held.queues.items())


@given(SIZES, st.integers(40, 60), st.lists(st.integers(1, 40), min_size=4, max_size=4))
def test_a_ready_adapter_waits_at_most_until_each_other_adapter_has_completed_a_step(
    sizes: dict[str, int], tokens: int, lengths: list[int]
) -> None:
    """All adapters are always ready, each with groups of one length."""
    held = Queues({name: [length] * 400 for name, length in zip(NAMES, lengths, strict=True)})
    turns = Rotation()
    waited = dict.fromkeys(NAMES, 0)
    for _ in range(40):
        shares, turns = batch(held, turns, sizes, tokens)
        for name in NAMES:
            waited[name] = 0 if name in shares else waited[name] + 1
            assert waited[name] <= sum(sizes.values()) - sizes[name]


def test_an_adapter_whose_share_was_cut_by_the_budget_is_first_in_the_next_batch() -> None:
    held = Queues({"a": [10] * 9, "b": [10] * 9, "c": [10] * 9})
    sizes = {"a": 3, "b": 3, "c": 3}
    shares, turns = batch(held, Rotation(), sizes, 50)
    assert {name: len(share.numbers) for name, share in shares.items()} == {"a": 3, "b": 2}
    assert turns == Rotation("b", {"a": AdapterProgress(1, 0, 3), "b": AdapterProgress(0, 2, 2)})
    shares, turns = batch(held, turns, sizes, 50)
    assert {name: len(share.numbers) for name, share in shares.items()} == {"b": 1, "c": 3, "a": 1}
    assert turns.next == "a"
    assert turns.progress("b") == AdapterProgress(1, 0, 3)
    assert turns.progress("a") == AdapterProgress(1, 1, 4)


def test_an_adapter_whose_group_did_not_fit_comes_before_one_that_was_served_after_it() -> None:
    held = Queues({"a": [30] * 9, "b": [40] * 9, "c": [10] * 9})
    shares, turns = batch(held, Rotation(), {"a": 1, "b": 1, "c": 1}, 50)
    assert [*shares] == ["a", "c"]
    assert turns.next == "b"


def test_an_adapter_that_is_not_ready_loses_its_turn_and_delays_no_other() -> None:
    held = Queues({"a": [10], "b": [10] * 9})
    shares, turns = batch(held, Rotation(), {"a": 2, "b": 2}, 50)
    assert [*shares] == ["b"]
    assert turns == Rotation("a", {"b": AdapterProgress(1, 0, 2)})
    assert batch(Queues({"a": [], "b": [10]}), turns, {"a": 2, "b": 2}, 50) == ({}, turns)


@given(QUEUES, SIZES, st.integers(40, 120))
def test_no_further_group_of_a_served_adapter_fits_into_the_batch(
    queues: dict[str, list[int]], sizes: dict[str, int], tokens: int
) -> None:
    """A share is bounded by the remaining tokens and by the groups that the adapter's step still needs."""

    def offer(name: str, room: int | None, missing: int | None) -> AdapterShare | None:
        assert missing is not None
        budget = Budget(room, missing, seq_len=64)
        chosen = fill(live_groups(queues[name], first_row=0), np.arange(len(queues[name])), budget)
        if isinstance(chosen, Waiting):
            return None
        return AdapterShare(chosen.rows, None, sum(queues[name][row] for row in chosen.rows.tolist()))

    shares, _ = share_batch(Rotation(), {name: sizes[name] for name in queues}, tokens, offer)
    room = tokens - sum(share.tokens for share in shares.values())
    assert room >= 0
    for name, share in shares.items():
        left = [size for row, size in enumerate(queues[name][:LOOK_AHEAD]) if row not in share.numbers]
        assert len(share.numbers) == sizes[name] or min(left, default=tokens + 1) > room


CHANGES = st.lists(st.sets(st.sampled_from(NAMES)), min_size=1, max_size=20)


@given(CHANGES, SIZES, st.integers(40, 60), st.lists(st.integers(1, 40), min_size=4, max_size=4))
def test_adapters_may_come_and_go_between_batches(
    changes: list[set[str]], sizes: dict[str, int], tokens: int, lengths: list[int]
) -> None:
    """Only those that take part are served; steps and places in them stay; nobody that stays is passed over for ever.

    All adapters are always ready, each with groups of one length.
    """
    turns = Rotation()
    for active in changes:
        waiting, before = set(active), turns
        for _ in range(1 + sum(sizes.values())):
            held = Queues({name: [lengths[NAMES.index(name)]] * 6 for name in active})
            old = turns
            shares, turns = batch(held, turns, sizes, tokens)
            assert shares.keys() <= active
            assert sum(share.tokens for share in shares.values()) <= tokens
            for name, share in shares.items():
                assert old.progress(name).groups + len(share.numbers) <= sizes[name]
            waiting -= shares.keys()
        assert not waiting
        for name in set(NAMES) - active:
            assert turns.progress(name) == before.progress(name)
