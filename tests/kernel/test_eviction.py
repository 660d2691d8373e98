"""Removal of groups that no later batch may use: by the declared bounds, by plug-ins, a bounded piece at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from replaybuf.kernel.decide.eviction import PIECE, PLUGIN_PIECE, decide_removals, keeps_all
from replaybuf.kernel.state.lookups import find_group_state
from replaybuf.kernel.state.run_state import RunState
from replaybuf.kernel.state.tickets import TicketBook
from replaybuf.kernel.strategy.contract import BufferView, Evictions, Filter, Groups, Strategy, Waiting
from replaybuf.kernel.strategy.options import StrategyOptions
from replaybuf.kernel.strategy.plugin_set import Bounds, PluginSet
from replaybuf.kernel.strategy.rates import Rates
from replaybuf.kernel.strategy.selection import Selector
from replaybuf.wire.config import AdapterSpec, AdmissionSpec, BatchSpec, StrategySpec
from replaybuf.wire.group import hash_name
from replaybuf.wire.ledger import AckRecord, AnyRecord, EvictRecord
from tests.builders import batch_entry, batch_record, config_record, entries

ONE_PER_BATCH = BatchSpec(groups_per_batch=1, tokens_per_batch=None)


class Watching(Strategy[StrategyOptions]):
    """Evicts odd groups and records how many groups it was given."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(StrategyOptions())
        self.sizes = sizes

    def evict(self, groups: Groups, buffer: BufferView) -> Evictions:
        self.sizes.append(len(groups))
        odd = groups.row[groups.row % 2 == 1]
        return Evictions(odd, ["odd"] * len(odd))

    def select(self, groups: Groups, buffer: BufferView, budget: Any, rng: Any) -> Waiting:
        return Waiting("no_groups")


class Passive(Watching):
    """Has no eviction of its own."""

    evict = Strategy.evict


class Large(Filter[StrategyOptions]):
    """Drops groups of more than 20 tokens."""

    def drop(self, groups: Groups, buffer: BufferView) -> Evictions:
        large = groups.row[groups.tokens > 20].tolist()
        return Evictions(large, ["large"] * len(large))


class Trial:
    """A state with a selector."""

    def __init__(self, **config: Any) -> None:
        self.state = RunState()
        self.apply(config_record(**{"strategy": StrategySpec("one-step-off-policy")} | config))
        book = TicketBook(600.0, 3, {"": None})
        self.selector = Selector("r", self.state, book, lambda: 0.0, Rates(0.0), limited=False)

    def apply(self, record: AnyRecord) -> None:
        self.state.apply(self.state.entries + 1, record)

    def store(self, *values: Mapping[str, float]) -> None:
        numbers = np.arange(self.state.stored + 1, self.state.stored + 1 + len(values))
        self.state.store(numbers, entries(*values))

    def store_many(self, count: int) -> None:
        numbers = np.arange(self.state.stored + 1, self.state.stored + 1 + count)
        self.state.store(numbers, np.repeat(entries({}), count))

    def train(self, steps: int) -> None:
        """Train steps of one group each; nothing is evicted between them."""
        for step in range(steps):
            self.apply(batch_record(step, [batch_entry(step + 1)]))
            self.apply(AckRecord(step=step, epoch=1))
        self.state.published[""] = steps

    def remove(self, *, filtered: bool = False) -> Iterator[list[AnyRecord]]:
        for records in decide_removals(self.state, self.selector, 0.0, filtered=filtered):
            for record in records:
                self.apply(record)
            yield records

    def evicted(self, *, filtered: bool = False) -> dict[str, int]:
        """Remove what is unusable; return the evicted groups by reason."""
        for _ in self.remove(filtered=filtered):
            pass
        return dict(self.state.totals.evicted)

    def plug(self, strategy: Strategy[Any], *filters: Filter[Any]) -> None:
        """Use these plug-ins."""
        config = self.selector.config
        required = ((),) * (1 + len(filters))
        self.selector.inputs._plugins = PluginSet(config, Bounds(0, 1, 0), list(filters), strategy, required=required)


@pytest.mark.parametrize(("max_staleness", "evicted"), [(0, [3, 4, 6]), (1, [3, 6]), (2, [])])
def test_the_core_evicts_groups_beyond_the_declared_staleness(max_staleness: int, evicted: list[int]) -> None:
    """The strategy has no eviction of its own."""
    options = {"max_staleness": max_staleness}
    trial = Trial(batch=ONE_PER_BATCH, strategy=StrategySpec("one-step-off-policy", options))
    trial.store_many(2)
    trial.store(*({"policy_version": float(v), "policy_version_max": float(v)} for v in (0, 1, 2, 0)))
    trial.train(2)
    assert trial.evicted() == ({"too_stale": len(evicted)} if evicted else {})
    gone = [number for number in range(1, 7) if find_group_state(trial.state, number) == ("evicted", "too_stale")]
    assert gone == evicted


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"batch": BatchSpec(groups_per_batch=1, tokens_per_batch=None, overlong="truncate")},
        {"batch": BatchSpec(groups_per_batch=1, tokens_per_batch=16, seq_len=16)},
        {"on_stale": "mask"},
        {"admissions": [AdmissionSpec("some")]},
        {"adapters": {"a": AdapterSpec(groups_per_batch=1)}},
    ],
)
@pytest.mark.parametrize(
    "arrival",
    [
        {},
        {"policy_version": 2.0, "policy_version_max": 2.0},
        {"policy_version": 1.0, "policy_version_max": 2.0},
        {"policy_version": 2.0, "policy_version_max": 3.0},
        {"policy_version": 2.0, "policy_version_max": 2.0, "tokens": 17.0},
        {"policy_version": 2.0, "policy_version_max": 2.0, "longest_tokens": 5000.0},
        {"policy_version": 2.0, "policy_version_max": 2.0, "adapter": float(hash_name("a"))},
        {"policy_version": 2.0, "policy_version_max": 2.0, "adapter": float(hash_name("b"))},
    ],
)
def test_arrivals_that_bounds_keep_are_those_that_nothing_removes(
    config: dict[str, Any], arrival: dict[str, float]
) -> None:
    strict = StrategySpec("one-step-off-policy", {"max_staleness": 0})
    trial = Trial(**{"batch": ONE_PER_BATCH, "strategy": strict} | config)
    trial.store_many(2)
    trial.train(2)
    arrived = {"policy_version": 2.0, "policy_version_max": 2.0, "longest_tokens": 8.0}
    values = entries(arrived, arrived | arrival)
    trial.store(arrived, arrived | arrival)
    kept = keeps_all(trial.state, trial.selector, values)
    removed = any(decide_removals(trial.state, trial.selector, 0.0, np.array([3, 4])))
    if "admissions" in config or "adapters" in config:
        assert not kept  # a plug-in or the phase of an adapter decides
    else:
        assert kept == (not removed)


@pytest.mark.parametrize("filters", [(), (Large(StrategyOptions()),)])
def test_arrivals_are_left_to_a_strategy_and_filters_that_evict(filters: tuple[Filter[Any], ...]) -> None:
    trial = Trial(batch=ONE_PER_BATCH, filters=[StrategySpec("large")] * len(filters))
    trial.plug(Watching([]) if not filters else Passive([]), *filters)
    assert not keeps_all(trial.state, trial.selector, entries({}))


@pytest.mark.parametrize(
    ("on_stale", "evicted"),
    [
        ("drop", [3, 4, 5, 6]),
        ("mask", [4, 6]),
        ({"code": "mask"}, [4, 5, 6]),
        ({"code": "drop", "*": "mask"}, [3, 4, 6]),
    ],
)
def test_a_masked_source_is_bounded_by_the_newest_token_of_its_groups(on_stale: Any, evicted: list[int]) -> None:
    """Groups 3 and 4 are of the source code, 5 and 6 of another; 4 and 6 have no fresh token."""
    options = {"max_staleness": 0}
    trial = Trial(batch=ONE_PER_BATCH, strategy=StrategySpec("one-step-off-policy", options), on_stale=on_stale)
    trial.store_many(2)
    codes = hash_name("code"), hash_name("code"), 0, 0
    newest = (2.0, 1.0, 2.0, 1.0)
    trial.store(*({"policy_version_max": new, "source": code} for new, code in zip(newest, codes, strict=True)))
    trial.train(2)
    trial.evicted()
    places = [find_group_state(trial.state, number) for number in range(3, 7)]
    assert [number for number, place in enumerate(places, 3) if place == ("evicted", "too_stale")] == evicted


def test_groups_above_the_published_version_are_evicted_as_of_a_lost_version() -> None:
    """A direct writer checked them before a rewind and stored them after it; a token of version 1 is enough."""
    trial = Trial(batch=ONE_PER_BATCH)
    trial.store({"policy_version_max": 0}, {"policy_version_max": 1}, {"policy_version": 2, "policy_version_max": 2})
    assert trial.evicted() == {"lost_lineage": 2}
    assert find_group_state(trial.state, 1) == ("live", None)
    assert trial.evicted() == {"lost_lineage": 2}


def test_groups_at_the_published_version_stay() -> None:
    trial = Trial(batch=ONE_PER_BATCH)
    trial.store({})
    trial.train(1)
    trial.store({"policy_version_max": 1}, {"policy_version": 1, "policy_version_max": 1})
    assert trial.evicted() == {}


def test_a_mass_of_stale_groups_is_evicted_by_records_of_bounded_size() -> None:
    trial = Trial(batch=ONE_PER_BATCH)
    trial.store_many(2 * PIECE + 10)
    trial.train(2)
    records = [record for piece in trial.remove() for record in piece]
    sizes = [len(record.numbers["too_stale"]) for record in records if isinstance(record, EvictRecord)]
    assert len(sizes) == len(records) == 3 and max(sizes) <= PIECE
    assert trial.state.totals.evicted == {"too_stale": 2 * PIECE + 8}


def test_plugins_are_called_for_pieces_of_usable_groups() -> None:
    """Too stale groups never reach them, so no plug-in is slow because the buffer is large."""
    trial = Trial(batch=ONE_PER_BATCH)
    trial.store_many(3 * PLUGIN_PIECE)
    trial.train(1)
    kept = 2 * PLUGIN_PIECE + 1
    fresh = np.repeat(entries({"policy_version": 1, "policy_version_max": 1}), kept)
    trial.state.store(np.arange(trial.state.stored + 1, trial.state.stored + 1 + kept), fresh)
    sizes: list[int] = []
    trial.plug(Watching(sizes))
    assert trial.evicted() == {"too_stale": 3 * PLUGIN_PIECE - 1, "odd": PLUGIN_PIECE + 1}
    assert sum(sizes) == kept and max(sizes) <= PLUGIN_PIECE


@pytest.mark.parametrize("filtered", [False, True])
def test_the_first_plugin_that_drops_a_group_gives_the_reason(filtered: bool) -> None:
    """Filters are called for all live groups only on demand."""
    trial = Trial(batch=ONE_PER_BATCH, filters=[StrategySpec("large")])
    trial.store({"tokens": 30}, {"tokens": 30}, {"tokens": 10}, {"tokens": 10})
    trial.plug(Watching([]), Large(StrategyOptions()))
    assert trial.evicted(filtered=filtered) == {"odd": 2} | ({"large": 1} if filtered else {})


def test_groups_that_no_batch_can_hold_become_dead_letters_before_any_eviction() -> None:
    trial = Trial(batch=BatchSpec(tokens_per_batch=20))
    trial.store({"tokens": 30}, {"adapter": 7}, {"policy_version_max": 5}, {})
    assert trial.evicted() == {"lost_lineage": 1}
    assert trial.state.totals.dead_lettered == {"over_budget": 1, "unknown_adapter": 1}


def test_a_paused_run_evicts_nothing() -> None:
    trial = Trial(batch=ONE_PER_BATCH)
    trial.store({"policy_version_max": 5})
    trial.apply(config_record(batch=ONE_PER_BATCH, state="paused", reason="plug-in"))
    assert trial.evicted() == {}
