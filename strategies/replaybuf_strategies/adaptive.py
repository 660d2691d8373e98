"""Admission by measured speeds: as few groups as keep the trainer busy, within what the staleness window allows.

A trainer that never waits takes B groups every `step_s` (tau), and a group takes `group_s` (L) from ticket to store. By
Little's law B L / tau groups are on their way at any time; two more batches are the one in training and the next. So
groups are let in up to

    K = 2 + L / tau + 2 sqrt(L / (tau B)) + 4 (waited - too_stale)    batches beyond the step whose policy is loaded,

at least 2. The square root is two standard deviations of what is on its way, were arrivals independent. The last term
corrects what the model misses: up by the share of time the trainer waited, down by the share of groups that came to
nothing. It only ever narrows the window, so no bound depends on what was measured.
"""

from __future__ import annotations

import math

from replaybuf.strategy import BufferView, Flow, capacity_of

_IN_HAND = 2
_DEVIATIONS = 2.0
_PULL = 4.0


def adaptive_capacity(buffer: BufferView, flow: Flow, window: int) -> int:
    """Return the groups that may be started now, at most `window`; all of these while speeds are not known yet."""
    if not flow.step_s or not flow.group_s:
        return window
    budget = buffer.budget
    by_groups = math.inf if budget.groups is None else budget.groups
    by_tokens = math.inf if budget.tokens is None else budget.tokens / flow.tokens_per_group
    flying = flow.group_s / flow.step_s
    spread = _DEVIATIONS * math.sqrt(flying / max(1.0, min(by_groups, by_tokens)))
    ahead = _IN_HAND + max(0.0, flying + spread + _PULL * (flow.waited - flow.too_stale))
    # Between the last ack of a version and its successor's publication nothing is let in: it would be older by one.
    loaded = min(buffer.steps_done, (buffer.published_version + 1) * buffer.steps_per_publish - 1)
    return min(window, capacity_of(buffer, flow, loaded + ahead - buffer.step))
