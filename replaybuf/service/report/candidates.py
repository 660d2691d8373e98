"""Count what a batch is chosen from: live groups, those that rules leave out, and those that were dropped before.

Counts only, so that a batch from a million groups takes as long as before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from replaybuf.kernel.state.history import AttachedTrainer
from replaybuf.kernel.state.run_state import RunState
from replaybuf.kernel.strategy.inputs import StrategyInputs
from replaybuf.kernel.strategy.selection import Selector
from replaybuf.wire.answer.explain import AdapterCandidates, Arrivals, Candidates, ShownLayout
from replaybuf.wire.contract import Amount


def count_candidates(state: RunState, selector: Selector, rejected: Mapping[str, int]) -> Candidates:
    """Count the candidates of the next batch; call it right after `Selector.choose`. `rejected` appends by reason."""
    config = selector.config
    dropped: Counter[str] = Counter()
    for counts in state.pool.counts.values():
        dropped += counts.evicted + counts.dead_lettered
    return Candidates(
        stored=state.stored,
        dropped=dict(dropped),
        rejected=dict(rejected),
        adapters={name: _count_adapter(state, selector.inputs, name) for name in config.active_adapters},
        filters=[spec.name for spec in config.filters],
        layout=layout_of(state.attachment),
    )


def _count_adapter(state: RunState, inputs: StrategyInputs, adapter: str) -> AdapterCandidates:
    live, usable = state.pool.live.totals(adapter), inputs.usable_count(adapter)
    left_out: dict[str, int] = {}
    if usable is None or usable < live.groups:
        left_out, usable = _count_left_out(state, inputs, adapter)
    budget = inputs.own_budget(adapter)
    amount = Amount(budget.groups or 0, budget.tokens or 0)
    return AdapterCandidates(live.groups, live.tokens, usable, amount, left_out)


def _count_left_out(state: RunState, inputs: StrategyInputs, adapter: str) -> tuple[dict[str, int], int]:
    """Count the live groups of an adapter by the first rule that they break, and those that keep all rules."""
    index, step = state.index, state.next_step
    fits = state.pool.live.mask(adapter)
    left, left_out = int(np.count_nonzero(fits)), dict[str, int]()
    for rule in inputs.usability_rules(step, adapter):
        fits &= rule.holds(index)
        kept = int(np.count_nonzero(fits))
        if kept < left:
            left_out[rule.reason] = left_out.get(rule.reason, 0) + left - kept
            left = kept
    return left_out, left


def layout_of(attachment: AttachedTrainer | None) -> ShownLayout | None:
    """Return the layout of a trainer; None if none is attached."""
    if attachment is None:
        return None
    return ShownLayout(attachment.dp_world_size, attachment.seq_len, attachment.pad_to_multiple_of, attachment.cost)


def arrivals_between(before: Candidates | None, now: Candidates) -> Arrivals:
    """Return what was stored, dropped and rejected between two batches; None = since the run began.

    A rewind takes drops back, so a count may shrink: then nothing was dropped for that reason.
    """
    stored = now.stored - (before.stored if before else 0)
    dropped = _grown(before.dropped if before else {}, now.dropped)
    rejected = _grown(before.rejected if before else {}, now.rejected)
    return Arrivals(stored=stored, dropped=dropped, rejected=rejected)


def _grown(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    return {reason: count - before.get(reason, 0) for reason, count in now.items() if count > before.get(reason, 0)}
