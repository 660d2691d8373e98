"""Contract suite that every strategy, filter and admission plug-in must pass, built-in or not.

In a plug-in's own tests:

    from replaybuf.testing import StrategyContract

    class TestMine(StrategyContract):
        def build(self):
            return Mine(MineOptions())

or, without pytest, `check_strategy(lambda: Mine(MineOptions()))` and `check_progress(...)`. A broken rule raises
`StrategyFault`, which names the rule; Hypothesis shows the smallest buffer that breaks it. Needs the extra `testing`.
"""

from __future__ import annotations

from replaybuf.errors import MissingExtra

try:
    import hypothesis as _hypothesis  # noqa: F401
except ImportError:
    raise MissingExtra("replaybuf.testing", "testing") from None

from replaybuf.testing.admissions import AdmissionContract, check_admission
from replaybuf.testing.contract import (
    FilterContract,
    StrategyContract,
    check_filter,
    check_progress,
    check_strategy,
)
from replaybuf.testing.loop import ClosedLoop, Progress
from replaybuf.testing.scenes import random_groups

__all__ = [
    "AdmissionContract",
    "ClosedLoop",
    "FilterContract",
    "Progress",
    "StrategyContract",
    "check_admission",
    "check_filter",
    "check_progress",
    "check_strategy",
    "random_groups",
]
