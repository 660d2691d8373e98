"""What the core does with the answer of a strategy."""

from __future__ import annotations

import pytest

from replaybuf.kernel.strategy import selection
from replaybuf.kernel.strategy.contract import Selection
from replaybuf.wire.config import BatchSpec
from tests.kernel.test_eviction import Trial


def test_a_batch_has_at_most_the_groups_that_its_ledger_record_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token budget alone does not bound the number of groups; the first of those that the strategy chose stay."""
    trial = Trial(batch=BatchSpec(tokens_per_batch=50, groups_per_batch=None))
    trial.store_many(8)
    chosen = trial.selector.choose()
    assert isinstance(chosen, Selection) and len(chosen.rows) > 3
    monkeypatch.setattr(selection, "MOST_GROUPS", 3)
    fewer = trial.selector.choose()
    assert isinstance(fewer, Selection) and list(fewer.rows) == list(chosen.rows[:3])
