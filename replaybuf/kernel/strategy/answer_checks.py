"""Checks of the answers of strategies and filters, against the index and not against the columns that they saw.

A broken rule raises `StrategyFault` with the plug-in, the rule and the value.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from replaybuf.errors import StrategyFault
from replaybuf.kernel.rows.index import Index, Numbers, Positions
from replaybuf.kernel.strategy.contract import (
    MAX_DETAIL,
    STRATEGY_REASONS,
    Budget,
    Evictions,
    Selection,
    Waiting,
)
from replaybuf.kernel.strategy.usability import UsabilityRule
from replaybuf.wire.names import REASON_WORD

Rule = tuple[str, bool, Any]
"""A rule, whether it is kept, and the value that was checked."""


def check_rules(strategy: str, step: int, rules: Iterable[Rule]) -> None:
    """Check rules for a strategy in order. Raises `StrategyFault` for the first broken rule."""
    _check_rules(f"strategy {strategy!r}", strategy, f" at step {step}", rules)


def _check_rules(plugin: str, name: str, when: str, rules: Iterable[Rule]) -> None:
    for rule, kept, value in rules:
        if not kept:
            raise StrategyFault(f"{plugin} broke the rule '{rule}'{when}: {value}", name=name, value=value, bound=rule)


def check_selection(
    strategy: str,
    step: int,
    chosen: Selection | Waiting,
    index: Index,
    usable_by: Iterable[UsabilityRule],
    budget: Budget,
) -> Selection | Waiting:
    """Check the answer of a strategy at `step` and return it with arrays.

    `usable_by`: rules for usable groups at this step. Raises `StrategyFault`.
    """
    if isinstance(chosen, Waiting):
        check_rules(strategy, step, _rules_of_waiting(chosen))
        return chosen
    check_rules(strategy, step, _rules_of_form(chosen))
    rows = np.asarray(chosen.rows).astype(np.int64)
    check_rules(strategy, step, _rules_of_groups(rows, index, usable_by, budget))
    if chosen.weights is None:
        return Selection(rows)
    with np.errstate(over="ignore"):  # values beyond 32 bits become infinite; the check below rejects them
        weights = np.asarray(chosen.weights).astype(np.float32)
    unfit = int(np.count_nonzero(~(np.isfinite(weights) & (weights > 0))))
    check_rules(strategy, step, [("gives finite weights above 0", not unfit, unfit)])
    return Selection(rows, weights)


def _rules_of_waiting(waiting: Waiting) -> Iterable[Rule]:
    yield "gives a reason of the closed list", waiting.reason in STRATEGY_REASONS, waiting.reason
    for name, value in (("groups", waiting.groups), ("tokens", waiting.tokens)):
        whole = value is None or (isinstance(value, int | np.integer) and value >= 0)
        yield f"gives usable {name} as a whole number >= 0", bool(whole), repr(value)
    detail = waiting.detail
    short = detail is None or (isinstance(detail, str) and len(detail) <= MAX_DETAIL)
    yield f"gives a detail of at most {MAX_DETAIL} characters", short, repr(detail)[:MAX_DETAIL]


def _rules_of_form(chosen: Selection) -> Iterable[Rule]:
    yield "answers Selection or Waiting", isinstance(chosen, Selection), type(chosen).__name__
    rows = np.asarray(chosen.rows)
    yield "selects at least one group, or returns Waiting(reason)", rows.size > 0, "rows is empty: Selection([])"
    yield "selects whole groups, by their row", are_rows(rows), str(rows.ravel()[:8].tolist())
    if chosen.weights is not None:
        weights = np.asarray(chosen.weights)
        fits = weights.shape == rows.shape and weights.dtype.kind in "fiu"
        yield "gives one weight per group", bool(fits), f"{weights.dtype}{list(weights.shape)} for {len(rows)}"


def are_rows(rows: npt.NDArray[Any]) -> bool:
    """Return whether an array can name rows: whole numbers in one dimension."""
    return rows.ndim == 1 and rows.dtype.kind in "iu"


def _rules_of_groups(
    numbers: Numbers, index: Index, usable_by: Iterable[UsabilityRule], budget: Budget
) -> Iterable[Rule]:
    ascending = np.sort(numbers)  # not `unique`, which takes eight times as long for 100,000 groups
    yield "selects a group once", bool((ascending[1:] > ascending[:-1]).all()), len(numbers)
    rows = index.rows_of(ascending)
    stored = index["number"][rows]
    unknown = [] if len(rows) == len(ascending) else np.setdiff1d(ascending, stored)[:8].tolist()
    yield "selects only groups that are stored", not unknown, unknown
    for rule in usable_by:
        kept = rule.holds(index, rows)
        all_kept = bool(kept.all())
        yield rule.rule, all_kept, [] if all_kept else stored[~kept][:8].tolist()
    tokens = int(index["tokens"][rows].sum(dtype=np.int64))
    yield f"keeps the token budget of {budget.tokens}", budget.tokens is None or tokens <= budget.tokens, tokens
    within = budget.groups is None or len(numbers) <= budget.groups
    yield f"keeps the group budget of {budget.groups}", within, len(numbers)


def check_evictions(plugin: str, evictions: Evictions, index: Index, rows: Positions) -> Evictions:
    """Check what a plug-in drops of the groups at ascending `rows`; return it as tuples. Raises `StrategyFault`."""
    _check_rules(plugin, plugin, "", _rules_of_evictions(evictions, index, rows))
    return Evictions(tuple(np.asarray(evictions.rows).tolist()), tuple(evictions.reasons))


def _rules_of_evictions(evictions: Evictions, index: Index, rows: Positions) -> Iterable[Rule]:
    yield "answers Evictions", isinstance(evictions, Evictions), type(evictions).__name__
    dropped, reasons = np.asarray(evictions.rows), evictions.reasons
    yield "gives one reason per group it drops", dropped.size == len(reasons), str(len(reasons))
    if dropped.size:
        yield "drops whole groups, by their row", are_rows(dropped), str(dropped.ravel()[:8].tolist())
        found_rows = index.rows_of(dropped)
        offered = found_rows[rows[np.minimum(np.searchsorted(rows, found_rows), len(rows) - 1)] == found_rows]
        unknown = np.setdiff1d(dropped, index["number"][offered])
        yield "drops only groups it was given", not len(unknown), str(unknown[:8].tolist())
        words = all(isinstance(reason, str) and REASON_WORD.fullmatch(reason) for reason in reasons)
        yield "gives words as reasons", words, str(list(reasons)[:8])
