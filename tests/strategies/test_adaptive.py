"""Adaptive admission: within the window, by measured speeds."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.strategy import Budget, Flow
from replaybuf_strategies.one_step_off_policy import OneStepOffPolicy, OneStepOffPolicyOptions
from tests.builders import buffer_view

FLOWS = st.builds(
    Flow,
    now_s=st.just(0.0),
    tokens_per_group=st.floats(1, 1000),
    step_s=st.just(0.0) | st.floats(1e-3, 1e4),
    group_s=st.just(0.0) | st.floats(1e-3, 1e4),
    waited=st.floats(0, 1),
    too_stale=st.floats(0, 2),
)
BUDGETS = st.sampled_from([Budget(None, 8, 64), Budget(4000, None, 64), Budget(4000, 8, 64)])


def admitted(flow: Flow, *, adaptive: bool = True, max_staleness: int = 8, **view: Any) -> int:
    """Ask one-step-off-policy for its admission."""
    strategy = OneStepOffPolicy(OneStepOffPolicyOptions(max_staleness=max_staleness, adaptive=adaptive))
    return strategy.admit(buffer_view(**view), flow)


@given(FLOWS, BUDGETS, st.integers(0, 3), st.integers(0, 20), st.integers(0, 100), st.integers(0, 100))
def test_adaptive_admission_only_narrows_the_window(
    flow: Flow, budget: Budget, max_staleness: int, step: int, live: int, out: int
) -> None:
    """0 <= adaptive <= fixed; more live, or more out, never admits more; slower groups never admit less."""
    view: dict[str, Any] = {
        "budget": budget,
        "step": step,
        "version": step,
        "published_version": max(0, step - 1),
        "steps_done": max(0, step - 1),
        "groups_live": live,
        "tokens_live": 100 * live,
        "tickets_out": out,
    }
    room = admitted(flow, max_staleness=max_staleness, **view)
    assert 0 <= room <= admitted(flow, adaptive=False, max_staleness=max_staleness, **view)
    fuller: dict[str, Any] = {"groups_live": live + 1, "tokens_live": 100 * (live + 1)}
    assert admitted(flow, max_staleness=max_staleness, **(view | fuller)) <= room
    assert admitted(flow, max_staleness=max_staleness, **(view | {"tickets_out": out + 1})) <= room
    if flow.group_s and flow.step_s:
        slower = dataclasses.replace(flow, group_s=2 * flow.group_s)
        assert admitted(slower, max_staleness=max_staleness, **view) >= room


@given(FLOWS, BUDGETS, st.integers(0, 3), st.integers(0, 20))
def test_an_empty_buffer_always_gets_the_next_batch(flow: Flow, budget: Budget, max_staleness: int, step: int) -> None:
    """No measurement can starve the next batch."""
    view: dict[str, Any] = {
        "budget": budget,
        "step": step,
        "version": step,
        "published_version": step,
        "steps_done": step,
    }
    room = admitted(flow, max_staleness=max_staleness, **view)
    enough = admitted(flow, adaptive=False, max_staleness=0, **view)
    assert room >= enough


def test_the_whole_window_is_open_until_speeds_are_measured() -> None:
    """As after a restart."""
    assert admitted(Flow(0.0, 10.0), budget=Budget(None, 8, 64)) == 9 * 8


@pytest.mark.parametrize(
    ("change", "batches"),
    [({}, 3.5), ({"waited": 0.25}, 4.5), ({"too_stale": 0.125}, 3.0), ({"too_stale": 2.0}, 2.0)],
)
def test_waits_raise_admission_and_waste_lowers_it(change: dict[str, Any], batches: float) -> None:
    """L = tau, B = 16: two batches in hand, one in generation, half a batch for its spread."""
    flow = dataclasses.replace(Flow(0.0, 10.0, step_s=40.0, group_s=40.0), **change)
    assert admitted(flow, budget=Budget(None, 16, 64)) == batches * 16


def test_the_documented_example_is_right() -> None:
    """docs/strategies.md, one-step-off-policy."""
    flow = Flow(0.0, 10.0, step_s=45.0, group_s=40.0)
    view: dict[str, Any] = {"budget": Budget(None, 64, 64), "step": 6, "published_version": 5, "steps_done": 5}
    assert admitted(flow, max_staleness=4, **view) == 136
    assert admitted(flow, max_staleness=4, adaptive=False, **view) == 256


def test_nothing_is_admitted_between_the_last_ack_and_the_publication() -> None:
    """The old weights would sample it, so it would be one version staler at use."""
    flow = Flow(0.0, 10.0, step_s=40.0, group_s=40.0)
    common: dict[str, Any] = {"budget": Budget(None, 16, 64), "step": 6, "version": 6, "groups_live": 40}
    before = admitted(flow, **common, steps_done=5, published_version=5)
    acked = admitted(flow, **common, steps_done=6, published_version=5)
    published = admitted(flow, **common, steps_done=6, published_version=6)
    assert (before, acked, published) == (0, 0, 16)
