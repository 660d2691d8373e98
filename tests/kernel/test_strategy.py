"""Interface of strategies: filling a budget, the staleness window, defaults, options."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import Meta

from replaybuf.errors import Invalid
from replaybuf.kernel.strategy.contract import (
    LOOK_AHEAD,
    Budget,
    BufferView,
    Evictions,
    Feedback,
    Flow,
    Groups,
    Selection,
    Strategy,
    Waiting,
    fill,
    window_capacity,
)
from replaybuf.kernel.strategy.options import StrategyOptions, check_options
from replaybuf.wire.wait_reasons import REASONS
from tests.builders import buffer_view, live_groups


class Plain(Strategy[StrategyOptions]):
    """A strategy with all defaults."""

    def select(
        self, groups: Groups, buffer: BufferView, budget: Budget, rng: np.random.Generator
    ) -> Selection | Waiting:
        return fill(groups, np.arange(len(groups)), budget)


def test_waiting_reasons_are_the_closed_list_of_the_contract_in_its_order() -> None:
    """The service reports the first reason that applies."""
    assert (
        *("finished", "paused", "awaiting_ack", "awaiting_publication", "rate_limited", "all_stale"),
        *("reuse_exhausted", "no_producers", "no_groups", "too_few_groups", "too_few_tokens"),
        "awaiting_columns",
    ) == REASONS


# ---------------------------------------------------------------------- filling a budget


BUDGETS = st.builds(
    Budget, tokens=st.none() | st.integers(1, 100), groups=st.none() | st.integers(1, 8), seq_len=st.just(64)
).filter(lambda budget: budget.tokens is not None or budget.groups is not None)


@given(st.lists(st.integers(2, 60), max_size=14), BUDGETS, st.randoms(use_true_random=False))
@example([60, 60], Budget(tokens=100, groups=None, seq_len=64), None)
def test_fill_takes_whole_groups_in_the_given_order_within_the_budget(
    tokens: list[int], budget: Budget, random: Any
) -> None:
    """It waits only if all groups that fit are fewer than a batch."""
    order = list(range(len(tokens)))
    if random is not None:
        random.shuffle(order)
    chosen = fill(live_groups(tokens, first_row=100), np.array(order, np.int64), budget)
    most = 10**18 if budget.tokens is None else budget.tokens
    if isinstance(chosen, Selection):
        places = [order.index(row - 100) for row in chosen.rows.tolist()]
        assert places == sorted(set(places)) and chosen.weights is None
        taken = sum(tokens[order[place]] for place in places)
        assert 0 < taken <= most and (budget.groups is None or len(places) <= budget.groups)
        by_groups = len(places) == budget.groups
        assert by_groups or taken == most or len(places) < len(tokens)
    else:
        assert chosen == Waiting("too_few_tokens" if budget.groups is None else "too_few_groups")
        fitting = [size for size in tokens if size <= most]
        assert budget.groups is None or len(fitting) < budget.groups
        assert not fitting or sum(tokens) < most


@given(st.lists(st.integers(2, 60), min_size=1, max_size=14), BUDGETS, st.integers(0, 3))
def test_fill_uses_at_least_as_many_tokens_as_skipping_groups_that_do_not_fit(
    tokens: list[int], budget: Budget, last: int
) -> None:
    """It always takes the first group that fits an empty batch, so that no group waits for ever."""
    chosen = fill(live_groups(tokens), np.arange(len(tokens)), budget, last_version=last)
    if isinstance(chosen, Waiting) or budget.tokens is None or budget.groups is not None:
        return
    room, plainly = budget.tokens, 0
    for size in tokens:
        if size <= room:
            room -= size
            plainly += size
    assert sum(tokens[row - 1] for row in chosen.rows.tolist()) >= plainly
    if tokens[0] <= budget.tokens:
        assert chosen.rows[0] == 1


@given(st.lists(st.integers(1, 60), min_size=1, max_size=90), BUDGETS, st.integers(0, 3))
def test_no_group_within_the_look_ahead_fits_into_a_filled_batch(tokens: list[int], budget: Budget, last: int) -> None:
    """Neither a following group nor one that was given up for a better fit."""
    chosen = fill(live_groups(tokens), np.arange(len(tokens)), budget, last_version=last)
    if isinstance(chosen, Waiting) or len(chosen.rows) == budget.groups:
        return
    assert budget.tokens is not None
    taken = {row - 1 for row in chosen.rows.tolist()}
    room = budget.tokens - sum(tokens[at] for at in taken)
    in_order = int(np.searchsorted(np.cumsum(tokens), budget.tokens, side="right"))
    first = in_order if budget.groups is None else min(in_order, budget.groups)
    assert not [size for at, size in enumerate(tokens[: first + LOOK_AHEAD]) if at not in taken and size <= room]


def test_with_both_bounds_the_last_group_is_the_one_that_fills_the_batch() -> None:
    """One more group is allowed, and several would fit into the tokens."""
    groups = live_groups([300, 300, 300, 200, 40, 60, 99, 500])
    chosen = fill(groups, np.arange(8), Budget(tokens=1000, groups=4, seq_len=512))
    assert isinstance(chosen, Selection) and chosen.rows.tolist() == [1, 2, 3, 7]


def test_with_both_bounds_a_batch_has_all_its_groups_or_99_percent_of_its_tokens() -> None:
    """Nine groups of about a ninth of the budget each, so that each bound is reached in some batches."""
    by_bound = {"groups": 0, "tokens": 0}
    for seed in range(6):
        drawn = np.random.default_rng(seed).lognormal(6.5, 0.9, (300, 8)).sum(axis=1).astype(int)
        budget = Budget(tokens=65536, groups=9, seq_len=32768)
        pool = [(number, int(size)) for number, size in enumerate(drawn) if size <= 65536]
        while sum(size for _, size in pool) >= 3 * 65536:
            chosen = fill(live_groups([size for _, size in pool], first_row=0), np.arange(len(pool)), budget)
            assert isinstance(chosen, Selection)
            taken = set(chosen.rows.tolist())
            used = sum(pool[at][1] for at in taken)
            assert used <= 65536 and len(taken) <= 9 and (len(taken) == 9 or used >= 0.99 * 65536)
            by_bound["groups" if len(taken) == 9 else "tokens"] += 1
            pool = [entry for at, entry in enumerate(pool) if at not in taken]
    assert min(by_bound.values()) > 20


@pytest.mark.parametrize("mean", [6.5, 7.2])
def test_a_large_pool_fills_99_percent_of_the_token_budget(mean: float) -> None:
    """The pool has groups for three batches; a batch has about 16 groups, or about 8."""
    for seed in range(20):
        sizes = np.random.default_rng(seed).lognormal(mean, 0.9, (400, 8)).astype(np.int64).sum(axis=1)
        budget = Budget(tokens=131072, groups=None, seq_len=32768)
        pool = [(number, int(size)) for number, size in enumerate(sizes[sizes <= 131072])]
        while sum(size for _, size in pool) >= 3 * 131072:
            groups = live_groups([size for _, size in pool], first_row=0)
            chosen = fill(groups, np.arange(len(pool)), budget)
            assert isinstance(chosen, Selection)
            taken = set(chosen.rows.tolist())
            assert 0.99 * 131072 <= sum(pool[at][1] for at in taken) <= 131072
            pool = [entry for at, entry in enumerate(pool) if at not in taken]


def test_a_given_up_group_waits_no_longer_than_the_groups_before_it_need() -> None:
    """A group of almost the whole budget fits badly with all others, but must be the first of a batch soon."""
    sizes = [30, 97, 30, 40, 33, 37, 30, 50, 50] + [25] * 40
    left, batches = list(range(len(sizes))), 0
    while 1 in left:
        chosen = fill(live_groups([sizes[at] for at in left], first_row=0), np.arange(len(left)), Budget(100, None, 64))
        assert isinstance(chosen, Selection)
        left = [at for place, at in enumerate(left) if place not in set(chosen.rows.tolist())]
        batches += 1
    assert batches == 2


def test_groups_that_would_be_too_stale_for_the_next_batch_are_not_given_up() -> None:
    """50 + 30 leaves 20 tokens unused and 50 + 50 none, but the group of 30 cannot be in a later batch."""
    budget, sizes = Budget(tokens=100, groups=None, seq_len=64), [50, 30, 50, 50]
    groups = live_groups(sizes, versions=[3, 3, 4, 4])
    for last_version, rows in ((3, [1, 3]), (4, [1, 2])):
        chosen = fill(groups, np.arange(4), budget, last_version)
        assert isinstance(chosen, Selection) and chosen.rows.tolist() == rows


def test_fill_skips_a_group_that_does_not_fit_and_takes_the_next_that_does() -> None:
    chosen = fill(live_groups([50, 60, 40, 10]), np.arange(4), Budget(tokens=100, groups=None, seq_len=64))
    assert isinstance(chosen, Selection) and chosen.rows.tolist() == [1, 3, 4]


def test_a_batch_is_full_when_it_reaches_either_bound() -> None:
    budget = Budget(tokens=100, groups=2, seq_len=64)
    few = fill(live_groups([10, 10, 10]), np.arange(3), budget)
    large = fill(live_groups([90, 20]), np.arange(2), budget)
    assert isinstance(few, Selection) and few.rows.tolist() == [1, 2]
    assert isinstance(large, Selection) and large.rows.tolist() == [1]


def test_fill_waits_if_all_groups_are_too_large() -> None:
    """An empty selection would break a rule and pause the run."""
    assert fill(live_groups([200]), np.arange(1), Budget(100, None, 64)) == Waiting("too_few_tokens")


def test_fill_takes_from_a_million_groups_without_a_loop_over_them() -> None:
    """The batch is full after a few groups; only numpy reads the others."""
    groups = live_groups([30] * 1_000_000)
    chosen = fill(groups, np.arange(len(groups)), Budget(tokens=65536, groups=None, seq_len=64))
    assert isinstance(chosen, Selection) and len(chosen.rows) == 65536 // 30


@given(st.lists(st.integers(2, 60), max_size=14), BUDGETS, st.integers(1, 5))
def test_fill_takes_the_same_groups_from_an_order_in_chunks(tokens: list[int], budget: Budget, size: int) -> None:
    """For chunks of any size."""
    groups, order = live_groups(tokens), np.arange(len(tokens))[::-1]
    whole = fill(groups, order, budget)
    chunked = fill(groups, (order[at : at + size] for at in range(0, len(order), size)), budget)
    if isinstance(whole, Selection):
        assert isinstance(chunked, Selection) and chunked.rows.tolist() == whole.rows.tolist()
    else:
        assert chunked == whole


def test_fill_reads_no_more_chunks_of_the_order_than_the_batch_needs() -> None:

    def order() -> Iterator[npt.NDArray[np.int64]]:
        yield np.array([2, 1])
        raise LookupError("read more than was needed")

    for budget in (Budget(None, 2, 64), Budget(60, None, 64)):
        chosen = fill(live_groups([30] * 9), order(), budget)
        assert isinstance(chosen, Selection) and chosen.rows.tolist() == [3, 2]


# ---------------------------------------------------------------------- the staleness window


def count_capacity(buffer: BufferView, flow: Flow, max_staleness: int | None, look_ahead: int) -> int:
    """Count the batches that a group started now can still enter, then the groups that they need."""
    if max_staleness is None:
        batches = look_ahead + 1
    else:
        newest = buffer.published_version + max_staleness
        steps = range(buffer.step, buffer.step + 200)
        batches = sum(1 for step in steps if step // buffer.steps_per_publish <= newest)
    if not batches:
        return 0
    lacking = []
    if buffer.budget.groups is not None:
        lacking.append(batches * buffer.budget.groups - buffer.groups_live)
    if buffer.budget.tokens is not None:
        more = 0
        while buffer.tokens_live + more * flow.tokens_per_group < batches * buffer.budget.tokens:
            more += 1
        lacking.append(more)
    return max(0, min(lacking) - buffer.tickets_out)


@given(
    budget=BUDGETS,
    step=st.integers(0, 12),
    published=st.integers(0, 6),
    steps_per_publish=st.integers(1, 3),
    live=st.integers(0, 20),
    tokens_live=st.integers(0, 400),
    tickets=st.integers(0, 10),
    tokens_per_group=st.integers(4, 80).map(lambda n: n / 2),
    max_staleness=st.none() | st.integers(0, 4),
    look_ahead=st.integers(0, 2),
)
def test_capacity_equals_a_count_over_the_open_batches(
    budget: Budget,
    step: int,
    published: int,
    steps_per_publish: int,
    live: int,
    tokens_live: int,
    tickets: int,
    tokens_per_group: float,
    max_staleness: int | None,
    look_ahead: int,
) -> None:
    buffer = buffer_view(
        budget=budget,
        step=step,
        version=step // steps_per_publish,
        published_version=published,
        steps_per_publish=steps_per_publish,
        groups_live=live,
        tokens_live=tokens_live,
        tickets_out=tickets,
    )
    flow = Flow(now_s=0.0, tokens_per_group=tokens_per_group)
    capacity = window_capacity(buffer, flow, max_staleness, look_ahead)
    assert capacity == count_capacity(buffer, flow, max_staleness, look_ahead)


def test_capacity_is_closed_until_a_publication_opens_the_window() -> None:
    """On-policy, step 3 is next and version 2 is published: a group generated now would be stale at once."""
    budget, flow = Budget(tokens=None, groups=4, seq_len=64), Flow(0.0, 10.0)
    view = buffer_view(step=3, version=3, published_version=2, budget=budget)
    assert window_capacity(view, flow, 0, 0) == 0
    assert window_capacity(dataclasses.replace(view, published_version=3), flow, 0, 0) == 4
    assert window_capacity(view, flow, 1, 1) == 4


def test_capacity_counts_live_groups_and_tickets() -> None:
    view = buffer_view(budget=Budget(None, 8, 64), groups_live=3, tickets_out=4)
    assert window_capacity(view, Flow(0.0, 10.0), 0, 0) == 1
    assert window_capacity(dataclasses.replace(view, tickets_out=9), Flow(0.0, 10.0), 0, 0) == 0


# ---------------------------------------------------------------------- defaults


def test_a_strategy_with_all_defaults_is_on_policy_and_uses_a_group_once() -> None:
    plain = Plain(StrategyOptions())
    assert (plain.max_staleness, plain.max_uses, plain.look_ahead) == (0, 1, 0)
    plain.observe(Feedback(0, {"loss": 1.0}))
    view, flow = buffer_view(budget=Budget(None, 8, 64)), Flow(0.0, 10.0)
    assert plain.admit(view, flow) == window_capacity(view, flow, 0, 0) == 8


def test_a_strategy_without_select_cannot_be_built() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Strategy(StrategyOptions())  # type: ignore[abstract]


def test_a_strategy_evicts_nothing_by_default_because_the_core_evicts_stale_groups() -> None:
    groups = live_groups([5, 5, 5], versions=[2, 3, 4])
    assert Plain(StrategyOptions()).evict(groups, buffer_view(version=4)) == Evictions()


def test_groups_are_taken_by_position_or_by_mask() -> None:
    groups = live_groups([5, 6, 7], versions=[0, 1, 2], first_row=10)
    assert groups.take(np.array([2, 0])).row.tolist() == [12, 10]
    assert groups.take(groups.policy_version > 0).tokens.tolist() == [6, 7]
    assert len(groups) == 3


# ---------------------------------------------------------------------- options


class Options(StrategyOptions, frozen=True):
    """Two options with defaults, one without."""

    order: str
    max_staleness: Annotated[int, Meta(ge=0)] = 1
    cooldown: int = 0


def test_absent_options_get_their_defaults() -> None:
    assert check_options("x", {"order": "fifo"}, Options) == Options(order="fifo", max_staleness=1)


@pytest.mark.parametrize("value", [math.nan, math.inf, [1.0, -math.inf], {"a": {"b": math.nan}}], ids=str)
def test_nan_and_infinity_are_rejected_anywhere_in_an_option(value: Any) -> None:
    """For every type of option, so a plug-in need not check its numbers itself."""
    with pytest.raises(Invalid, match=r"cooldown is .*(NaN|Infinity).*; needed: finite numbers") as caught:
        check_options("mine", {"order": "fifo", "cooldown": value}, Options)
    assert caught.value.name == "strategy.options.cooldown"


def test_the_error_of_an_unknown_option_reports_that_there_are_no_options() -> None:
    with pytest.raises(Invalid, match="valid options: none"):
        check_options("mine", {"k": 1}, StrategyOptions)


def test_options_are_immutable() -> None:
    with pytest.raises(AttributeError, match="immutable"):
        Options(order="fifo").cooldown = 3  # type: ignore[misc]
