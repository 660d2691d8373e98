"""Checks of the answers of strategies."""

from __future__ import annotations

import numpy as np
import pytest

from replaybuf.errors import StrategyFault
from replaybuf.kernel.rows.index import Index
from replaybuf.kernel.strategy.answer_checks import check_selection
from replaybuf.kernel.strategy.contract import MAX_DETAIL, Budget, Selection, Waiting
from tests.builders import entries


def test_the_error_of_an_empty_selection_recommends_waiting() -> None:
    with pytest.raises(StrategyFault, match=r"returns Waiting\(reason\)' at step 3: rows is empty: Selection\(\[\]\)"):
        check_selection("mine", 3, Selection(np.array([], np.int64)), Index(), [], Budget(None, 1, 64))


def test_the_detail_of_an_answer_to_wait_is_bounded() -> None:
    """It is part of every answer to a trainer that waits."""
    longest = Waiting("too_few_groups", detail="x" * MAX_DETAIL)
    assert check_selection("mine", 3, longest, Index(), [], Budget(None, 1, 64)) == longest
    for detail in ("x" * (MAX_DETAIL + 1), b"bytes"):
        with pytest.raises(StrategyFault, match="gives a detail of at most 256 characters"):
            check_selection("mine", 3, Waiting("no_groups", detail=detail), Index(), [], Budget(None, 1, 64))  # type: ignore[arg-type]


@pytest.mark.parametrize("weight", [0.0, -1.0, np.nan, np.inf, 1e300])
def test_a_weight_that_is_not_finite_and_above_0_breaks_the_rule(weight: float) -> None:
    """1e300 is infinite in the 32 bits of a trainer."""
    index = Index()
    index.insert(np.array([1]), entries({}))
    budget = Budget(None, 1, 64)
    with pytest.raises(StrategyFault, match="gives finite weights above 0"):
        check_selection("mine", 0, Selection(np.array([1]), np.array([weight])), index, [], budget)
    chosen = check_selection("mine", 0, Selection(np.array([1]), np.array([0.5])), index, [], budget)
    assert isinstance(chosen, Selection) and chosen.weights == np.array([0.5])
