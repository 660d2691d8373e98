"""The rules that answers of plug-ins are held to; to break one is a `StrategyFault` naming plug-in, rule and value."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from replaybuf.errors import StrategyFault
from replaybuf.strategy import REASONS, Budget, Evictions, Groups, Rows, Selection, Waiting

REASON = re.compile(r"[a-z][a-z0-9_]{0,63}")
"""A reason is a label of a metric."""


def hold(strategy: str, step: int, rules: Iterable[tuple[str, bool, Any]]) -> None:
    """Hold a strategy to rules: each with whether it was kept and the value that says so. Raises `StrategyFault`."""
    _hold(f"strategy {strategy!r}", strategy, f" at step {step}", rules)


def _hold(plugin: str, name: str, when: str, rules: Iterable[tuple[str, bool, Any]]) -> None:
    for rule, kept, value in rules:
        if not kept:
            raise StrategyFault(f"{plugin} broke the rule '{rule}'{when}: {value}", name=name, value=value, bound=rule)


def check_selection(strategy: str, step: int, chosen: Selection | Waiting, groups: Groups, budget: Budget) -> None:
    """Hold what a strategy chose at `step` to its contract. Raises `StrategyFault` naming the strategy and the rule."""
    if isinstance(chosen, Waiting):
        hold(strategy, step, [("gives a reason of the closed list", chosen.reason in REASONS, chosen.reason)])
        return
    hold(strategy, step, [("answers Selection or Waiting", isinstance(chosen, Selection), type(chosen).__name__)])
    rows = np.asarray(chosen.rows, np.int64)
    weights = None if chosen.weights is None else np.asarray(chosen.weights, np.float32)
    unfit = 0 if weights is None else int(np.count_nonzero(~(np.isfinite(weights) & (weights > 0))))
    distinct = np.unique(rows)
    at = _positions(distinct, groups)
    given = at[at >= 0]
    tokens = int(groups.take(given).tokens.sum(dtype=np.int64))
    rules = [
        ("selects at least one group", len(rows) > 0, len(rows)),
        ("selects a group once", len(distinct) == len(rows), len(rows)),
        ("selects only groups it was given", len(given) == len(distinct), rows[:8].tolist()),
        (f"keeps the token budget of {budget.tokens}", budget.tokens is None or tokens <= budget.tokens, tokens),
        (f"keeps the group budget of {budget.groups}", budget.groups is None or len(rows) <= budget.groups, len(rows)),
        ("gives one weight per group", weights is None or len(weights) == len(rows), len(rows)),
        ("gives finite weights above 0", not unfit, unfit),
    ]
    hold(strategy, step, rules)


def check_evictions(plugin: str, found: Evictions, groups: Groups) -> Evictions:
    """Return what a plug-in drops, held to what it may. Raises `StrategyFault` naming it and the rule."""
    _hold(plugin, plugin, "", [("answers Evictions", isinstance(found, Evictions), type(found).__name__)])
    if not found.rows and not found.reasons:
        return found
    rows = np.asarray(found.rows, np.int64)
    strange = rows[_positions(rows, groups) < 0]
    rules = [
        ("gives one reason per group it drops", len(found.rows) == len(found.reasons), str(len(found.reasons))),
        ("drops only groups it was given", not len(strange), str(strange[:8].tolist())),
        ("gives words as reasons", all(REASON.fullmatch(reason) for reason in found.reasons), str(found.reasons[:8])),
    ]
    _hold(plugin, plugin, "", rules)
    return found


def _positions(rows: Rows, groups: Groups) -> Rows:
    """Find groups by their row, in columns that are sorted by it; -1 for one that is not there."""
    if not len(groups):
        return np.full(len(rows), -1)
    at = np.minimum(np.searchsorted(groups.row, rows), len(groups) - 1)
    return np.where(groups.row[at] == rows, at, -1)
