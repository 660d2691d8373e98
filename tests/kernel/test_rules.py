"""Checks of the answers of strategies."""

from __future__ import annotations

import numpy as np
import pytest

from replaybuf.errors import StrategyFault
from replaybuf.kernel.index import Index
from replaybuf.kernel.rules import check_selection
from replaybuf.kernel.strategy import Budget, Selection


def test_the_error_of_an_empty_selection_recommends_waiting() -> None:
    with pytest.raises(StrategyFault, match=r"returns Waiting\(reason\)' at step 3: rows is empty: Selection\(\[\]\)"):
        check_selection("mine", 3, Selection(np.array([], np.int64)), Index(), [], Budget(None, 1, 64))
