"""The strategy `replay`: bounds, orders, rules of a batch, rate, admission, waiting reasons."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.errors import Invalid
from replaybuf.kernel.strategy.plugin_set import build_strategy
from replaybuf.strategy import Budget, BufferView, Flow, Groups, Selection, Strategy, Waiting, source_hash
from replaybuf.testing import ClosedLoop
from replaybuf_strategies import draws, mixture
from replaybuf_strategies.draws import Propensity, ascending, drawn
from replaybuf_strategies.fresh import with_fresh
from replaybuf_strategies.mixture import Mix, interleave
from replaybuf_strategies.prompts import by_prompt, limit_prompts
from replaybuf_strategies.reuse import Limiter
from tests.builders import buffer_view, live_groups

BATCH_OF_4 = Budget(None, 4, 64)
A, B, C = (source_hash(name) for name in "abc")
FALSE_ALARM = 1e-6
"""Chance that a statistical test fails although the distribution is right; seeds are fixed, so it was met once."""


def replay(**options: Any) -> Strategy[Any]:
    """Build the strategy."""
    return build_strategy("replay", options)


def shown(count: int, **columns: Any) -> Groups:
    """Build groups of 10 tokens with these columns."""
    plain = live_groups([10] * count)
    made = {name: np.array(getattr(plain, name)) for name in Groups.COLUMNS}
    for name, values in columns.items():
        made[name] = np.broadcast_to(np.asarray(values, Groups.DTYPES[name]), count).copy()
    return Groups(**made)


def view_of(groups: Groups, **fields: Any) -> BufferView:
    """Describe a buffer of these groups at step 10, with batches of 4 groups."""
    uses = int(groups.times_sampled.sum())
    known: dict[str, Any] = {
        "step": 10,
        "version": 10,
        "published_version": 10,
        "groups_live": len(groups),
        "tokens_live": int(groups.tokens.sum(dtype=np.int64)),
        "groups_stored": len(groups),
        "groups_used": uses,
        "groups_fresh": int((groups.times_sampled == 0).sum()),
        "uses_live": uses,
        "budget": BATCH_OF_4,
    }
    return buffer_view(**known | fields)


def select(strategy: Strategy[Any], groups: Groups, seed: int = 0, **fields: Any) -> list[int] | str:
    """Ask for a batch: the rows in order, or the reason for waiting."""
    view = view_of(groups, **fields)
    chosen = strategy.select(groups, view, view.budget, np.random.default_rng(seed))
    return chosen.reason if isinstance(chosen, Waiting) else chosen.rows.tolist()


# ---------------------------------------------------------------------- options


def test_the_defaults_are_four_uses_within_four_versions() -> None:
    strategy = replay()
    assert (strategy.max_uses, strategy.max_staleness, strategy.look_ahead) == (4, 4, 1)
    assert (strategy.options.order, strategy.options.mix) == ("uniform", {})


@pytest.mark.parametrize(
    ("options", "name", "bound"),
    [
        ({"max_uses": None, "max_staleness": None}, "max_uses", "a number where max_staleness is null"),
        ({"max_uses": 1, "cooldown": 2}, "cooldown", "0"),
        ({"importance": 0.5}, "importance", "0"),
        ({"order": "fifo", "exponent": 2.0}, "exponent", "0.6"),
        ({"priority": "reward_std"}, "priority", '"advantage"'),
        ({"groups_per_prompt": 2, "prompts_together": True}, "groups_per_prompt", "null"),
        ({"fresh_fraction": 0.5, "prompts_together": True}, "fresh_fraction", "unset where prompts_together is true"),
        ({"mix": {"a": 0.5}, "prompts_together": True}, "mix", "unset where prompts_together is true"),
        ({"order": "blocks", "max_uses": None}, "max_uses", "a number where order is blocks"),
        ({"order": "blocks", "cooldown": 1}, "cooldown", "0"),
        ({"order": "blocks", "fresh_fraction": 0.5}, "fresh_fraction", "0.0"),
        ({"order": "blocks", "prompts_together": True}, "prompts_together", "false"),
        ({"order": "blocks", "mix": {"a": 0.5}}, "mix", "{}"),
        ({"order": "blocks", "exponent": 2.0}, "exponent", "0.6"),
        ({"error_buffer": 10}, "error_buffer", "null"),
        ({"samples_per_insert": 4.5}, "samples_per_insert", "at most 4"),
        ({"samples_per_insert": 3, "fresh_fraction": 0.5}, "samples_per_insert", "at most 2"),
        ({"samples_per_insert": 3, "error_buffer": 1.9}, "error_buffer", "at least 2"),
        ({"mix": {"a": 0.7, "b": 0.4}}, "mix", "shares that sum to at most 1"),
    ],
)
def test_contradicting_options_are_rejected(options: dict[str, Any], name: str, bound: str) -> None:
    """The error has the option, its value and its bound."""
    with pytest.raises(Invalid) as caught:
        replay(**options)
    error = caught.value
    assert (error.name, error.bound) == (f"strategy.options.{name}", bound)
    assert json.dumps(error.value) in error.detail and error.detail.endswith(bound) and name in error.detail


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("max_uses", 0, "max_uses: int >= 1 or null (default 4)"),
        ("order", "random", "order: blocks | fifo | least_slack | newest | prioritized | uniform"),
        ("exponent", -0.1, "exponent: number >= 0 and <= 4 (default 0.6)"),
        ("fresh_fraction", 1.1, "fresh_fraction: number >= 0 and <= 1"),
        ("samples_per_insert", 0, "samples_per_insert: number > 0 or null"),
        ("mix", {"a": 0}, "mix: {text: number > 0 and <= 1} (default {})"),
        ("cooldowns", 1, "cooldown: int >= 0 (default 0)"),
    ],
)
def test_an_option_out_of_range_is_an_error_with_the_ranges(option: str, value: Any, message: str) -> None:
    with pytest.raises(Invalid) as caught:
        replay(**{option: value})
    assert message in caught.value.detail


@pytest.mark.parametrize(
    ("options", "budget", "tokens_live", "name"),
    [
        ({"max_staleness": 1, "cooldown": 2, "max_uses": 2}, BATCH_OF_4, None, "cooldown"),
        ({"max_staleness": 1, "samples_per_insert": 3}, BATCH_OF_4, None, "samples_per_insert"),
        ({"samples_per_insert": 2, "error_buffer": 2.9}, BATCH_OF_4, None, "error_buffer"),
        ({"fresh_fraction": 0.5}, Budget(100, None, 64), 599, "fresh_fraction"),
        ({"fresh_fraction": 0.5, "max_staleness": None}, Budget(100, None, 64), 499, "fresh_fraction"),
        ({"fresh_fraction": 0.5}, Budget(None, 64, 64), 6 * 128 - 1, "fresh_fraction"),
    ],
)
def test_a_run_that_would_wait_for_ever_is_rejected(
    options: dict[str, Any], budget: Budget, tokens_live: int | None, name: str
) -> None:
    """Contradictions with the run's batch, publications and limits; a slightly larger bound is accepted."""
    with pytest.raises(Invalid) as caught:
        replay(**options).check(budget, 1, tokens_live)
    assert caught.value.name == f"strategy.options.{name}"
    replay(**options | {"error_buffer": 3.0} if "error_buffer" in options else options).check(
        budget, 2 if name != "fresh_fraction" else 1, None
    )


def test_waiting_reports_the_usable_groups() -> None:
    """Rested groups, a prefix that keeps the rules, or the uses left by the rate."""

    def waiting(groups: Groups, strategy: Strategy[Any], **fields: Any) -> Waiting:
        view = view_of(groups, **fields)
        selection = strategy.select(groups, view, view.budget, np.random.default_rng(0))
        assert isinstance(selection, Waiting)
        return selection

    resting = shown(5, last_step=[9, 9, 9, 5, 5], times_sampled=1, tokens=3)
    assert waiting(resting, replay(cooldown=2)) == Waiting("reuse_exhausted", 2, 6)
    used = shown(5, last_step=[5, 5, 5, 5, -1], times_sampled=[1, 1, 1, 1, 0], tokens=3)
    assert waiting(used, replay(fresh_fraction=0.5)) == Waiting("reuse_exhausted", 2, 6)
    of_two = shown(5, prompt_index=[0, 0, 0, 1, 1], tokens=3)
    assert waiting(of_two, replay(groups_per_prompt=1)) == Waiting("too_few_groups", 2, 6)
    ahead = shown(5, tokens=3)
    rated = replay(samples_per_insert=2, error_buffer=4)
    assert waiting(ahead, rated, groups_stored=10, groups_used=21) == Waiting("rate_limited", 3, 9)


# ---------------------------------------------------------------------- orders


def test_a_used_group_rejoins_the_fifo_queue() -> None:
    groups = shown(6, last_step=[9, -1, 8, -1, 9, 8], times_sampled=[1, 0, 1, 0, 1, 1])
    assert select(replay(order="fifo"), groups) == [2, 4, 3, 6]


def test_the_fifo_queue_is_ordered_by_policy_version() -> None:
    """A slow group comes before groups that started later: otherwise it would become too stale."""
    groups = shown(6, policy_version=[5, 5, 3, 4, 3, 5], last_step=[-1, -1, 9, -1, -1, -1])
    assert select(replay(order="fifo"), groups) == [5, 4, 1, 2]


@given(st.lists(st.tuples(st.integers(-1, 12), st.integers(0, 12)), max_size=60))
def test_ascending_is_a_stable_sort_by_columns(rows: list[tuple[int, int]]) -> None:
    """Also with more pairs of values than `_PASSES`."""
    columns = [np.array(column, np.int32) for column in zip(*rows, strict=True)] or [np.empty(0, np.int32)] * 2
    whole = np.concatenate([*ascending(*columns), np.empty(0, np.int64)]).tolist()
    assert whole == sorted(range(len(rows)), key=lambda at: rows[at])
    order = np.concatenate([*ascending(columns[0]), np.empty(0, np.int64)]).tolist()
    assert order == sorted(range(len(rows)), key=lambda at: rows[at][0])


def test_newest_takes_the_last_stored_groups() -> None:
    assert select(replay(order="newest"), shown(9000)) == [9000, 8999, 8998, 8997]


ARRIVALS = st.lists(st.lists(st.tuples(st.integers(2, 60), st.integers(-1, 6)), max_size=8), max_size=8)
"""Tokens and prompt of the groups that arrive before each batch."""


def trained_in_blocks(
    arrivals: list[list[tuple[int, int]]], uses: int, budget: Budget, **options: Any
) -> list[list[int]]:
    """Take a batch after each arrival, then batches until none can be made."""
    strategy = replay(order="blocks", max_uses=uses, max_staleness=None, **options)
    stored: list[tuple[int, int]] = []
    used: Counter[int] = Counter()
    batches: list[list[int]] = []
    coming = iter(arrivals)
    while True:
        arrived = next(coming, None)
        stored += arrived or []
        tokens, prompts = zip(*stored, strict=True) if stored else ((), ())
        times = [used[row] for row in range(1, len(stored) + 1)]
        groups = shown(len(stored), tokens=tokens, prompt_index=prompts, times_sampled=times)
        chosen = select(strategy, groups.take(groups.times_sampled < uses), budget=budget)
        if isinstance(chosen, list):
            used.update(chosen)
            batches.append(chosen)
        elif arrived is None:
            return batches


@given(ARRIVALS, st.integers(1, 4), st.sampled_from([Budget(100, None, 64), Budget(None, 3, 64), Budget(100, 3, 64)]))
def test_blocks_repeat_each_batch_before_the_next_in_order_of_arrival(
    arrivals: list[list[tuple[int, int]]], uses: int, budget: Budget
) -> None:
    """a a b b, for any sizes and arrivals in between; all batches together are the groups as they arrived."""
    batches = trained_in_blocks(arrivals, uses, budget)
    blocks = batches[::uses]
    assert batches == [block for block in blocks for _ in range(uses)]
    trained = [row for block in blocks for row in block]
    assert trained == list(range(1, len(trained) + 1))


@given(ARRIVALS, st.integers(2, 3))
def test_blocks_with_few_groups_of_a_prompt_repeat_too(arrivals: list[list[tuple[int, int]]], uses: int) -> None:
    """A group whose prompt has its share starts with a later block, and does not change the block that repeats."""
    batches = trained_in_blocks(arrivals, uses, Budget(None, 3, 64), groups_per_prompt=1)
    assert batches == [block for block in batches[::uses] for _ in range(uses)]


def test_a_group_that_becomes_usable_late_starts_with_the_next_block() -> None:
    """It arrived before the block that is in use, and waited for its columns."""
    groups = shown(8, times_sampled=[0, 1, 1, 1, 1, 0, 0, 0])
    blocks = replay(order="blocks", max_uses=2)
    assert select(blocks, groups) == [2, 3, 4, 5]
    later = groups.take(np.array([0, 5, 6, 7]))
    assert select(blocks, later) == [1, 6, 7, 8]


def test_random_orders_depend_on_the_generator_only() -> None:
    groups = shown(5000, advantage_abs_mean=np.arange(5000))
    for order in ("uniform", "prioritized"):
        first = select(replay(order=order), groups, seed=1)
        assert first == select(replay(order=order), groups, seed=1) != select(replay(order=order), groups, seed=2)


def chi_square_bound(freedom: int) -> float:
    """Return the quantile 1 - FALSE_ALARM of chi-square (Wilson & Hilferty 1931; within 1 % here)."""
    z = 4.7534  # quantile of the normal distribution
    return freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3


def chi_square(seen: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    """Sum (seen - expected) ** 2 / expected."""
    assert expected.min() >= 5
    return float(((seen - expected) ** 2 / expected).sum())


def all_usable(groups: Groups) -> npt.NDArray[np.bool_]:
    """Allow every group."""
    return np.ones(len(groups), bool)


def some(groups: Groups) -> npt.NDArray[np.bool_]:
    """Allow two thirds of the groups."""
    return np.asarray(groups.row % 3 != 0)


@pytest.fixture(params=["by rejection", "by keys"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Draw in one of the two ways."""
    if request.param == "by keys":
        monkeypatch.setattr(draws, "_FEW", 10**9)
    return str(request.param)


CLASSES = 4


def class_sequences(groups: Groups, may: Callable[[Groups], Any], propensity: Propensity | None) -> Counter[Any]:
    """Draw two groups 6,000 times; count their classes (position modulo 4)."""
    draws: Counter[Any] = Counter()
    for seed in range(6000):
        first = next(iter(drawn(groups, may, propensity, np.random.default_rng(seed), 2)))[:2]
        draws[tuple((first % CLASSES).tolist())] += 1
    return draws


@pytest.mark.parametrize("may", [all_usable, some])
@pytest.mark.parametrize("exponent", [None, 0.0, 1.0, 2.0])
@pytest.mark.usefixtures("path")
def test_groups_are_drawn_in_proportion_to_their_priority(may: Callable[[Groups], Any], exponent: float | None) -> None:
    """The first two, by class, against sequential sampling without replacement; both ways of drawing.

    False-alarm rate 1e-6 per case (chi-square, 15 degrees of freedom, 6,000 draws).
    """
    count = 4400
    groups = shown(count, advantage_abs_mean=1.0 + np.arange(count) % CLASSES)
    propensity = None if exponent is None else Propensity("advantage_abs_mean", exponent)
    seen = class_sequences(groups, may, propensity)
    weights = (1.0 + np.arange(CLASSES)) ** (exponent or 0.0)
    mass = weights * np.bincount(np.flatnonzero(may(groups)) % CLASSES, minlength=CLASSES)
    expected, counted = [], []
    for a in range(CLASSES):
        for b in range(CLASSES):
            left = mass[b] - (weights[b] if a == b else 0.0)
            expected.append(6000 * mass[a] / mass.sum() * left / (mass.sum() - weights[a]))
            counted.append(seen[a, b])
    assert chi_square(np.array(counted), np.array(expected)) < chi_square_bound(CLASSES**2 - 1)


def test_groups_of_a_source_are_drawn_in_proportion_to_their_priority() -> None:
    """A mix, a share of fresh groups and priorities at once: the first place of source a, by the group's class.

    False-alarm rate 1e-6 (chi-square, 3 degrees of freedom, 3,000 batches); seeds are fixed.
    """
    count = 400
    classes = 1.0 + np.arange(count) % CLASSES
    sources = np.where(np.arange(count) // CLASSES % 2, A, B)
    groups = shown(count, advantage_abs_mean=classes, source=sources)
    strategy = replay(order="prioritized", exponent=2.0, mix={"a": 0.5, "b": 0.5}, fresh_fraction=0.5)
    seen = np.zeros(CLASSES)
    for seed in range(3000):
        chosen = np.array(select(strategy, groups, seed)) - 1
        of_a = chosen[sources[chosen] == A]
        assert len(of_a) == 2
        seen[of_a[0] % CLASSES] += 1
    expected = 3000 * (1.0 + np.arange(CLASSES)) ** 2 / ((1.0 + np.arange(CLASSES)) ** 2).sum()
    assert chi_square(seen, expected) < chi_square_bound(CLASSES - 1)


def test_uniform_draws_every_group_equally_often() -> None:
    """Over whole batches, for any age and reward: 60 groups, batches of 4.

    Counts of groups drawn without replacement vary less than chi-square tells, so the rate of false alarms is below
    1e-6 (59 degrees of freedom).
    """
    count, each = 60, 40
    groups = shown(count, policy_version=np.arange(count) % 7, reward_mean=np.arange(count) / count)
    strategy, batches = replay(order="uniform"), count * each // 4
    drawn_rows = [row for seed in range(batches) for row in select(strategy, groups, seed) if isinstance(row, int)]
    seen = np.bincount(np.array(drawn_rows) - 1, minlength=count)
    assert chi_square(seen, np.full(count, float(each))) < chi_square_bound(count - 1)


def test_both_ways_of_drawing_have_the_same_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """400 of 5,000 groups, 8 of them 60 times as likely: how many of these are drawn, by rejection and by keys.

    Without replacement that is far from proportional. False-alarm rate 1e-6 (two samples of 1,500, chi-square).
    """
    heavy = 8
    groups = shown(5000, reward_std=np.where(np.arange(5000) < heavy, 60.0, 1.0))
    propensity = Propensity("reward_std", 1.0)
    counts = []
    for few in (draws._FEW, 10**9):
        monkeypatch.setattr(draws, "_FEW", few)
        numbers = []
        for seed in range(1500):
            positions: list[int] = []
            for piece in drawn(groups, all_usable, propensity, np.random.default_rng([few, seed]), 400):
                positions += piece.tolist()
                if len(positions) >= 400:
                    break
            numbers.append(sum(position < heavy for position in positions[:400]))
        counts.append(np.bincount(np.maximum(numbers, 5), minlength=heavy + 1)[5:])
    rejection, keys = counts
    both = rejection + keys
    expected = np.maximum(both / 2, 1e-9)
    kept = expected >= 5
    value = float((((rejection - expected) ** 2 + (keys - expected) ** 2) / expected)[kept].sum())
    assert value < chi_square_bound(int(kept.sum()) - 1)


@pytest.mark.parametrize("propensity", [None, Propensity("reward_std", 1.0)])
@pytest.mark.parametrize("may", [all_usable, some])
def test_drawing_everything_returns_each_group_once(
    may: Callable[[Groups], Any], propensity: Propensity | None
) -> None:
    """Only allowed groups; the change from rejection to keys neither loses nor repeats one."""
    groups = shown(5000, reward_std=np.arange(5000) % 7)
    pieces = list(drawn(groups, may, propensity, np.random.default_rng(0), 100))
    assert len(pieces) > 3
    assert sorted(np.concatenate(pieces).tolist()) == np.flatnonzero(may(groups)).tolist()


def test_nan_counts_as_priority_0_and_infinity_as_the_largest() -> None:
    """Any learner feedback works: the infinite priority comes first."""
    values = np.array([0.0, np.nan, -3.0, np.inf, 1.0, 0.0])
    strategy = replay(order="prioritized", priority="feedback", exponent=1, importance=1)
    assert set(select(strategy, shown(6, priority=values), budget=Budget(None, 2, 64))[:2]) == {4, 5}
    zero = {row for seed in range(40) for row in select(strategy, shown(6), seed)}
    assert zero == {1, 2, 3, 4, 5, 6}


def test_weights_correct_for_the_priority_and_the_largest_is_1() -> None:
    """w_i = (p_min / p_i) ** beta: N and the sum of all p cancel against the largest weight of the batch."""
    groups = shown(4, advantage_abs_mean=[1, 2, 4, 8])
    view = view_of(groups)
    strategy = replay(order="prioritized", exponent=1.0, importance=0.5)
    chosen = strategy.select(groups, view, view.budget, np.random.default_rng(0))
    assert isinstance(chosen, Selection) and chosen.weights is not None
    weights = dict(zip(chosen.rows.tolist(), chosen.weights.tolist(), strict=True))
    assert [weights[row] for row in (1, 2, 3, 4)] == pytest.approx([1, 0.5**0.5, 0.5, 8**-0.5], rel=1e-5)
    plain = replay(order="prioritized").select(groups, view, view.budget, np.random.default_rng(0))
    assert isinstance(plain, Selection) and plain.weights is None


# ---------------------------------------------------------------------- rules of a batch


@given(
    st.lists(st.integers(2, 60), max_size=14),
    st.sampled_from(["uniform", "fifo", "newest", "prioritized"]),
    st.integers(0, 9),
)
def test_a_batch_is_the_longest_prefix_that_fits_but_its_last_groups(tokens: list[int], order: str, seed: int) -> None:
    """At most three groups of that prefix are exchanged, never the first, and for more tokens."""
    groups = shown(len(tokens), tokens=tokens)
    chosen = select(replay(order=order), groups, seed, budget=Budget(50, None, 64))
    whole = select(replay(order=order), groups, seed, budget=Budget(None, max(1, len(tokens)), 64)) if tokens else []
    usable = [row for row in whole if tokens[row - 1] <= 50] if isinstance(whole, list) else []
    if sum(tokens[row - 1] for row in usable) < 50:
        assert chosen == "too_few_tokens"
        return
    assert isinstance(chosen, list)
    assert 0 < sum(tokens[row - 1] for row in chosen) <= 50
    if order in ("fifo", "newest"):
        sums = np.cumsum([tokens[row - 1] for row in usable])
        longest = int(np.searchsorted(sums, 50, side="right"))
        kept = usable[: max(1, longest - 3)]
        assert chosen[: len(kept)] == kept and chosen == [row for row in usable if row in chosen]
        assert sum(tokens[row - 1] for row in chosen) >= sums[longest - 1]


def test_a_group_rests_after_a_use() -> None:
    """cooldown 2: used at step 7 it may serve step 10, used at step 8 it may not."""
    groups = shown(5, times_sampled=[1, 1, 1, 0, 0], last_step=[7, 8, 9, -1, -1])
    assert select(replay(order="fifo", cooldown=2), groups, budget=Budget(None, 3, 64)) == [4, 5, 1]
    assert select(replay(order="fifo", cooldown=2), groups) == "reuse_exhausted"
    assert select(replay(order="fifo", cooldown=2), groups, step=11) == [4, 5, 1, 2]


@pytest.mark.parametrize("order", ["uniform", "newest", "prioritized", "fifo"])
@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.75, 1.0])
def test_every_batch_has_its_share_of_fresh_groups(order: str, fraction: float) -> None:
    """If fresh groups are scarce they come first; if there are too few, the batch waits."""
    used = np.arange(40) >= 3
    groups = shown(40, times_sampled=used, last_step=np.where(used, 3, -1))
    chosen = select(replay(order=order, fresh_fraction=fraction), groups)
    if fraction > 0.75:
        assert chosen == "reuse_exhausted"
    else:
        assert sum(row <= 3 for row in chosen if isinstance(row, int)) >= fraction * 4


def test_groups_per_prompt_limits_a_batch() -> None:
    """Groups without a prompt index are counted as prompts of their own."""
    groups = shown(8, prompt_index=[7, 7, 7, 8, 8, -1, -1, -1])
    assert select(replay(order="fifo", groups_per_prompt=1), groups) == [1, 4, 6, 7]
    assert select(replay(order="fifo", groups_per_prompt=2), groups) == [1, 2, 4, 5]
    assert select(replay(groups_per_prompt=1), shown(8, prompt_index=[7] * 8)) == "too_few_groups"


def test_prompts_together_keeps_groups_of_a_prompt_in_one_batch() -> None:
    """A prompt that does not fit is skipped; one larger than a batch comes alone."""
    groups = shown(9, prompt_index=[7, 8, 7, 9, 9, 8, 7, 6, -1])
    together = replay(order="fifo", prompts_together=True)
    assert select(together, groups) == [1, 3, 7, 8]
    assert select(together, groups, budget=Budget(None, 5, 64)) == [1, 3, 7, 2, 6]
    assert select(together, shown(9, prompt_index=[7] * 9)) == [1, 2, 3, 4]
    assert select(together, shown(3, prompt_index=[7, 7, 5])) == "too_few_groups"


@given(st.data())
def test_prompts_come_in_the_order_of_their_first_group(data: st.DataObject) -> None:
    """Against lists: pieces of any size, groups that may not be used, groups without a prompt, one that comes alone."""
    count = data.draw(st.integers(1, 40))
    prompts = data.draw(st.lists(st.integers(-1, 9), min_size=count, max_size=count))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    may_use = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    order = [at for at in data.draw(st.permutations(range(count))) if may_use[at]]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(order)), max_size=4)))
    pieces = [np.array(order[a:b], np.int64) for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    most, room = data.draw(st.none() | st.integers(1, 12)), data.draw(st.none() | st.integers(1, 40))
    groups = shown(count, prompt_index=prompts, tokens=sizes)
    budget = Budget(room, most, 64)
    with mock.patch("replaybuf_strategies.prompts._FIRST_PIECE", 2):
        selection = by_prompt(groups, lambda some: may_use[some.row - 1], iter(pieces), budget)

    together: dict[int, list[int]] = {}
    for at in order:
        together.setdefault(prompts[at] if prompts[at] >= 0 else -1 - at, []).append(at)

    def fits(held: list[int]) -> bool:
        return (most is None or len(held) <= most) and (room is None or sum(sizes[at] for at in held) <= room)

    chosen: list[int] = []
    for members in together.values():
        if fits(chosen + members):
            chosen += sorted(members)
        elif not fits(members) and not chosen:
            chosen = next(members[:n] for n in range(len(members), -1, -1) if fits(members[:n]))
            break
    assert selection.positions.tolist() == chosen


# ---------------------------------------------------------------------- token budget


@pytest.mark.parametrize("options", [{}, {"groups_per_prompt": 1}, {"cooldown": 2}, {"samples_per_insert": 2.0}])
@pytest.mark.parametrize("order", ["uniform", "fifo", "newest", "prioritized"])
def test_following_groups_fill_a_token_budget(order: str, options: dict[str, Any]) -> None:
    """A batch that stopped at the first group that did not fit left half a group unused: 4 % of 16 groups."""
    sizes = np.random.default_rng(0).integers(20, 200, 400)
    groups = shown(400, tokens=sizes, prompt_index=np.arange(400) // 4)
    for seed in range(8):
        chosen = select(replay(order=order, **options), groups, seed, budget=Budget(1600, None, 256))
        assert isinstance(chosen, list) and len(set(chosen)) == len(chosen)
        assert 0.99 * 1600 <= sum(sizes[row - 1] for row in chosen) <= 1600
        if "groups_per_prompt" in options:
            assert len({(row - 1) // 4 for row in chosen}) == len(chosen)


def test_a_group_that_would_become_too_stale_is_not_given_up() -> None:
    """The last group of a batch makes place for a better one only if the next batch can still use it."""
    groups = shown(4, tokens=[60, 30, 50, 40], policy_version=[9, 9, 10, 10])
    budget = Budget(100, None, 64)
    assert select(replay(order="fifo", max_staleness=4), groups, budget=budget) == [1, 4]
    assert select(replay(order="fifo", max_staleness=1), groups, budget=budget) == [1, 2]


@pytest.mark.parametrize("rule", [{"fresh_fraction": 0.5}, {"mix": {"a": 0.5}}])
def test_rules_on_shares_keep_their_order(rule: dict[str, Any]) -> None:
    """A group out of its turn would change the shares of sources or of fresh groups."""
    groups = shown(4, tokens=[60, 30, 50, 40])
    assert select(replay(order="fifo", **rule), groups, budget=Budget(100, None, 64)) == [1, 2]


# ---------------------------------------------------------------------- mixing sources


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=8), st.integers(1, 300))
def test_every_prefix_has_each_share_within_one_group(shares: list[float], places: int) -> None:
    """|x_i - s_i * t| < 1 after every place t, for any shares (Tijdeman 1980)."""
    mix, counts, total = Mix(shares), Counter[int](), sum(shares)
    for place in range(1, places + 1):
        lane = mix.order()[0]
        mix.count(lane)
        counts[lane] += 1
        for number, share in enumerate(shares):
            assert abs(counts[number] - share / total * place) < 1 + 1e-6


@pytest.mark.parametrize("budget", [Budget(None, 64, 64), Budget(645, None, 64)])
@pytest.mark.parametrize("order", ["uniform", "fifo", "prioritized"])
def test_sources_get_their_shares_within_one_group(budget: Budget, order: str) -> None:
    """For any order of storing, in groups or in tokens; other sources get the rest."""
    sources = np.random.default_rng(0).choice([A, B, C, 0], 1000, p=[0.6, 0.2, 0.1, 0.1])
    chosen = select(replay(order=order, mix={"a": 0.25, "b": 0.5}), shown(1000, source=sources), budget=budget)
    assert len(chosen) == 64
    counts = Counter(sources[row - 1] for row in chosen if isinstance(row, int))
    assert abs(counts[A] - 16) < 1 and abs(counts[B] - 32) < 1


def test_a_short_source_gives_its_places_to_the_others() -> None:
    """Waiting for it might never end: no ticket is issued while others fill the window."""
    sources = np.array([A] * 20 + [B] * 1 + [C] * 20)
    chosen = select(
        replay(mix={"a": 0.25, "b": 0.5, "c": 0.25}), shown(41, source=sources), budget=Budget(None, 17, 64)
    )
    counts = Counter(sources[row - 1] for row in chosen if isinstance(row, int))
    assert counts[B] == 1 and abs(counts[A] - counts[C]) <= 2


def test_groups_of_other_sources_are_evicted_if_the_shares_sum_to_1() -> None:
    groups = shown(3, source=[A, C, B])
    evicted = replay(mix={"a": 0.5, "b": 0.5}).evict(groups, view_of(groups))
    assert (evicted.rows, evicted.reasons) == ([2], ["not_in_mix"])
    assert not len(replay(mix={"a": 0.5}).evict(groups, view_of(groups)).rows)


@given(st.data())
def test_sources_are_merged_as_place_after_place(data: st.DataObject) -> None:
    """Against `Mix` and lists, with sources that end and pieces of any size; pieces are read in the order of need."""
    shares = data.draw(st.lists(st.floats(0.05, 1), min_size=1, max_size=5))
    sizes = data.draw(st.lists(st.integers(0, 60), min_size=len(shares), max_size=len(shares)))
    length = data.draw(st.integers(1, 70))
    queues = [[100 * source + n for n in range(size)] for source, size in enumerate(sizes)]
    reads: list[tuple[int, int]] = []

    def opened(source: int) -> Iterator[npt.NDArray[np.int64]]:
        for start in range(0, sizes[source], length):
            reads.append((source, start))
            yield np.array(queues[source][start : start + length], np.int64)

    with mock.patch.object(mixture, "_FIRST_BLOCK", 8):
        merged = [at for piece in interleave(opened, shares) for at in piece.tolist()]

    mix = Mix(shares)
    expected: list[int] = []
    needed: list[tuple[int, int]] = []
    places = Counter[int]()
    while len(expected) < sum(sizes):
        for source in mix.order():
            if places[source] < sizes[source]:
                if places[source] % length == 0:
                    needed.append((source, places[source]))
                expected.append(queues[source][places[source]])
                places[source] += 1
                mix.count(source)
                break
            mix.remove(source)
    assert (merged, reads) == (expected, needed)


@given(st.data())
def test_fresh_groups_come_no_earlier_than_their_share_needs(data: st.DataObject) -> None:
    """Against a batch made place after place: the next fresh group where the share needs one, else the next group."""
    count = data.draw(st.integers(1, 40))
    is_fresh = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    fraction = data.draw(st.sampled_from([0.1, 0.25, 1 / 3, 0.5, 0.9, 1.0]))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    budget = Budget(data.draw(st.none() | st.integers(1, 60)), data.draw(st.none() | st.integers(1, 30)), 64)
    order = data.draw(st.permutations(range(count)))
    length = data.draw(st.integers(1, 50))
    groups = shown(count, times_sampled=[not fresh for fresh in is_fresh], tokens=sizes)

    def opened(fresh: bool) -> Iterator[npt.NDArray[np.int64]]:
        usable = [at for at in order if is_fresh[at] or not fresh]
        return (np.array(usable[at : at + length], np.int64) for at in range(0, len(usable), length))

    selection = with_fresh(groups, opened, budget, fraction)

    left, full, lacks = list(order), False, False
    chosen: list[int] = []
    while not full and (left or budget.groups is None or len(chosen) < budget.groups):
        need = math.ceil(fraction * (len(chosen) + 1) - 1e-9)
        needs_fresh = sum(is_fresh[at] for at in chosen) < need
        following = next((at for at in left if is_fresh[at] or not needs_fresh), None)
        if following is None:
            lacks = needs_fresh
            break
        if budget.tokens is not None and sum(sizes[at] for at in [*chosen, following]) > budget.tokens:
            full = True
            break
        chosen.append(following)
        left.remove(following)
        full = len(chosen) == budget.groups or sum(sizes[at] for at in chosen) == budget.tokens
    assert selection.positions.tolist() == chosen
    assert selection.full == (full and bool(chosen)) and (
        selection.full or not chosen or selection.lacks_fresh == lacks
    )


@given(st.data())
def test_groups_after_the_first_of_their_prompt_are_left_out(data: st.DataObject) -> None:
    """Against a counter, in pieces of any size; groups without a prompt are not limited."""
    prompts = data.draw(st.lists(st.integers(-1, 5), min_size=1, max_size=40))
    most, length = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 50))
    order = data.draw(st.permutations(range(len(prompts))))
    pieces = (np.array(order[at : at + length], np.int64) for at in range(0, len(order), length))
    limited = np.concatenate(list(limit_prompts(shown(len(prompts), prompt_index=prompts), pieces, most)))
    seen = Counter[int]()
    expected: list[int] = []
    for at in order:
        if prompts[at] < 0 or seen[prompts[at]] < most:
            expected.append(at)
            seen[prompts[at]] += 1
    assert limited.tolist() == expected


@pytest.mark.parametrize("order", ["uniform", "fifo", "newest", "prioritized"])
@pytest.mark.parametrize(
    "rule",
    [{"fresh_fraction": 0.5}, {"groups_per_prompt": 2}, {"prompts_together": True}, {"mix": {"a": 0.3, "b": 0.3}}],
)
def test_the_calls_of_a_selection_do_not_grow_with_the_batch(order: str, rule: dict[str, Any]) -> None:
    """A call per group made batches of 100,000 groups hold the event loop for 160 to 375 ms."""
    rng = np.random.default_rng(0)
    groups = shown(
        50_000,
        prompt_index=rng.integers(0, 25_000, 50_000),
        source=rng.choice([A, B, C], 50_000),
        times_sampled=rng.random(50_000) < 0.4,
    )
    strategy, calls = replay(order=order, **rule), 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    def selected(size: int) -> int:
        nonlocal calls
        calls = 0
        sys.setprofile(count)
        try:
            chosen = select(strategy, groups, budget=Budget(None, size, 64))
        finally:
            sys.setprofile(None)
        assert len(chosen) == size
        return calls

    selected(16_000)  # turns of a mix are kept from here on
    assert selected(16_000) < selected(2_000) + 4_000


# ---------------------------------------------------------------------- slack


@given(st.data())
def test_least_slack_first_gives_every_group_all_its_uses_if_any_order_does(data: st.DataObject) -> None:
    """The groups come from a plan that uses each of them in time, so there is such an order."""
    batch, per_version = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 2))
    plan = data.draw(st.lists(st.sets(st.integers(0, 11), max_size=batch), min_size=1, max_size=8))
    last = {group: step for step, groups in enumerate(plan) for group in groups}
    spare = {group: data.draw(st.integers(0, 2)) for group in last}
    staleness, most = 8, 8
    columns = {
        # The last step s of version v has floor(s / steps per publication) = v + staleness.
        "policy_version": [(step + 10) // per_version - staleness + spare[group] for group, step in last.items()],
        "times_sampled": [most - sum(group in groups for groups in plan) for group in last],
    }
    strategy = replay(order="least_slack", max_staleness=staleness, max_uses=most)
    left = shown(len(last), **columns)
    step = 10
    while len(left):
        assert (left.policy_version + staleness >= step // per_version).all(), "a group is too stale"
        view = view_of(left, step=step, steps_per_publish=per_version, budget=Budget(None, min(batch, len(left)), 64))
        chosen = strategy.select(left, view, view.budget, np.random.default_rng(0))
        assert isinstance(chosen, Selection)
        uses = left.times_sampled + np.isin(left.row, chosen.rows)
        kept = np.flatnonzero(uses < most)
        left = shown(len(kept), policy_version=left.policy_version[kept], times_sampled=uses[kept])
        step += 1


def test_without_a_bound_the_other_one_gives_the_order() -> None:
    """No staleness: most uses left first. No uses: least time left first."""
    by_uses = replay(order="least_slack", max_staleness=None)
    assert select(by_uses, shown(4, times_sampled=[2, 0, 3, 1]), budget=Budget(None, 2, 64)) == [2, 4]
    by_age = replay(order="least_slack", max_uses=None)
    assert select(by_age, shown(4, policy_version=[9, 7, 8, 10]), budget=Budget(None, 2, 64)) == [2, 3]


# ---------------------------------------------------------------------- rate


def test_a_batch_ahead_of_inserts_is_rate_limited() -> None:
    """S + B - spi * I <= e: with spi = 2, e = 6 and 10 groups stored a batch of 4 may end at 26 uses."""
    strategy, groups = replay(samples_per_insert=2.0, error_buffer=6), shown(10)
    assert len(select(strategy, groups, groups_used=22)) == 4
    assert select(strategy, groups, groups_used=23) == "rate_limited"
    assert select(strategy, shown(2), groups_stored=10, groups_used=23) == "rate_limited"
    by_tokens = Budget(40, None, 64)
    assert len(select(strategy, groups, groups_used=22, budget=by_tokens)) == 4
    assert select(strategy, groups, groups_used=23, budget=by_tokens) == "rate_limited"


def test_admission_stops_at_the_lower_end_of_the_band() -> None:
    """-e <= S - spi * I: with spi = 2, e = 6 and 20 uses at most 13 groups may be stored or out."""
    strategy, flow = replay(samples_per_insert=2.0, error_buffer=6), Flow(0.0, 10.0)
    view = view_of(shown(4), groups_stored=9, groups_used=20)
    assert strategy.admit(view, flow) == 4
    assert strategy.admit(dataclasses.replace(view, tickets_out=3), flow) == 1
    assert strategy.admit(dataclasses.replace(view, groups_stored=13), flow) == 0


def test_admission_continues_if_the_next_batch_needs_groups() -> None:
    """Evicted groups take their uses with them: the band alone would stop admission for ever."""
    strategy = replay(samples_per_insert=2.0, error_buffer=6)
    view = view_of(shown(1), groups_stored=500, groups_used=20)
    assert strategy.admit(view, Flow(0.0, 10.0)) == 3


@given(
    spi=st.floats(0.5, 4),
    batch=st.integers(1, 64),
    extra=st.floats(0, 50),
    used=st.integers(0, 10_000),
    stored=st.integers(0, 10_000),
)
def test_uses_and_inserts_never_block_each_other(spi: float, batch: int, extra: float, used: int, stored: int) -> None:
    """If the batch is blocked, an insert is admitted: 2e >= B + spi."""
    limiter = Limiter(spi, (batch + spi) / 2 + extra)
    view = buffer_view(groups_used=used, groups_stored=stored)
    if limiter.blocks(view, batch):
        assert limiter.inserts_left(view, batch) >= 1 - 1e-9
        assert 0 < limiter.inserts_needed(view, batch) <= limiter.inserts_left(view, batch) + 1


@pytest.mark.parametrize("spi", [1.0, 1.5, 2.5])
def test_a_closed_loop_keeps_samples_per_insert(spi: float) -> None:
    """Over 60 steps the uses per stored group match the option, within the band."""
    progress = ClosedLoop(replay(samples_per_insert=spi, error_buffer=24, order="fifo")).run(60)
    assert progress.steps == 60
    assert abs(progress.uses.sum() - spi * len(progress.uses)) <= 24 + 16 * spi


# ---------------------------------------------------------------------- admission


def admitted(strategy: Strategy[Any], **fields: Any) -> int:
    """Return the admission of an empty buffer at step 10, with these fields."""
    return strategy.admit(view_of(shown(0), **fields), Flow(0.0, 10.0))


@pytest.mark.parametrize(
    ("options", "groups"),
    [
        ({"max_uses": 1}, 20),
        ({"max_uses": 2}, 10),
        ({"max_uses": 4}, 5),
        ({"max_uses": 100}, 4),
        ({"max_uses": None}, 4),
        ({"max_uses": 4, "fresh_fraction": 0.5}, 10),
        ({"max_uses": 4, "fresh_fraction": 1.0}, 20),
        ({"max_uses": 4, "cooldown": 1}, 8),
        ({"max_uses": 4, "samples_per_insert": 2.5, "error_buffer": 100}, 8),
        ({"max_uses": 4, "max_staleness": None, "look_ahead": 0}, 4),
        ({"max_uses": 4, "max_staleness": None}, 5),
        ({"max_uses": 4, "max_staleness": 0}, 4),
    ],
)
def test_admission_divides_the_window_by_planned_uses(options: dict[str, Any], groups: int) -> None:
    """W * B / r: a group that starts now may serve r of five batches of 4."""
    assert admitted(replay(**options)) == groups


def test_used_groups_count_by_their_remaining_uses() -> None:
    """Four uses each, five batches of 4: 5 groups that used 8 of 20 uses allow 2 more."""
    strategy = replay()
    assert admitted(strategy, groups_live=5, tokens_live=50, uses_live=8) == 2
    assert admitted(strategy, groups_live=5, tokens_live=50, uses_live=8, tickets_out=2) == 0
    assert admitted(strategy, groups_live=5, tokens_live=50) == 0


def test_fresh_groups_are_admitted_if_the_next_batch_needs_them() -> None:
    strategy = replay(fresh_fraction=0.5)
    full = {"groups_live": 50, "tokens_live": 500, "uses_live": 50}
    assert admitted(strategy, **full) == 2
    assert admitted(strategy, **full, groups_fresh=1) == 1
    assert admitted(strategy, **full, groups_fresh=2) == 0
    assert admitted(strategy, **full, tickets_out=2) == 0


def test_nothing_is_admitted_that_the_next_step_cannot_use() -> None:
    assert admitted(replay(), published_version=5) == 0
    assert admitted(replay(), published_version=6) > 0


def test_admission_for_one_use_equals_the_staleness_window() -> None:
    """Counted in tokens: 5 batches of 100 tokens, 10 each."""
    assert admitted(replay(max_uses=1), budget=Budget(100, None, 64)) == 50
    assert admitted(build_strategy("one-step-off-policy", {"max_staleness": 4}), budget=Budget(100, None, 64)) == 50


def test_admission_by_measured_speeds_holds_the_uses_of_a_steady_run() -> None:
    """r = 4: 2.5 batches of uses in the buffer, and a tenth of a step of new groups in generation, with its spread."""
    flow = Flow(0.0, 10.0, step_s=10.0, group_s=1.0)
    batch_of_64 = Budget(None, 64, 64)
    live = {"groups_live": 48, "tokens_live": 480, "uses_live": 96, "budget": batch_of_64}
    assert replay().admit(view_of(shown(0), **live), flow) == 21  # 64 / 4, and 0.26 * 64 / 4
    unmeasured = Flow(0.0, 10.0)
    assert replay().admit(view_of(shown(0), **live), unmeasured) == 56
    waits = dataclasses.replace(flow, waited=1.0)
    assert replay().admit(view_of(shown(0), **live), waits) == 56


@pytest.mark.parametrize(("options", "least"), [({}, 3.3), ({"max_staleness": 6}, 3.8)])
def test_groups_of_a_steady_run_reach_nearly_all_their_uses(options: dict[str, Any], least: float) -> None:
    """Four uses each, with the defaults."""
    progress = ClosedLoop(replay(**options)).run(80)
    assert progress.steps == 80
    assert progress.uses[progress.counted].mean() >= least


# ---------------------------------------------------------------------- reasons


@pytest.mark.parametrize(
    ("options", "columns", "budget", "reason"),
    [
        ({}, {}, BATCH_OF_4, "too_few_groups"),
        ({}, {}, Budget(40, None, 64), "too_few_tokens"),
        ({}, {"tokens": 90}, Budget(40, None, 64), "too_few_tokens"),
        ({"cooldown": 3}, {"last_step": 9, "times_sampled": 1}, BATCH_OF_4, "reuse_exhausted"),
        ({"cooldown": 3}, {"last_step": [9, 9, -1], "times_sampled": [1, 1, 0]}, BATCH_OF_4, "too_few_groups"),
        (
            {"cooldown": 3},
            {"last_step": [9, 9, -1], "times_sampled": [1, 1, 0]},
            Budget(None, 3, 64),
            "reuse_exhausted",
        ),
        ({"fresh_fraction": 0.5}, {"times_sampled": 1, "last_step": 3}, Budget(None, 3, 64), "reuse_exhausted"),
        ({"fresh_fraction": 0.5}, {"times_sampled": 1, "last_step": 3}, BATCH_OF_4, "too_few_groups"),
        ({"samples_per_insert": 1.0}, {"times_sampled": 3}, Budget(None, 3, 64), "rate_limited"),
    ],
)
def test_waiting_reasons(options: dict[str, Any], columns: dict[str, Any], budget: Budget, reason: str) -> None:
    """`reuse_exhausted` only if all groups together would make a batch."""
    assert select(replay(**options), shown(3, **columns), budget=budget) == reason


def rows_of(chosen: Sequence[int] | str) -> set[int]:
    """Read the rows of a selection."""
    return set() if isinstance(chosen, str) else set(chosen)


@given(st.integers(0, 99), st.integers(0, 3), st.sampled_from([0.0, 0.3, 1.0]), st.none() | st.integers(1, 2))
def test_all_rules_hold_at_once(seed: int, cooldown: int, fraction: float, per_prompt: int | None) -> None:
    """Rest, share of fresh groups and groups per prompt, in any combination."""
    rng = np.random.default_rng(seed)
    used = rng.integers(0, 3, 60)
    last = np.where(used > 0, rng.integers(4, 10, 60), -1)
    prompts = rng.integers(-1, 6, 60)
    groups = shown(60, times_sampled=used, last_step=last, prompt_index=prompts)
    strategy = replay(cooldown=cooldown, fresh_fraction=fraction, groups_per_prompt=per_prompt)
    at = np.array(sorted(rows_of(select(strategy, groups, seed))), np.int64) - 1
    if not len(at):
        return
    assert len(at) == 4
    assert ((last[at] == -1) | (10 - last[at] > cooldown)).all()
    assert (used[at] == 0).sum() >= fraction * 4
    if per_prompt is not None:
        assert max(Counter(prompt for prompt in prompts[at].tolist() if prompt >= 0).values(), default=0) <= per_prompt
