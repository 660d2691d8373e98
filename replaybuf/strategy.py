"""Names that strategy and filter plug-ins build on. `replaybuf.kernel.strategy` documents each of them."""

from replaybuf.kernel.options import StrategyOptions, contradiction
from replaybuf.kernel.strategy import (
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
    source_code,
    too_few,
    window_capacity,
)

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
    "source_code",
    "too_few",
    "window_capacity",
]
