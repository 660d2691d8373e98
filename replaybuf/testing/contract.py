"""The rules that every strategy and every filter keeps, each by the name that a `StrategyFault` tells."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

from replaybuf.errors import Invalid, StrategyFault, first_error
from replaybuf.kernel.rules import REASON, are_rows
from replaybuf.kernel.strategy import (
    STRATEGY_REASONS,
    Budget,
    Evictions,
    Feedback,
    Filter,
    Groups,
    Selection,
    Strategy,
    Waiting,
)
from replaybuf.kernel.time_limit import BOUND_S, TookTooLong, bounded, bounded_again, handling
from replaybuf.testing.loop import BUDGETS, ClosedLoop, Progress
from replaybuf.testing.scenes import Scene, scenes

BuildStrategy = Callable[[], Strategy[Any]]
BuildFilter = Callable[[], Filter[Any]]

_ROUNDS = 16
"""Answers after which admission must have closed, each taken up in whole."""
_FEEDBACK: tuple[dict[str, Any], ...] = (
    {"loss": 0.5},
    {"priorities": {"p0": 1.0, "a-group": 0.0}},
    {"note": "late", "of_prompt": {"p0": [1, None, 2.5]}, "good": True},
)
"""What a trainer may send: any JSON object."""


class StrategyContract:
    """Tests that pytest collects in a subclass which defines `build`."""

    def build(self) -> Strategy[Any]:
        """Build a strategy anew."""
        raise NotImplementedError

    def test_it_keeps_the_contract_of_a_strategy(self) -> None:
        """Selection, admission, eviction, bounds, over random buffers."""
        check_strategy(self.build)

    def test_it_neither_waits_for_ever_nor_starves_slow_prompts(self) -> None:
        """In a closed loop with a trainer and producers, some of them 50 times slower."""
        check_progress(self.build)


class FilterContract:
    """Tests that pytest collects in a subclass which defines `build`."""

    def build(self) -> Filter[Any]:
        """Build a filter anew."""
        raise NotImplementedError

    def test_it_keeps_the_contract_of_a_filter(self) -> None:
        """Over random groups."""
        check_filter(self.build)


def check_strategy(build: BuildStrategy, examples: int = 60) -> None:
    """Hold a strategy to every rule, over `examples` random buffers. Raises `StrategyFault` naming the rule."""
    build = _in_time(build)
    strategy = build()
    _check_bounds(strategy)

    def keeps_the_rules(scene: Scene) -> None:
        for rule in _RULES:
            rule(build, scene)

    _over_random_buffers(keeps_the_rules, scenes(strategy.max_staleness, strategy.max_uses), examples)


def check_filter(build: BuildFilter, examples: int = 60) -> None:
    """Hold a filter to every rule, over `examples` random buffers. Raises `StrategyFault` naming the rule."""
    build = _in_time(build)

    def keeps_the_rules(scene: Scene) -> None:
        _drops_rightly(build, scene)
        _refuses_rightly(build, scene)

    _over_random_buffers(keeps_the_rules, scenes(None, None), examples)


def _over_random_buffers(check: Callable[[Scene], None], buffers: SearchStrategy[Scene], examples: int) -> None:
    """Check so many of the buffers. Raises the `StrategyFault` of the smallest one found to break a rule.

    What answers by chance does not break the same rule twice: then Hypothesis tells a group of what it saw, and the
    first fault in it is raised.
    """
    run = settings(
        derandomize=True,
        deadline=None,
        max_examples=examples,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=tuple(HealthCheck),
    )(given(buffers)(check))
    try:
        with handling():
            run()
    except ExceptionGroup as seen:
        faults = seen.subgroup(StrategyFault)
        if faults is None:
            raise
        raise first_error(faults) from seen


class _InTime:
    """A plug-in whose every answer is due within the bound that a service keeps.

    What was too late is not asked again: `late` keeps the fault, so that the search for the smallest buffer is short.
    """

    def __init__(self, plugin: Any, late: list[StrategyFault]) -> None:
        self._plugin = plugin
        self._late = late

    def __getattr__(self, name: str) -> Any:
        found = _answered(name, lambda: getattr(self._plugin, name), self._late)
        return functools.partial(self._answer, name, found) if callable(found) else found

    def _answer(self, name: str, call: Callable[..., Any], *asked: Any) -> Any:
        return _answered(name, lambda: call(*asked), self._late)


def _answered(name: str, call: Callable[[], Any], late: list[StrategyFault]) -> Any:
    if late:
        raise late[0]
    in_time = bounded if name == "observe" else bounded_again  # to observe something twice is not the same
    try:
        return in_time(call)
    except TookTooLong as error:
        rule = f"{name} answers within {BOUND_S:g} s"
        late.append(StrategyFault(f"rule '{rule}' is broken: it {error}", name=rule, bound=rule))
        raise late[0] from error


def _in_time(build: Callable[[], Any]) -> Callable[[], Any]:
    late: list[StrategyFault] = []
    return lambda: _InTime(_answered("the constructor", build, late), late)


def _rule(kept: bool, rule: str, value: object) -> None:
    """Raise `StrategyFault` where a rule is broken."""
    if not kept:
        raise StrategyFault(f"rule '{rule}' is broken: {value!r}", name=rule, value=value, bound=rule)


def check_progress(build: BuildStrategy, steps: int = 60) -> list[Progress]:
    """Run closed loops, with batches counted in groups and in tokens: they go on, and slow prompts are trained.

    Raises `StrategyFault` where a loop stands still, or slow prompts are trained less than half as often as others.
    At staleness 0 the second is not asked: what arrives after the batch is full is lost, and that is what is slow.
    """
    build = _in_time(build)
    found = []
    for budget in BUDGETS:
        with handling():
            progress = ClosedLoop(build(), budget).run(steps)
        _rule(progress.steps == steps, "a trainer with producers at hand does not wait for ever", progress.steps)
        found.append(progress)
        if build().max_staleness == 0:
            continue
        slow, fast = progress.share(slow=True), progress.share(slow=False)
        _rule(slow >= 0.5 * fast, "a prompt that takes 50 times longer is still trained", {"slow": slow, "fast": fast})
    return found


# ---------------------------------------------------------------------- rules


def _check_bounds(strategy: Strategy[Any]) -> None:
    staleness, uses, ahead = strategy.max_staleness, strategy.max_uses, strategy.look_ahead
    _rule(staleness is None or (type(staleness) is int and staleness >= 0), "max_staleness is null or >= 0", staleness)
    _rule(uses is None or (type(uses) is int and uses >= 1), "max_uses is null or >= 1", uses)
    _rule(type(ahead) is int and ahead >= 0, "look_ahead is >= 0", ahead)


def _select(strategy: Strategy[Any], scene: Scene) -> Selection | Waiting:
    """Ask for a batch, and see that the groups shown are as they were."""
    shown = scene.groups()
    answer = strategy.select(shown, scene.view, scene.view.budget, scene.rng())
    for name, column in scene.columns.items():
        _rule(np.array_equal(getattr(shown, name), column), "select leaves its view as it is", name)
    _rule(isinstance(answer, Selection | Waiting), "select returns Selection or Waiting", answer)
    return answer


def _selects_what_is_possible(build: BuildStrategy, scene: Scene) -> None:
    answer = _select(build(), scene)
    if isinstance(answer, Waiting):
        told = answer.reason in STRATEGY_REASONS
        _rule(told, "a reason for waiting is one that a strategy may tell", answer.reason)
        return
    rows, budget = np.asarray(answer.rows), scene.view.budget
    _rule(rows.size > 0, "selects at least one group", rows)
    _rule(are_rows(rows), "selects whole groups, by their row", rows)
    _rule(len(set(rows.tolist())) == len(rows), "selects a group once", rows)
    given_rows = scene.columns["row"]
    _rule(set(rows.tolist()) <= set(given_rows.tolist()), "selects only groups it was given", rows)
    tokens = int(scene.columns["tokens"][np.isin(given_rows, rows)].sum(dtype=np.int64))
    _rule(budget.tokens is None or tokens <= budget.tokens, f"keeps the token budget of {budget.tokens}", tokens)
    _rule(budget.groups is None or len(rows) <= budget.groups, f"keeps the group budget of {budget.groups}", len(rows))
    if answer.weights is not None:
        weights = np.asarray(answer.weights)
        _rule(weights.shape == rows.shape, "gives one weight per group", weights.shape)
        _rule(bool(np.isfinite(weights).all() and (weights > 0).all()), "weights are finite and > 0", weights)


def _selects_the_same_again(build: BuildStrategy, scene: Scene) -> None:
    """The answer depends on the arguments alone: not on what was asked before, nor on the instance."""
    strategy = build()
    first = _answer(_select(strategy, scene))
    _rule(_answer(_select(strategy, scene)) == first, "selects the same again", first)
    empty = dataclasses.replace(scene, columns={name: column[:0] for name, column in scene.columns.items()})
    _select(strategy, empty)
    strategy.admit(scene.view, scene.flow)
    _rule(_answer(_select(strategy, scene)) == first, "selects the same whatever was asked between", first)
    _rule(_answer(_select(build(), scene)) == first, "selects the same as another instance", first)


def _observes_rightly(build: BuildStrategy, scene: Scene) -> None:
    """Whatever a trainer sends is taken, and what is selected then follows from it alone."""

    def answered() -> object:
        strategy = build()
        for step in range(scene.seed % (len(_FEEDBACK) + 1)):
            values = copy.deepcopy(_FEEDBACK[(scene.seed + step) % len(_FEEDBACK)])
            try:
                strategy.observe(Feedback(step, values))
            except StrategyFault:
                raise
            except Exception as error:
                rule = "observes whatever a trainer sends"
                told = f"rule '{rule}' is broken: {error!r} for {values!r}"
                raise StrategyFault(told, name=rule, value=values, bound=rule) from error
        return _answer(_select(strategy, scene))

    first = answered()
    _rule(answered() == first, "selects the same as another instance that observed the same", first)


def _answer(answer: Selection | Waiting) -> object:
    if isinstance(answer, Waiting):
        return answer.reason
    weights = None if answer.weights is None else np.asarray(answer.weights).tolist()
    return np.asarray(answer.rows).tolist(), weights


def _check_evictions(found: Evictions, groups: Groups, what: str) -> Evictions:
    """Return what is dropped as lists, which can be compared."""
    _rule(isinstance(found, Evictions), f"{what} returns Evictions", found)
    _rule(len(found.rows) == len(found.reasons), f"{what} gives one reason per group", found)
    _rule(not len(found.rows) or are_rows(np.asarray(found.rows)), f"{what} names whole groups, by their row", found)
    _rule(len(set(found.rows)) == len(found.rows), f"{what} names a group once", found.rows)
    _rule(set(found.rows) <= set(groups.row.tolist()), f"{what} names only groups it was given", found.rows)
    for reason in set(found.reasons):
        _rule(bool(REASON.fullmatch(reason)), f"a reason of {what} is a word that can label a metric", reason)
    return _listed(found)


def _listed(found: Evictions) -> Evictions:
    return Evictions(np.asarray(found.rows, np.int64).tolist(), list(found.reasons))


def _evicts_rightly(build: BuildStrategy, scene: Scene) -> None:
    """What is too stale goes; what the bounds still allow goes only if no later batch would take it."""
    strategy = build()
    later = scene.seed % (min(strategy.max_staleness or 0, 50) + 3)
    version = scene.view.version + later
    view = dataclasses.replace(scene.view, version=version, step=version, published_version=version)
    groups = scene.groups()
    found = _check_evictions(strategy.evict(groups, view), groups, "evict")
    _rule(_listed(strategy.evict(scene.groups(), view)) == found, "evicts the same again", found)
    allowed = np.ones(len(groups), bool)
    if strategy.max_staleness is not None:
        allowed = version - groups.policy_version.astype(np.int64) <= strategy.max_staleness
    kept = set(groups.row[~allowed].tolist()).difference(found.rows)
    _rule(not kept, "evicts what is staler than max_staleness", kept)
    gone = allowed & np.isin(groups.row, np.array(found.rows, np.int64))
    for ahead in range(4 if gone.any() else 0):
        moment = dataclasses.replace(view, step=view.step + ahead, version=version + ahead)
        offered = groups.take(gone)
        chosen = strategy.select(offered, moment, Budget(None, 1, 4096), scene.rng())
        _rule(isinstance(chosen, Waiting), "evicts only what it would never select", found)


def _admits_within_bounds(build: BuildStrategy, scene: Scene) -> None:
    """Granting what it admits closes the door: producers never run ahead without bound."""
    strategy, view = build(), scene.view
    for _ in range(_ROUNDS):
        admitted = strategy.admit(view, scene.flow)
        _rule(isinstance(admitted, int) and admitted >= 0, "admits a number >= 0", admitted)
        if not admitted:
            return
        view = dataclasses.replace(view, tickets_out=view.tickets_out + admitted)
    _rule(False, f"admits no more after {_ROUNDS} grants without an arrival", view.tickets_out)


_RULES = (
    _selects_what_is_possible,
    _selects_the_same_again,
    _observes_rightly,
    _evicts_rightly,
    _admits_within_bounds,
)


def _drops_rightly(build: BuildFilter, scene: Scene) -> None:
    groups = scene.groups()
    found = _check_evictions(build().drop(groups, scene.view), groups, "drop")
    for name, column in scene.columns.items():
        _rule(np.array_equal(getattr(groups, name), column), "drop leaves its view as it is", name)
    filter_ = build()
    filter_.drop(scene.groups().take(np.arange(0)), scene.view)
    _rule(_listed(filter_.drop(scene.groups(), scene.view)) == found, "drops the same again", found)


def _refuses_rightly(build: BuildFilter, scene: Scene) -> None:
    """A run is refused only where nothing of it would be left to train: every group that a batch holds is dropped."""
    groups, budget = scene.groups(), scene.view.budget
    held = groups.longest_tokens <= budget.seq_len
    if budget.tokens is not None:
        held &= groups.tokens <= budget.tokens
    for size in (None, *np.unique(groups.rollouts).tolist()):
        try:
            build().check(budget, size)
        except Invalid as refusal:
            _rule(refusal.name is not None, "check names what it refuses", refusal.detail)
            those = groups.take(held if size is None else held & (groups.rollouts == size))
            left = len(those) - len(build().drop(those, scene.view).rows)
            _rule(not left, "check refuses only runs of which drop leaves nothing", {"group_size": size, "left": left})
