"""Contract suite of `replaybuf.testing`: built-ins pass, broken plug-ins fail."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from replaybuf.errors import Invalid, StrategyFault
from replaybuf.kernel.strategy.contract import (
    Budget,
    BufferView,
    Evictions,
    Feedback,
    Filter,
    Flow,
    Groups,
    Selection,
    Strategy,
    Waiting,
    fill,
)
from replaybuf.kernel.strategy.options import StrategyOptions
from replaybuf.kernel.strategy.plugin_set import build_filter, build_strategy
from replaybuf.plugins.entry_points import FILTERS, STRATEGIES, names
from replaybuf.testing import ClosedLoop, FilterContract, StrategyContract, check_filter, check_progress, check_strategy
from replaybuf.testing.loop import BUDGETS, Progress

# A time limit that ends a plug-in in a callback of the collector goes no further than that; then the plug-in is called
# again. On a busy machine Hypothesis' own callback is hit.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")

STRATEGY_OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("on-policy", {}),
    ("one-step-off-policy", {}),
    ("one-step-off-policy", {"max_staleness": 3}),
    ("one-step-off-policy", {"max_staleness": 4, "adaptive": True}),
    ("one-step-off-policy", {"exact_slots": True}),
    ("one-step-off-policy", {"exact_slots": True, "max_staleness": 4, "adaptive": True}),
    ("replay", {}),
    ("replay", {"order": "fifo"}),
    ("replay", {"order": "newest"}),
    ("replay", {"order": "blocks", "max_uses": 2}),
    ("replay", {"order": "prioritized", "importance": 0.5}),
    ("replay", {"order": "prioritized", "priority": "feedback", "exponent": 4}),
    ("replay", {"order": "prioritized", "priority": "reward_std", "cooldown": 1}),
    ("replay", {"max_uses": None, "max_staleness": 3}),
    ("replay", {"max_uses": 2, "max_staleness": None}),
    ("replay", {"max_uses": 1, "max_staleness": 2}),
    ("replay", {"fresh_fraction": 0.5, "cooldown": 1}),
    ("replay", {"fresh_fraction": 1.0}),
    ("replay", {"samples_per_insert": 2.0}),
    ("replay", {"samples_per_insert": 1.5, "error_buffer": 20, "order": "fifo"}),
    ("replay", {"groups_per_prompt": 1}),
    ("replay", {"prompts_together": True}),
    ("replay", {"mix": {"a": 0.5, "b": 0.3}, "fresh_fraction": 0.25}),
    ("replay", {"mix": {"": 0.5, "a": 0.5}, "groups_per_prompt": 2}),
]


def test_every_built_in_is_tested_here() -> None:
    # `recorded` serves the groups of an import in their order and gives no tickets.
    assert {name for name, _ in STRATEGY_OPTIONS} == {*names(STRATEGIES)} - {"recorded"}
    assert {name for name, _ in FILTER_OPTIONS} == set(names(FILTERS))


@pytest.mark.parametrize(("name", "options"), STRATEGY_OPTIONS, ids=str)
def test_a_built_in_strategy_passes_the_contract(name: str, options: dict[str, Any]) -> None:
    check_strategy(lambda: build_strategy(name, options), examples=30)


@pytest.mark.parametrize(("name", "options"), STRATEGY_OPTIONS, ids=str)
def test_a_built_in_strategy_trains_prompts_that_take_50_times_longer(name: str, options: dict[str, Any]) -> None:
    """The trainer does not wait forever, and slow groups do not all become stale."""
    check_progress(lambda: build_strategy(name, options), steps=40)


@given(
    st.sampled_from(
        [
            ("one-step-off-policy", {}),
            ("replay", {"max_uses": 1, "order": "fifo"}),
            ("replay", {"max_uses": 3, "order": "fifo"}),
            ("replay", {"max_uses": 3, "order": "newest"}),
        ]
    ),
    st.integers(2, 6),
    st.floats(0.1, 1.0),
    st.sampled_from(BUDGETS),
    st.integers(0, 99),
)
@settings(max_examples=12)
def test_slow_prompts_that_arrive_in_time_are_trained(
    strategy: tuple[str, dict[str, Any]], k: int, part: float, budget: Budget, seed: int
) -> None:
    """A slow group takes at most k - 1 steps, so it arrives with one step left.

    Its share is at least half the share of groups that are 50 times faster. No use is staler than k.
    """
    progress = with_slow_prompts(strategy, k, part, budget, seed)
    assert progress.share(slow=True) >= 0.5 * progress.share(slow=False) > 0.3


@given(
    st.sampled_from(
        [
            ("replay", {"max_uses": 3}),
            ("replay", {"max_uses": 2, "order": "prioritized", "fresh_fraction": 0.25}),
        ]
    ),
    st.integers(2, 6),
    st.floats(0.1, 1.0),
    st.sampled_from(BUDGETS),
    st.integers(0, 99),
)
@settings(max_examples=12)
def test_random_selection_gives_slow_prompts_the_share_of_one_draw(
    strategy: tuple[str, dict[str, Any]], k: int, part: float, budget: Budget, seed: int
) -> None:
    """A slow group is in one draw, which takes `max_uses` of the k + 1 batches in the window."""
    progress = with_slow_prompts(strategy, k, part, budget, seed)
    one_draw = min(1.0, strategy[1]["max_uses"] / (k + 1))
    assert progress.share(slow=True) >= 0.5 * one_draw * progress.share(slow=False) > 0.1


def with_slow_prompts(strategy: tuple[str, dict[str, Any]], k: int, part: float, budget: Budget, seed: int) -> Progress:
    """Train 40 steps at staleness k; slow prompts take `part` of k - 1 steps. Check steps and staleness."""
    name, options = strategy
    build = build_strategy(name, options | {"max_staleness": k})
    progress = ClosedLoop(build, budget, seed, slow_s=part * (k - 1)).run(40)
    assert progress.steps == 40
    assert progress.staleness.max() <= k
    return progress


FILTER_OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("zero-variance", {}),
    ("zero-variance", {"tolerance": 0.2}),
    ("reward-window", {"low": -0.1, "high": 0.3}),
    ("reward-window", {"low": -0.1, "high": 0.3, "easy_fraction": 0.3, "hard_fraction": 0.9}),
    ("overlong", {"max_tokens": 50}),
    ("overlong", {"max_truncated": 0.5, "max_tokens": 90}),
]


@pytest.mark.parametrize(("name", "options"), FILTER_OPTIONS, ids=str)
def test_a_built_in_filter_passes_the_contract(name: str, options: dict[str, Any]) -> None:
    check_filter(lambda: build_filter(name, options))


class TestStrategyMixIn(StrategyContract):
    """Use of the mix-in in a plug-in's own tests."""

    def build(self) -> Strategy[Any]:
        return build_strategy("one-step-off-policy", {"max_staleness": 2})


class TestFilterMixIn(FilterContract):
    """Use of the mix-in in a plug-in's own tests."""

    def build(self) -> Any:
        return build_filter("overlong", {"max_tokens": 10})


# ---------------------------------------------------------------------- strategies that break a rule


@pytest.fixture
def without_shrinking() -> Iterator[None]:
    """Report the first failing buffer: shrinking takes ten times as long."""
    before = settings.get_current_profile_name()
    settings.register_profile("without shrinking", settings(), phases=[Phase.explicit, Phase.generate])
    settings.load_profile("without shrinking")
    yield
    settings.load_profile(before)


CHANGES = itertools.count(1)


class Sound(Strategy[StrategyOptions]):
    """Keeps every rule; each subclass below breaks one."""

    def select(
        self, groups: Groups, buffer: BufferView, budget: Budget, rng: np.random.Generator
    ) -> Selection | Waiting:
        return fill(groups, np.arange(len(groups)), budget)


class Twice(Sound):
    def select(self, groups: Groups, buffer: BufferView, budget: Budget, rng: Any) -> Selection | Waiting:
        rows = fill(groups, np.arange(len(groups)), budget)
        return Selection(np.repeat(rows.rows, 2)) if isinstance(rows, Selection) else rows


class Greedy(Sound):
    def select(self, groups: Groups, buffer: BufferView, budget: Budget, rng: Any) -> Selection | Waiting:
        return Selection(groups.row) if len(groups) else Waiting("no_groups")


class Inventive(Sound):
    def select(self, groups: Groups, buffer: BufferView, budget: Budget, rng: Any) -> Selection | Waiting:
        return Selection(np.array([-5])) if len(groups) else Waiting("no_groups")


class Moody(Sound):
    def select(self, groups: Groups, buffer: BufferView, budget: Budget, rng: Any) -> Selection | Waiting:
        return Waiting("mood")


class Talkative(Sound):
    def select(self, groups: Groups, buffer: BufferView, budget: Budget, rng: Any) -> Selection | Waiting:
        return Waiting("no_groups", detail="x" * 257)


class Weightless(Sound):
    def select(self, groups: Groups, buffer: BufferView, budget: Budget, rng: Any) -> Selection | Waiting:
        rows = fill(groups, np.arange(len(groups)), budget)
        return Selection(rows.rows, np.zeros(len(rows.rows), "f4")) if isinstance(rows, Selection) else rows


class Remembering(Sound):
    calls = 0

    def select(self, groups: Groups, buffer: BufferView, budget: Budget, rng: Any) -> Selection | Waiting:
        self.calls += 1
        return fill(groups, np.arange(len(groups))[:: 1 if self.calls % 2 else -1], budget)


class Chancy(Sound):
    def select(self, groups: Groups, buffer: BufferView, budget: Budget, rng: Any) -> Selection | Waiting:
        return fill(groups, np.random.default_rng().permutation(len(groups)), budget)


class Writing(Sound):
    def select(self, groups: Groups, buffer: BufferView, budget: Budget, rng: Any) -> Selection | Waiting:
        groups.__dict__["tokens"] = groups.tokens + 7
        return super().select(groups, buffer, budget, rng)


class Wasteful(Sound):
    def evict(self, groups: Groups, buffer: BufferView) -> Evictions:
        return Evictions(tuple(groups.row.tolist()), ("tired",) * len(groups))


class Wordy(Sound):
    def evict(self, groups: Groups, buffer: BufferView) -> Evictions:
        rows = groups.row[:1].tolist()
        return Evictions(rows, ("Too stale!",) * len(rows))


class OpenHanded(Sound):
    def admit(self, buffer: BufferView, flow: Flow) -> int:
        return 8


class Indebted(Sound):
    def admit(self, buffer: BufferView, flow: Flow) -> int:
        return -1


class Endless(Sound):
    def admit(self, buffer: BufferView, flow: Flow) -> int:
        while True:
            pass


class Listening(Sound):
    """Orders groups by the feedback it observed, differently in each instance."""

    shift = 0

    def observe(self, feedback: Feedback) -> None:
        self.shift = next(CHANGES)

    def select(self, groups: Groups, buffer: BufferView, budget: Budget, rng: Any) -> Selection | Waiting:
        return fill(groups, np.roll(np.arange(len(groups)), self.shift), budget)


class Demanding(Sound):
    def observe(self, feedback: Feedback) -> None:
        self.loss = feedback.values["loss"]


class Tardy(Sound):
    def __init__(self, options: StrategyOptions) -> None:
        time.sleep(1.6)


class Pausing(Sound):
    @property
    def max_staleness(self) -> int:
        time.sleep(1.6)
        return 0


class Halving(Sound):
    def select(self, groups: Groups, buffer: BufferView, budget: Budget, rng: Any) -> Selection | Waiting:
        return Selection(groups.row[:1] + 0.5) if len(groups) else Waiting("no_groups")  # type: ignore[arg-type]


class Boundless(Sound):
    @property
    def max_staleness(self) -> int:
        return -1


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (Twice, "selects a group once"),
        (Greedy, "keeps the (token|group) budget"),
        (Inventive, "selects only groups that it was given"),
        (Moody, "a waiting reason is one that strategies may give"),
        (Talkative, "a detail has at most 256 characters"),
        (Weightless, "weights are finite and > 0"),
        (Remembering, "selects the same again"),
        (Chancy, "selects the same"),
        (Writing, "leaves its groups unchanged"),
        (Wasteful, "evicts only groups that it would never select"),
        (Wordy, "a word that can label a metric"),
        (OpenHanded, "admits no more after"),
        (Indebted, "admits a number >= 0"),
        (Endless, r"admit answers within 1 s' is broken: it did not return"),
        (Listening, "selects the same as another instance that observed the same"),
        (Demanding, "observes any feedback"),
        (Tardy, "the constructor answers within 1 s"),
        (Pausing, "max_staleness answers within 1 s"),
        (Halving, "selects whole groups, by their row"),
        (Boundless, "max_staleness is null or >= 0"),
    ],
)
@pytest.mark.usefixtures("without_shrinking")
def test_a_broken_strategy_fails_with_the_rule_it_breaks(broken: type[Sound], rule: str) -> None:
    with pytest.raises(StrategyFault, match=rule):
        check_strategy(lambda: broken(StrategyOptions()))


def test_the_error_shows_the_smallest_buffer_that_breaks_a_rule() -> None:
    """The broken strategy ignores the buffer, so the smallest is empty."""
    with pytest.raises(StrategyFault, match=r"a number >= 0' is broken: -1") as caught:
        check_strategy(lambda: Indebted(StrategyOptions()))
    assert "count=0" in "\n".join(caught.value.__notes__)


def test_the_base_of_the_broken_strategies_passes() -> None:
    check_strategy(lambda: Sound(StrategyOptions()))


class PlainOptions(msgspec.Struct, frozen=True):
    """Options as a plug-in of the first release wrote them."""

    newest: bool = False


class FirstRelease(Sound):
    def __init__(self, options: PlainOptions) -> None:
        self.newest = options.newest


def test_a_strategy_of_the_first_release_passes() -> None:
    """It has no attribute that came later, and options that are not ours."""
    check_strategy(lambda: FirstRelease(PlainOptions()))


class Impatient(Sound):
    """Allows staleness 3, and never selects slow prompts."""

    @property
    def max_staleness(self) -> int:
        return 3

    def select(self, groups: Groups, buffer: BufferView, budget: Budget, rng: Any) -> Selection | Waiting:
        fast = np.flatnonzero(groups.prompt_index % 8 != 0)
        return fill(groups, fast, budget)


class Shut(Sound):
    def admit(self, buffer: BufferView, flow: Flow) -> int:
        return 0 if buffer.step > 3 else super().admit(buffer, flow)


class Picky(Filter[StrategyOptions]):
    """Drops groups of fewer than 4 rollouts; rejects runs whose groups are all that small."""

    least = 4

    def check(self, budget: Budget, group_size: int | None) -> None:
        if group_size is not None and group_size < self.least:
            raise Invalid("group_size is too small", name="group_size", value=group_size, bound=self.least)

    def drop(self, groups: Groups, buffer: BufferView) -> Evictions:
        rows = groups.row[groups.rollouts < 4].tolist()
        return Evictions(tuple(rows), ("small",) * len(rows))


class Overcautious(Picky):
    """Rejects runs whose groups it would keep."""

    least = 5


class Nameless(Picky):
    def check(self, budget: Budget, group_size: int | None) -> None:
        if group_size == 1:
            raise Invalid("no")


class Suspicious(Picky):
    """Rejects every run without a group size."""

    def check(self, budget: Budget, group_size: int | None) -> None:
        if group_size is None:
            raise Invalid("group_size is null", name="group_size", value=None, bound=4)


def test_a_filter_may_reject_runs_whose_groups_it_always_drops() -> None:
    check_filter(lambda: Picky(StrategyOptions()))


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (Overcautious, r"refuses only runs of which drop leaves no group' is broken: \{'group_size': 4"),
        (Suspicious, r"refuses only runs of which drop leaves no group' is broken: \{'group_size': None"),
        (Nameless, "check names the field that it refuses"),
    ],
)
@pytest.mark.usefixtures("without_shrinking")
def test_a_broken_filter_fails_with_the_rule_it_breaks(broken: type[Picky], rule: str) -> None:
    with pytest.raises(StrategyFault, match=rule):
        check_filter(lambda: broken(StrategyOptions()))


def test_starvation_and_endless_waiting_fail_the_progress_check() -> None:
    """One strategy never trains slow prompts; the other stops admitting groups."""
    with pytest.raises(StrategyFault, match="50 times longer"):
        check_progress(lambda: Impatient(StrategyOptions()))
    with pytest.raises(StrategyFault, match="does not wait forever"):
        check_progress(lambda: Shut(StrategyOptions()))
