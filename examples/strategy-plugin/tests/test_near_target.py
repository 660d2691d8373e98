"""The contract of strategies, and the two rules of this one."""

import numpy as np
from replaybuf_near_target import NearTarget, NearTargetOptions

from replaybuf.strategy import Budget, BufferView, Groups, Selection
from replaybuf.testing import StrategyContract


class TestContract(StrategyContract):
    """The contract suite, with default options."""

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


def test_groups_nearest_to_the_target_come_first() -> None:
    assert chosen([1.0, 0.5, 0.0, 0.4], [2, 2, 2, 2], 2) == [1, 3]


def test_groups_on_their_last_version_come_before_all_others() -> None:
    assert chosen([0.5, 1.0, 0.5], [2, 0, 1], 2) == [1, 0]
