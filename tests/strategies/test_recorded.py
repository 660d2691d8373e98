"""`recorded`: the sizes of a recording, in the order of storing, and no tickets."""

from __future__ import annotations

import numpy as np
import pytest

from replaybuf.errors import Invalid
from replaybuf.kernel.strategy.contract import Budget, Selection, Waiting
from replaybuf.kernel.strategy.plugin_set import build_strategy
from tests.builders import buffer_view, live_groups


@pytest.mark.parametrize(("step", "expected"), [(0, [1, 2]), (1, [1, 2, 3]), (2, None), (3, None)])
def test_each_step_takes_as_many_groups_as_it_had(step: int, expected: list[int] | None) -> None:
    strategy = build_strategy("recorded", {"sizes": [2, 3, 9]})
    groups = live_groups([8] * 4)
    chosen = strategy.select(groups, buffer_view(step=step), Budget(None, 9, 64), np.random.default_rng(0))
    if expected is None:
        assert chosen == Waiting("too_few_groups")
    else:
        assert isinstance(chosen, Selection) and list(chosen.rows) == groups.row[: len(expected)].tolist()


def test_a_size_of_zero_is_refused() -> None:
    with pytest.raises(Invalid, match="sizes"):
        build_strategy("recorded", {"sizes": [0]})
