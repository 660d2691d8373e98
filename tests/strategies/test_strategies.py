"""Built-in strategies, loaded by entry point: the groups they take, and their order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.errors import Invalid
from replaybuf.kernel.strategy.plugin_set import build_strategy, resolve_config
from replaybuf.plugins.entry_points import STRATEGIES, load, names
from replaybuf.strategy import Budget, Flow, Groups, Selection, Strategy, Waiting
from replaybuf.wire.config import BatchSpec, Limits, StrategySpec
from tests.builders import buffer_view, live_groups, run_config

BUILT_IN = ("on-policy", "one-step-off-policy")


def select(strategy: Strategy[Any], groups: Groups, budget: Budget, seed: int = 0) -> list[int] | str:
    """Ask for a batch: the rows in order, or the reason for waiting."""
    view = buffer_view(groups_live=len(groups), budget=budget)
    chosen = strategy.select(groups, view, budget, np.random.default_rng(seed))
    return chosen.reason if isinstance(chosen, Waiting) else chosen.rows.tolist()


def test_both_built_ins_are_installed() -> None:
    assert set(BUILT_IN) <= set(names(STRATEGIES))


def test_on_policy_takes_groups_in_the_order_they_were_stored() -> None:
    strategy = build_strategy("on-policy", {})
    assert select(strategy, live_groups([30, 30, 30, 30]), Budget(100, None, 64)) == [1, 2, 3]
    assert (strategy.max_staleness, strategy.max_uses, strategy.look_ahead) == (0, 1, 0)


def test_on_policy_has_no_options() -> None:
    with pytest.raises(Invalid, match="valid options: none"):
        build_strategy("on-policy", {"max_staleness": 1})


def test_on_policy_admits_nothing_between_a_step_and_its_publication() -> None:
    """Such groups would be too stale on arrival."""
    strategy, flow = build_strategy("on-policy", {}), Flow(0.0, 10.0)
    budget = Budget(None, 4, 64)
    assert strategy.admit(buffer_view(step=2, version=2, published_version=1, budget=budget), flow) == 0
    assert strategy.admit(buffer_view(step=2, version=2, published_version=2, budget=budget), flow) == 4


def test_one_step_off_policy_defaults() -> None:
    strategy = build_strategy("one-step-off-policy", {})
    assert (strategy.max_staleness, strategy.max_uses, strategy.look_ahead) == (1, 1, 1)
    assert build_strategy("one-step-off-policy", {"max_staleness": 7}).max_staleness == 7


@pytest.mark.parametrize("k", [-1, 2**31, 10**30, 1.5, None])
def test_one_step_off_policy_rejects_an_invalid_staleness(k: object) -> None:
    with pytest.raises(Invalid, match=r"valid options: max_staleness: int >= 0 \(default 1\)"):
        build_strategy("one-step-off-policy", {"max_staleness": k})


def test_one_step_off_policy_takes_the_oldest_version_first() -> None:
    """Groups with the least time left go first, so that a slow prompt does not become too stale."""
    groups = live_groups([30, 30, 30, 30, 30], versions=[3, 2, 3, 2, 3])
    assert select(build_strategy("one-step-off-policy", {}), groups, Budget(None, 4, 64)) == [2, 4, 1, 3]


def test_one_step_off_policy_admits_k_steps_ahead() -> None:
    """Step 2 in training with version 1 published: k = 1 allows step 2, k = 2 also step 3."""
    flow, view = Flow(0.0, 10.0), buffer_view(step=2, version=2, published_version=1, budget=Budget(None, 4, 64))
    admitted = [build_strategy("one-step-off-policy", {"max_staleness": k}).admit(view, flow) for k in range(4)]
    assert admitted == [0, 4, 8, 12]


@given(
    st.sampled_from(BUILT_IN),
    st.lists(st.tuples(st.integers(2, 60), st.integers(0, 3)), max_size=12),
    st.none() | st.integers(60, 200),
    st.none() | st.integers(1, 6),
    st.integers(0, 3),
)
def test_a_built_in_keeps_the_budget_and_is_deterministic(
    name: str, drawn: list[tuple[int, int]], tokens: int | None, groups: int | None, seed: int
) -> None:
    """Whole groups, each at most once; the random generator has no effect."""
    if tokens is None and groups is None:
        tokens = 100
    budget = Budget(tokens, groups, 64)
    live = live_groups([size for size, _ in drawn], versions=[version for _, version in drawn], first_row=50)
    strategy = build_strategy(name, {})
    chosen = select(strategy, live, budget, seed)
    assert chosen == select(strategy, live, budget, seed + 1)
    if isinstance(chosen, str):
        assert chosen == ("too_few_tokens" if groups is None else "too_few_groups")
        assert sum(size for size, _ in drawn) < (tokens or 10**9) and len(drawn) < (groups or 10**9)
    else:
        assert len(chosen) == len(set(chosen)) > 0
        assert set(chosen) <= set(live.row.tolist())
        assert groups is None or len(chosen) <= groups
        assert tokens is None or sum(drawn[row - 50][0] for row in chosen) <= tokens


@pytest.mark.parametrize("name", names(STRATEGIES))
@pytest.mark.parametrize(
    ("batch", "room"), [({"tokens_per_batch": 1000}, 1000), ({"groups_per_batch": 8, "tokens_per_batch": None}, 64)]
)
def test_limits_below_one_batch_are_rejected_for_every_strategy(name: str, batch: dict[str, Any], room: int) -> None:
    """One token below the smallest batch is rejected; the smallest batch is accepted."""
    for tokens in (room, room - 1):
        config = run_config(
            batch=BatchSpec(**batch),
            strategy=StrategySpec(name=name),
            group_size=4,
            limits=Limits(max_tokens_live=tokens),
        )
        if tokens == room:
            assert resolve_config(config)[0].limits.max_tokens_live == room
            continue
        with pytest.raises(Invalid) as caught:
            resolve_config(config)
        assert (caught.value.name, caught.value.value, caught.value.bound) == ("limits.max_tokens_live", tokens, room)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_is_a_strategy_with_a_docstring_and_frozen_options(name: str) -> None:
    cls = load(STRATEGIES, name)
    assert issubclass(cls, Strategy) and cls.__doc__
    assert cls.Options.__struct_config__.frozen and cls.Options.__struct_config__.forbid_unknown_fields


def test_one_group_can_fill_a_batch() -> None:
    chosen = build_strategy("on-policy", {}).select(
        live_groups([100]), buffer_view(), Budget(100, None, 64), np.random.default_rng(0)
    )
    assert isinstance(chosen, Selection) and chosen.rows.tolist() == [1]
