"""Every built-in keeps the contract that `replaybuf.testing` holds plug-ins to; and the suite notices who does not."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from replaybuf.errors import Invalid, StrategyFault
from replaybuf.kernel.options import StrategyOptions
from replaybuf.kernel.plugins import FILTERS, STRATEGIES, build_filter, build_strategy, names
from replaybuf.kernel.strategy import (
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
from replaybuf.testing import ClosedLoop, FilterContract, StrategyContract, check_filter, check_progress, check_strategy
from replaybuf.testing.loop import BUDGETS, Progress
from tests.builders import steady

STRATEGY_OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("on-policy", {}),
    ("one-step-off-policy", {}),
    ("one-step-off-policy", {"max_staleness": 3}),
    ("one-step-off-policy", {"max_staleness": 4, "adaptive": True}),
    ("replay", {}),
    ("replay", {"order": "fifo"}),
    ("replay", {"order": "newest"}),
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


def test_no_built_in_is_left_out() -> None:
    """A strategy or filter that is added is tested here."""
    assert {name for name, _ in STRATEGY_OPTIONS} == set(names(STRATEGIES))
    assert {name for name, _ in FILTER_OPTIONS} == set(names(FILTERS))


@pytest.mark.parametrize(("name", "options"), STRATEGY_OPTIONS, ids=str)
def test_a_built_in_strategy_keeps_the_contract(name: str, options: dict[str, Any]) -> None:
    check_strategy(lambda: build_strategy(name, options), examples=30)


@pytest.mark.parametrize(("name", "options"), STRATEGY_OPTIONS, ids=str)
def test_a_built_in_goes_on_and_trains_prompts_that_take_50_times_longer(name: str, options: dict[str, Any]) -> None:
    """A trainer with producers at hand is never left waiting, and nobody's group is left to become stale."""
    check_progress(lambda: build_strategy(name, options))


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
@settings(steady, max_examples=12)
def test_prompts_that_take_50_times_longer_are_trained_as_long_as_they_come_in_time(
    strategy: tuple[str, dict[str, Any]], k: int, part: float, budget: Budget, seed: int
) -> None:
    """For any k: a group may take up to k - 1 steps, so that it arrives with a step left. Its chance is at least half
    of what groups have that take a 50th of that, and no use is staler than k.
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
@settings(steady, max_examples=12)
def test_drawing_at_random_gives_prompts_that_take_50_times_longer_the_chance_of_the_draws_they_are_there_for(
    strategy: tuple[str, dict[str, Any]], k: int, part: float, budget: Budget, seed: int
) -> None:
    """Who arrives with a step left is in one draw, which takes u of the k + 1 batches that the window holds."""
    progress = with_slow_prompts(strategy, k, part, budget, seed)
    one_draw = min(1.0, strategy[1]["max_uses"] / (k + 1))
    assert progress.share(slow=True) >= 0.5 * one_draw * progress.share(slow=False) > 0.1


def with_slow_prompts(strategy: tuple[str, dict[str, Any]], k: int, part: float, budget: Budget, seed: int) -> Progress:
    """Train 40 steps at staleness k with prompts that take `part` of k - 1 steps; neither stop nor exceed k."""
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
def test_a_built_in_filter_keeps_the_contract(name: str, options: dict[str, Any]) -> None:
    check_filter(lambda: build_filter(name, options))


class TestThroughTheMixIn(StrategyContract):
    """As a plug-in's own tests do it."""

    def build(self) -> Strategy[Any]:
        return build_strategy("one-step-off-policy", {"max_staleness": 2})


class TestAFilterThroughTheMixIn(FilterContract):
    """As a plug-in's own tests do it."""

    def build(self) -> Any:
        return build_filter("overlong", {"max_tokens": 10})


# ---------------------------------------------------------------------- strategies that break a rule


@pytest.fixture
def as_found() -> Iterator[None]:
    """Let Hypothesis tell the first buffer it finds: looking for the smallest takes ten times as long."""
    before = settings.get_current_profile_name()
    settings.register_profile("as found", settings(), phases=[Phase.explicit, Phase.generate])
    settings.load_profile("as found")
    yield
    settings.load_profile(before)


CHANGES = itertools.count(1)


class Sound(Strategy[StrategyOptions]):
    """Keeps every rule; those below each break one."""

    def select(
        self, groups: Groups, buffer: BufferView, budget: Budget, rng: np.random.Generator
    ) -> Selection | Waiting:
        return fill(groups, np.arange(len(groups)), budget)


class Twice(Sound):
    def select(self, groups: Groups, buffer: BufferView, budget: Budget, rng: Any) -> Selection | Waiting:
        found = fill(groups, np.arange(len(groups)), budget)
        return Selection(np.repeat(found.rows, 2)) if isinstance(found, Selection) else found


class Greedy(Sound):
    def select(self, groups: Groups, buffer: BufferView, budget: Budget, rng: Any) -> Selection | Waiting:
        return Selection(groups.row) if len(groups) else Waiting("no_groups")


class Inventive(Sound):
    def select(self, groups: Groups, buffer: BufferView, budget: Budget, rng: Any) -> Selection | Waiting:
        return Selection(np.array([-5])) if len(groups) else Waiting("no_groups")


class Moody(Sound):
    def select(self, groups: Groups, buffer: BufferView, budget: Budget, rng: Any) -> Selection | Waiting:
        return Waiting("mood")


class Weightless(Sound):
    def select(self, groups: Groups, buffer: BufferView, budget: Budget, rng: Any) -> Selection | Waiting:
        found = fill(groups, np.arange(len(groups)), budget)
        return Selection(found.rows, np.zeros(len(found.rows), "f4")) if isinstance(found, Selection) else found


class Remembering(Sound):
    asked = 0

    def select(self, groups: Groups, buffer: BufferView, budget: Budget, rng: Any) -> Selection | Waiting:
        self.asked += 1
        return fill(groups, np.arange(len(groups))[:: 1 if self.asked % 2 else -1], budget)


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


class Hoarding(Sound):
    def evict(self, groups: Groups, buffer: BufferView) -> Evictions:
        return Evictions()


class Wordy(Sound):
    def evict(self, groups: Groups, buffer: BufferView) -> Evictions:
        rows = super().evict(groups, buffer).rows
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
    """Takes what it hears for something to sort by; each instance in another way."""

    heard = 0

    def observe(self, feedback: Feedback) -> None:
        self.heard = next(CHANGES)

    def select(self, groups: Groups, buffer: BufferView, budget: Budget, rng: Any) -> Selection | Waiting:
        return fill(groups, np.roll(np.arange(len(groups)), self.heard), budget)


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
        (Weightless, "weights are finite and > 0"),
        (Remembering, "selects the same again"),
        (Chancy, "selects the same"),
        (Writing, "leaves its groups unchanged"),
        (Wasteful, "evicts only groups that it would never select"),
        (Hoarding, "evicts groups staler than max_staleness"),
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
@pytest.mark.usefixtures("as_found")
def test_the_suite_names_the_rule_that_a_strategy_breaks(broken: type[Sound], rule: str) -> None:
    """A suite that cannot fail would prove nothing."""
    with pytest.raises(StrategyFault, match=rule):
        check_strategy(lambda: broken(StrategyOptions()))


def test_the_smallest_buffer_that_breaks_a_rule_is_told() -> None:
    """Here the empty one, as the broken strategy never looks into it."""
    with pytest.raises(StrategyFault, match=r"a number >= 0' is broken: -1") as told:
        check_strategy(lambda: Indebted(StrategyOptions()))
    assert "count=0" in "\n".join(told.value.__notes__)


def test_the_strategy_that_the_broken_ones_are_made_of_is_sound() -> None:
    """So that it is the rule they break that is told."""
    check_strategy(lambda: Sound(StrategyOptions()))


class Impatient(Sound):
    """Allows staleness 3, and takes what came last."""

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
    """Drops groups of fewer than 4 rollouts, and refuses runs in which all are."""

    least = 4

    def check(self, budget: Budget, group_size: int | None) -> None:
        if group_size is not None and group_size < self.least:
            raise Invalid("group_size is too small", name="group_size", value=group_size, bound=self.least)

    def drop(self, groups: Groups, buffer: BufferView) -> Evictions:
        rows = groups.row[groups.rollouts < 4].tolist()
        return Evictions(tuple(rows), ("small",) * len(rows))


class Overcautious(Picky):
    """Refuses groups that it would keep."""

    least = 5


class Nameless(Picky):
    def check(self, budget: Budget, group_size: int | None) -> None:
        if group_size == 1:
            raise Invalid("no")


class Suspicious(Picky):
    """Refuses every run that leaves the size of its groups open."""

    def check(self, budget: Budget, group_size: int | None) -> None:
        if group_size is None:
            raise Invalid("group_size is null", name="group_size", value=None, bound=4)


def test_a_filter_that_refuses_what_it_drops_whole_is_sound() -> None:
    check_filter(lambda: Picky(StrategyOptions()))


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (Overcautious, r"refuses only runs of which drop leaves no group' is broken: \{'group_size': 4"),
        (Suspicious, r"refuses only runs of which drop leaves no group' is broken: \{'group_size': None"),
        (Nameless, "check names the field that it refuses"),
    ],
)
@pytest.mark.usefixtures("as_found")
def test_the_suite_names_the_rule_that_a_refusing_filter_breaks(broken: type[Picky], rule: str) -> None:
    with pytest.raises(StrategyFault, match=rule):
        check_filter(lambda: broken(StrategyOptions()))


def test_the_suite_notices_starvation_and_waiting_for_ever() -> None:
    """Slow prompts that are never trained; producers that are never let in."""
    with pytest.raises(StrategyFault, match="50 times longer"):
        check_progress(lambda: Impatient(StrategyOptions()))
    with pytest.raises(StrategyFault, match="does not wait forever"):
        check_progress(lambda: Shut(StrategyOptions()))
