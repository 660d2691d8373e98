"""The rules of strategies and filters. A `StrategyFault` names the rule that is broken."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

from replaybuf.errors import Invalid, StrategyFault, first_error
from replaybuf.kernel.strategy.answer_checks import are_rows
from replaybuf.kernel.strategy.contract import (
    MAX_DETAIL,
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
from replaybuf.plugins.time_limit import CALL_LIMIT_S, TookTooLong, call_limited, call_twice_limited
from replaybuf.testing.loop import BUDGETS, ClosedLoop, Progress
from replaybuf.testing.scenes import Scene, scenes
from replaybuf.testing.scenes import require as _rule
from replaybuf.wire.names import REASON_WORD

BuildStrategy = Callable[[], Strategy[Any]]
BuildFilter = Callable[[], Filter[Any]]

_MAX_GRANTS = 16
"""Admission must be 0 after so many grants, if producers take each one in full."""
_FEEDBACK: tuple[dict[str, Any], ...] = (
    {"loss": 0.5},
    {"priorities": {"p0": 1.0, "a-group": 0.0}},
    {"note": "late", "of_prompt": {"p0": [1, None, 2.5]}, "good": True},
)
"""Examples of feedback: a trainer may send any JSON object."""


class StrategyContract:
    """Tests of a strategy or filter: subclass it in a test module and define `build`."""

    def build(self) -> Strategy[Any]:
        """Return a new instance of the strategy."""
        raise NotImplementedError

    def test_it_keeps_the_contract_of_a_strategy(self) -> None:
        """Check selection, admission, eviction and bounds over random buffers."""
        check_strategy(self.build)

    def test_it_neither_waits_forever_nor_starves_slow_prompts(self) -> None:
        """Run closed loops with a trainer and producers, some of them 50 times slower."""
        check_progress(self.build)


class FilterContract:
    """Tests of a strategy or filter: subclass it in a test module and define `build`."""

    def build(self) -> Filter[Any]:
        """Return a new instance of the filter."""
        raise NotImplementedError

    def test_it_keeps_the_contract_of_a_filter(self) -> None:
        """Check drops and refusals over random groups."""
        check_filter(self.build)


def check_strategy(build: BuildStrategy, examples: int = 60) -> None:
    """Check every rule of a strategy over `examples` random buffers. Raises `StrategyFault` with the broken rule."""
    build = _time_limited(build)
    strategy = build()
    _check_bounds(strategy)
    _check_rules(_STRATEGY_RULES, build, scenes(strategy.max_staleness, strategy.max_uses, strategy.sources), examples)


def check_filter(build: BuildFilter, examples: int = 60) -> None:
    """Check every rule of a filter over `examples` random buffers. Raises `StrategyFault` with the broken rule."""
    _check_rules((_check_drop, _check_refusal), _time_limited(build), scenes(None, None), examples)


def _check_rules(
    rules: Iterable[Callable[[Any, Scene], None]],
    build: Callable[[], Any],
    buffers: SearchStrategy[Scene],
    examples: int,
) -> None:
    """Check the rules over random buffers. Raises the `StrategyFault` of the smallest buffer that breaks one.

    A plug-in that answers at random may not break the same rule twice. Hypothesis then raises a group of errors; the
    first fault of the group is raised.
    """

    def check(scene: Scene) -> None:
        for rule in rules:
            rule(build, scene)

    run = settings(
        derandomize=True,
        deadline=None,
        max_examples=examples,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=tuple(HealthCheck),
    )(given(buffers)(check))
    try:
        run()
    except ExceptionGroup as group:
        faults = group.subgroup(StrategyFault)
        if faults is None:
            raise
        raise first_error(faults) from group


class _TimeLimited:
    """A plug-in whose calls have the time limit of a service.

    After one late call it raises that fault again, without a call: the search for the smallest buffer stays short.
    """

    def __init__(self, plugin: Any, late: list[StrategyFault]) -> None:
        self._plugin = plugin
        self._late = late

    def __getattr__(self, name: str) -> Any:
        attribute = _call_in_time(name, lambda: getattr(self._plugin, name), self._late)
        if not callable(attribute):
            return attribute
        return lambda *arguments: _call_in_time(name, lambda: attribute(*arguments), self._late)


def _call_in_time(name: str, call: Callable[[], Any], late: list[StrategyFault]) -> Any:
    if late:
        raise late[0]
    limited = call_limited if name == "observe" else call_twice_limited  # a second `observe` would change the plug-in
    try:
        return limited(call)
    except TookTooLong as error:
        rule = f"{name} answers within {CALL_LIMIT_S:g} s"
        late.append(StrategyFault(f"rule '{rule}' is broken: it {error}", name=rule, bound=rule))
        raise late[0] from error


def _time_limited(build: Callable[[], Any]) -> Callable[[], Any]:
    late: list[StrategyFault] = []
    return lambda: _TimeLimited(_call_in_time("the constructor", build, late), late)


def check_progress(build: BuildStrategy, steps: int = 60) -> list[Progress]:
    """Run closed loops, with batches counted in groups and in tokens; return their progress.

    Raises `StrategyFault` if a loop stops, or if it trains slow prompts less than half as often as others. The second
    rule does not hold at `max_staleness` 0: groups that arrive after the batch is full are lost, and these are slow.
    """
    build = _time_limited(build)
    faults = []
    for budget in BUDGETS:
        progress = ClosedLoop(build(), budget).run(steps)
        _rule(progress.steps == steps, "a trainer whose producers work does not wait forever", progress.steps)
        faults.append(progress)
        if build().max_staleness == 0:
            continue
        slow, fast = progress.share(slow=True), progress.share(slow=False)
        _rule(slow >= 0.5 * fast, "a prompt that takes 50 times longer is still trained", {"slow": slow, "fast": fast})
    return faults


# ---------------------------------------------------------------------- rules


def _check_bounds(strategy: Strategy[Any]) -> None:
    staleness, uses, ahead = strategy.max_staleness, strategy.max_uses, strategy.look_ahead
    _rule(staleness is None or (type(staleness) is int and staleness >= 0), "max_staleness is null or >= 0", staleness)
    _rule(uses is None or (type(uses) is int and uses >= 1), "max_uses is null or >= 1", uses)
    _rule(type(ahead) is int and ahead >= 0, "look_ahead is >= 0", ahead)


def _select(strategy: Strategy[Any], scene: Scene) -> Selection | Waiting:
    """Call `select`; check that it leaves the groups unchanged."""
    groups = scene.groups()
    answer = strategy.select(groups, scene.view, scene.view.budget, scene.rng())
    for name, column in scene.columns.items():
        _rule(np.array_equal(getattr(groups, name), column), "select leaves its groups unchanged", name)
    _rule(isinstance(answer, Selection | Waiting), "select returns Selection or Waiting", answer)
    return answer


def _check_selection(build: BuildStrategy, scene: Scene) -> None:
    answer = _select(build(), scene)
    if isinstance(answer, Waiting):
        _rule(answer.reason in STRATEGY_REASONS, "a waiting reason is one that strategies may give", answer.reason)
        short = answer.detail is None or (isinstance(answer.detail, str) and len(answer.detail) <= MAX_DETAIL)
        _rule(short, f"a detail has at most {MAX_DETAIL} characters", answer.detail)
        return
    rows, budget = np.asarray(answer.rows), scene.view.budget
    _rule(rows.size > 0, "selects at least one group", rows)
    _rule(are_rows(rows), "selects whole groups, by their row", rows)
    _rule(len(set(rows.tolist())) == len(rows), "selects a group once", rows)
    given_rows = scene.columns["row"]
    _rule(set(rows.tolist()) <= set(given_rows.tolist()), "selects only groups that it was given", rows)
    tokens = int(scene.columns["tokens"][np.isin(given_rows, rows)].sum(dtype=np.int64))
    _rule(budget.tokens is None or tokens <= budget.tokens, f"keeps the token budget of {budget.tokens}", tokens)
    _rule(budget.groups is None or len(rows) <= budget.groups, f"keeps the group budget of {budget.groups}", len(rows))
    if answer.weights is not None:
        weights = np.asarray(answer.weights)
        _rule(weights.shape == rows.shape, "gives one weight per group", weights.shape)
        _rule(bool(np.isfinite(weights).all() and (weights > 0).all()), "weights are finite and > 0", weights)


def _check_repeatable(build: BuildStrategy, scene: Scene) -> None:
    """Check that a selection depends on its arguments alone, not on earlier calls or the instance."""
    strategy = build()
    first = _answer(_select(strategy, scene))
    _rule(_answer(_select(strategy, scene)) == first, "selects the same again", first)
    empty = dataclasses.replace(scene, columns={name: column[:0] for name, column in scene.columns.items()})
    _select(strategy, empty)
    strategy.admit(scene.view, scene.flow)
    _rule(_answer(_select(strategy, scene)) == first, "selects the same after other calls", first)
    _rule(_answer(_select(build(), scene)) == first, "selects the same as another instance", first)


def _check_observe(build: BuildStrategy, scene: Scene) -> None:
    """Check that `observe` accepts any feedback, and that a selection depends on feedback and arguments alone."""

    def observe_and_select() -> object:
        strategy = build()
        for step in range(scene.seed % (len(_FEEDBACK) + 1)):
            values = copy.deepcopy(_FEEDBACK[(scene.seed + step) % len(_FEEDBACK)])
            try:
                strategy.observe(Feedback(step, values))
            except StrategyFault:
                raise
            except Exception as error:
                rule = "observes any feedback"
                detail = f"rule '{rule}' is broken: {error!r} for {values!r}"
                raise StrategyFault(detail, name=rule, value=values, bound=rule) from error
        return _answer(_select(strategy, scene))

    first = observe_and_select()
    _rule(observe_and_select() == first, "selects the same as another instance that observed the same", first)


def _answer(answer: Selection | Waiting) -> object:
    if isinstance(answer, Waiting):
        return answer.reason
    weights = None if answer.weights is None else np.asarray(answer.weights).tolist()
    return np.asarray(answer.rows).tolist(), weights


def _check_evictions(evictions: Evictions, groups: Groups, what: str) -> Evictions:
    """Check what a plug-in drops; return it as lists, which can be compared."""
    _rule(isinstance(evictions, Evictions), f"{what} returns Evictions", evictions)
    _rule(len(evictions.rows) == len(evictions.reasons), f"{what} gives one reason per group", evictions)
    _rule(
        not len(evictions.rows) or are_rows(np.asarray(evictions.rows)),
        f"{what} names whole groups, by their row",
        evictions,
    )
    _rule(len(set(evictions.rows)) == len(evictions.rows), f"{what} names a group once", evictions.rows)
    _rule(
        set(evictions.rows) <= set(groups.row.tolist()), f"{what} names only groups that it was given", evictions.rows
    )
    for reason in set(evictions.reasons):
        _rule(bool(REASON_WORD.fullmatch(reason)), f"a reason of {what} is a word that can label a metric", reason)
    return _listed(evictions)


def _listed(evictions: Evictions) -> Evictions:
    return Evictions(np.asarray(evictions.rows, np.int64).tolist(), list(evictions.reasons))


def _check_evict(build: BuildStrategy, scene: Scene) -> None:
    """Check that groups are evicted only if no later batch would select them; the core evicts too stale ones first."""
    strategy = build()
    later = scene.seed % (min(strategy.max_staleness or 0, 50) + 3)
    version = scene.view.version + later
    view = dataclasses.replace(scene.view, version=version, step=version, published_version=version)
    groups = scene.groups()
    if strategy.max_staleness is not None:
        groups = groups.take(version - groups.policy_version.astype(np.int64) <= strategy.max_staleness)
    evictions = _check_evictions(strategy.evict(groups.unread_copy(), view), groups, "evict")
    _rule(_listed(strategy.evict(groups.unread_copy(), view)) == evictions, "evicts the same again", evictions)
    gone = np.isin(groups.row, np.array(evictions.rows, np.int64))
    for ahead in range(4 if gone.any() else 0):
        moment = dataclasses.replace(view, step=view.step + ahead, version=version + ahead)
        offered = groups.take(gone)
        chosen = strategy.select(offered, moment, Budget(None, 1, 4096), scene.rng())
        _rule(isinstance(chosen, Waiting), "evicts only groups that it would never select", evictions)


def _check_admit(build: BuildStrategy, scene: Scene) -> None:
    """Check that admission ends after grants without arrivals: producers must not run ahead without bound."""
    strategy, view = build(), scene.view
    for _ in range(_MAX_GRANTS):
        admitted = strategy.admit(view, scene.flow)
        _rule(isinstance(admitted, int) and admitted >= 0, "admits a number >= 0", admitted)
        if not admitted:
            return
        due = max(0, view.tickets_due - admitted)
        view = dataclasses.replace(view, tickets_out=view.tickets_out + admitted, tickets_due=due)
    _rule(False, f"admits no more after {_MAX_GRANTS} grants without an arrival", view.tickets_out)


_STRATEGY_RULES = (
    _check_selection,
    _check_repeatable,
    _check_observe,
    _check_evict,
    _check_admit,
)


def _check_drop(build: BuildFilter, scene: Scene) -> None:
    groups = scene.groups()
    evictions = _check_evictions(build().drop(groups, scene.view), groups, "drop")
    for name, column in scene.columns.items():
        _rule(np.array_equal(getattr(groups, name), column), "drop leaves its groups unchanged", name)
    filter_ = build()
    filter_.drop(scene.groups().take(np.arange(0)), scene.view)
    _rule(_listed(filter_.drop(scene.groups(), scene.view)) == evictions, "drops the same again", evictions)


def _check_refusal(build: BuildFilter, scene: Scene) -> None:
    """Check that `check` refuses a run only if `drop` leaves no group that fits a batch."""
    groups, budget = scene.groups(), scene.view.budget
    held = groups.longest_tokens <= budget.seq_len
    if budget.tokens is not None:
        held &= groups.tokens <= budget.tokens
    for size in (None, *np.unique(groups.rollouts).tolist()):
        try:
            build().check(budget, size)
        except Invalid as refusal:
            _rule(refusal.name is not None, "check names the field that it refuses", refusal.detail)
            those = groups.take(held if size is None else held & (groups.rollouts == size))
            left = len(those) - len(build().drop(those, scene.view).rows)
            _rule(not left, "check refuses only runs of which drop leaves no group", {"group_size": size, "left": left})
