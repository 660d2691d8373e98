"""Names that strategy and filter plug-ins build on. `replaybuf.kernel.strategy.contract` documents each of them."""

from replaybuf.kernel.strategy.contract import (
    Budget,
    BufferView,
    Evictions,
    Feedback,
    Filter,
    Flow,
    Groups,
    Rows,
    Selection,
    Strategy,
    Waiting,
    capacity_of,
    fill,
    source_hash,
    too_few,
    window_capacity,
)
from replaybuf.kernel.strategy.options import StrategyOptions, contradiction

__all__ = [
    "Budget",
    "BufferView",
    "Evictions",
    "Feedback",
    "Filter",
    "Flow",
    "Groups",
    "Rows",
    "Selection",
    "Strategy",
    "StrategyOptions",
    "Waiting",
    "capacity_of",
    "contradiction",
    "fill",
    "source_hash",
    "too_few",
    "window_capacity",
]
