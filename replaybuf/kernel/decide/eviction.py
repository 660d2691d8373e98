"""Decide which live groups no later batch may use, a bounded piece of the groups at a time.

The core applies the declared bounds to whole columns. It calls the filters, and a strategy with an `evict` of its own,
for the groups that are left.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from replaybuf.kernel.decide.prompts import list_reissued
from replaybuf.kernel.rows.column_bits import ADMITTED_BIT, have_all
from replaybuf.kernel.rows.index import LIVE, Index, Numbers, Positions
from replaybuf.kernel.state.run_state import RunState
from replaybuf.kernel.strategy.answer_checks import check_evictions
from replaybuf.kernel.strategy.contract import BufferView, Evictions, Groups
from replaybuf.kernel.strategy.selection import Selector
from replaybuf.wire.config import LARGEST_INTEGER
from replaybuf.wire.drop_reasons import DeadLetterReason
from replaybuf.wire.group import hash_name
from replaybuf.wire.ledger import AnyRecord, DeadLetterRecord, EvictRecord

PIECE = 65_536
"""Most groups that are checked at once, and so the most numbers in one ledger record: at most 330 kB."""
PLUGIN_PIECE = 8_192
"""Most groups in one call of a plug-in. A loop over so many groups in Python takes about 10 ms."""

_any, _all, _most = np.logical_or.reduce, np.logical_and.reduce, np.maximum.reduce

ByReason = dict[str, list[int]]
Evict = Callable[[Groups, BufferView], Evictions]


def decide_removals(
    state: RunState, selector: Selector, now_s: float, only: Numbers | None = None, *, filtered: bool = False
) -> Iterator[list[AnyRecord]]:
    """Yield for each piece of the live groups (of `only`) the records that remove unusable ones, often none.

    The caller applies the records of a piece before it takes the next piece, and may pause between pieces. Filters see
    a group when it arrives (`only`), and all groups again if `filtered`. Raises `StrategyFault`.
    """
    index, filtered = state.index, filtered or only is not None
    may_ask = state.phase != "paused"  # a failed plug-in is not called again before the run resumes
    asks_plugins = may_ask and (selector.inputs.plugins.evicts or (filtered and bool(selector.config.filters)))
    size, step = len(index) if only is None else len(only), PLUGIN_PIECE if asks_plugins else PIECE
    for start in range(0, size, step):
        if only is None:
            rows = start + np.flatnonzero(index["state"][start : start + step] == LIVE)
        else:
            rows = index.rows_of(only[start : start + step])
            rows = rows[index["state"][rows] == LIVE]
        yield list(_remove(state, selector, now_s, rows, filtered)) if len(rows) else []


def keeps_all(state: RunState, selector: Selector, arrivals: npt.NDArray[Any]) -> bool:
    """Return whether the declared bounds alone decide about these new index entries, and keep all of them.

    So nearly all arrivals are settled without rows, views and plug-ins; for the others call `decide_removals`.
    """
    bounds = selector.inputs.arrival_bounds()
    if bounds is None or _any(arrivals["adapter"]) or _most(arrivals["tokens"]) > bounds.tokens:
        return False
    kept = True
    for rule in bounds.rules:
        kept = kept and bool(_all(rule.kept(*map(arrivals.__getitem__, rule.columns))))
    return kept


def _remove(state: RunState, selector: Selector, now_s: float, rows: Positions, filtered: bool) -> Iterator[AnyRecord]:
    index, config = state.index, selector.config
    rows, unfit = _split_unfit(state, selector, rows)
    if unfit:
        yield DeadLetterRecord(numbers=unfit, at_s=now_s)
    if state.phase == "paused":
        return
    unusable: ByReason = {}
    for adapter in config.adapter_names:
        own_rows = rows[index["adapter"][rows] == hash_name(adapter)] if adapter else rows
        if config.phase_of(adapter) == "finished":
            if len(own_rows):
                unusable.setdefault("adapter_removed", []).extend(index["number"][own_rows].tolist())
            continue
        own_rows = _apply_bounds(state, selector, adapter, own_rows, unusable)
        if len(own_rows):
            _ask_plugins(state, selector, adapter, own_rows, filtered, unusable)
    if unusable:
        reissued = list_reissued(state, selector, unusable.get("too_stale", ()))
        numbers = {reason: sorted(own) for reason, own in unusable.items()}
        yield EvictRecord(step=state.next_step, numbers=numbers, reissued=reissued, at_s=now_s)


def _split_unfit(state: RunState, selector: Selector, rows: Positions) -> tuple[Positions, ByReason]:
    """Return the rows that a batch can hold, and by reason the others, stored without an admission check."""
    # Columns of the index, not `Groups`: building those takes longer than all checks of one arrival.
    config, index = selector.config, state.index
    adapters = index["adapter"][rows]
    if config.adapters:
        strange = ~np.isin(adapters, [hash_name(name) for name in config.adapters])
    else:
        strange = adapters != 0
    over = ~strange & (index["tokens"][rows] > (state.token_budget or LARGEST_INTEGER))
    unfit = strange | over
    rows_by_reason: dict[DeadLetterReason, npt.NDArray[np.bool_]] = {"over_budget": over, "unknown_adapter": strange}
    if config.admissions:
        rows_by_reason["not_admitted"] = ~unfit & ~have_all(index["columns"][rows], ADMITTED_BIT)
        unfit |= rows_by_reason["not_admitted"]
    if not np.count_nonzero(unfit):
        return rows, {}
    return rows[~unfit], {
        why: index["number"][rows[unfit_rows]].tolist()
        for why, unfit_rows in rows_by_reason.items()
        if unfit_rows.any()
    }


def _apply_bounds(state: RunState, selector: Selector, adapter: str, rows: Positions, unusable: ByReason) -> Positions:
    """Add the groups that no later step may use to `unusable`; return the other rows."""
    for rule in selector.inputs.eviction_rules(adapter):
        kept = rule.holds(state.index, rows)
        if not kept.all():
            unusable.setdefault(rule.reason, []).extend(state.index["number"][rows[~kept]].tolist())
            rows = rows[kept]
    return rows


def _ask_plugins(
    state: RunState, selector: Selector, adapter: str, rows: Positions, filtered: bool, unusable: ByReason
) -> None:
    """Add what the plug-ins drop to `unusable`, in their order: the first one that drops a group gives the reason."""
    plugins = list(_plugins(selector, filtered))
    if not plugins:
        return  # the view sums up all live groups
    view = selector.inputs.view(state.next_step, adapter=adapter)
    for plugin, call, required in plugins:
        bits = state.pool.columns.bits_of(required)
        seen = rows[have_all(state.index["columns"][rows], bits)] if bits else rows
        if not len(seen):
            continue
        ask = functools.partial(_checked, plugin, call, state.index, seen, view)
        evictions = selector.ask("evict", ask, plugin)
        for number, reason in zip(evictions.rows, evictions.reasons, strict=True):
            unusable.setdefault(reason, []).append(int(number))
        rows = rows[~np.isin(state.index["number"][rows], evictions.rows)]


def _plugins(selector: Selector, filtered: bool) -> Iterator[tuple[str, Evict, Sequence[str]]]:
    """Yield each plug-in with its call and the columns without which it does not see a group."""
    plugins = selector.inputs.plugins
    required, *of_filters = plugins.required
    if selector.inputs.plugins.evicts:
        yield f"strategy {selector.config.strategy.name!r}", selector.strategy.evict, required
    for spec, filter_, needed in (
        zip(selector.config.filters, plugins.filters, of_filters, strict=True) if filtered else ()
    ):
        yield f"filter {spec.name!r}", filter_.drop, needed


def _checked(plugin: str, call: Evict, index: Index, rows: Positions, view: BufferView) -> Evictions:
    return check_evictions(plugin, call(index.groups(rows), view), index, rows)
