"""Cost of rollouts by their length."""

from __future__ import annotations

import math

import numpy as np
import pytest

from replaybuf.errors import Invalid
from replaybuf.packing.cost import TYPICAL, rollout_costs, whole_costs
from replaybuf.wire.config import Cost


@pytest.mark.parametrize(
    "cost", [Cost(-1.0, 1.0), Cost(0.0, 0.0), Cost(math.nan, 1.0), Cost(1.0, math.inf), Cost(1e31, 1.0)]
)
def test_invalid_coefficients_are_rejected(cost: Cost) -> None:
    with pytest.raises(Invalid, match="must be in 0") as caught:
        cost.check()
    assert caught.value.name == "cost"


def test_integer_costs_keep_their_ratios_and_sum_without_overflow() -> None:
    lengths = np.array([1, 500, 8192, 2**31 - 1], np.int32)
    whole, real = whole_costs(lengths, TYPICAL), rollout_costs(lengths)
    assert whole.dtype == np.int64 and int(whole.max()) == 2**36
    assert whole / whole.max() == pytest.approx(real / real.max(), abs=2**-36)
    assert 2**26 * int(whole.max()) < 2**63


def test_no_rollouts_cost_nothing() -> None:
    assert whole_costs(np.array([], np.int32), TYPICAL).tolist() == []
