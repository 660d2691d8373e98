"""Admission by measured speeds: as few groups as keep the trainer busy, within the staleness window.

A trainer that never waits takes B groups every `step_s` (tau), and a group takes `group_s` (L) from ticket to store.
By Little's law B L / tau groups are in generation at any time. Two more batches are the one in training and the next.
So groups are admitted up to

    K = 2 + L / tau + 2 sqrt(L / (tau B)) + 4 (waited - too_stale)    batches beyond the step whose policy is loaded,

at least 2. The square root is two standard deviations of the number in generation, if arrivals are independent. The
last term corrects the model: up by the share of time the trainer waited, down by the share of groups that became too
stale. The result never exceeds the window, so no staleness bound depends on measurements.
"""

from __future__ import annotations

import math

from replaybuf.strategy import BufferView, Flow, capacity_of

_IN_HAND = 2
_DEVIATIONS = 2.0
_CORRECTION = 4.0


def adaptive_capacity(buffer: BufferView, flow: Flow, window: int) -> int:
    """Return the number of groups that may start now: at most `window`, and `window` until speeds are measured."""
    if not flow.step_s or not flow.group_s:
        return window
    budget = buffer.budget
    by_groups = math.inf if budget.groups is None else budget.groups
    by_tokens = math.inf if budget.tokens is None else budget.tokens / flow.tokens_per_group
    ahead = _IN_HAND + in_generation(flow, min(by_groups, by_tokens))
    # Admits nothing between the last ack of a version and the next publication: such groups would be older by one.
    loaded = min(buffer.steps_done, (buffer.published_version + 1) * buffer.steps_per_publish - 1)
    return min(window, capacity_of(buffer, flow, loaded + ahead - buffer.step))


def in_generation(flow: Flow, groups_per_step: float) -> float:
    """Return how many steps' worth of new groups are in generation, with the spread and the correction; at least 0.

    Speeds must be measured.
    """
    generating = flow.group_s / flow.step_s
    spread = _DEVIATIONS * math.sqrt(generating / max(1.0, groups_per_step))
    return max(0.0, generating + spread + _CORRECTION * (flow.waited - flow.too_stale))
