"""The contract that every strategy keeps, and the two rules that make this one."""

import numpy as np
from replaybuf_near_target import NearTarget, NearTargetOptions

from replaybuf.strategy import Budget, BufferView, Groups, Selection
from replaybuf.testing import StrategyContract


class TestContract(StrategyContract):
    """The suite of replaybuf, with the options by default."""

    def build(self) -> NearTarget:
        return NearTarget(NearTargetOptions())


def chosen(rewards: list[float], versions: list[int], wanted: int) -> list[int]:
    """Select among groups with these mean rewards and policy versions at version 2; return their rows."""
    n = len(rewards)
    columns = {name: np.zeros(n, np.int32) for name in Groups.COLUMNS}
    columns |= {"row": np.arange(n), "policy_version": np.array(versions), "reward_mean": np.array(rewards)}
    columns["tokens"] = np.full(n, 10)
    budget = Budget(tokens=None, groups=wanted, seq_len=64)
    view = BufferView(2, 2, 2, 1, n, 10 * n, 0, budget)
    selection = NearTarget(NearTargetOptions()).select(Groups(**columns), view, budget, np.random.default_rng(0))
    assert isinstance(selection, Selection)
    return selection.rows.tolist()


def test_the_nearest_to_the_target_come_first() -> None:
    assert chosen([1.0, 0.5, 0.0, 0.4], [2, 2, 2, 2], 2) == [1, 3]


def test_what_would_become_too_stale_comes_before_all() -> None:
    assert chosen([0.5, 1.0, 0.5], [2, 0, 1], 2) == [1, 0]
