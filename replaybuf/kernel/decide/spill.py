"""Spill: how many bytes of frames move out of Redis, and which frames move first. Pure.

::

    bytes in memory = frames and late columns of groups that are not freed, less what is in files
                                                                            <= limits.max_bytes_in_memory

Frames move from `START` of the limit on, down to `STOP` of it, so that appends find room meanwhile. The order is:

1. groups that no batch uses any more: only a resume may need them
2. live groups, those first that the strategy draws last
3. groups of batches in training: ranks in direct mode read them now
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from replaybuf.kernel.rows.groups import Groups
from replaybuf.kernel.rows.index import FREED, LIVE, SPILLED, Numbers
from replaybuf.kernel.state.run_state import RunState
from replaybuf.kernel.state.spill import sum_bytes

START, STOP = 7 / 8, 3 / 4
"""Shares of the limit."""
DrawOrder = Callable[[Groups], npt.NDArray[np.generic]]
"""`Strategy.draw_order`."""


def find_excess(in_memory: int, limit: int) -> int:
    """Return how many bytes have to move now; 0 up to `START` of the limit."""
    return in_memory - int(limit * STOP) if in_memory > limit * START else 0


class Movable(NamedTuple):
    """Groups that may move: numbers, their bytes in Redis, and their draw order (None = as stored)."""

    numbers: Numbers
    sizes: npt.NDArray[np.int32]
    order: npt.NDArray[np.generic] | None


def list_movable(state: RunState, draw_order: DrawOrder) -> list[Movable]:
    """List the groups with bytes in Redis: unused ones, live ones, those in training; the first list moves first."""
    index = state.index
    sizes = index["frame_bytes"] - index[SPILLED]
    here = np.flatnonzero((index["state"] != FREED) & (sizes > 0))
    in_training = index["last_step"][here] >= state.step
    live = (index["state"][here] == LIVE) & ~in_training

    def movable(rows: npt.NDArray[np.int64], order: npt.NDArray[np.generic] | None = None) -> Movable:
        return Movable(index["number"][rows], sizes[rows], order)

    order = draw_order(index.groups(here[live])) if live.any() else None
    return [movable(here[~live & ~in_training]), movable(here[live], order), movable(here[in_training])]


def choose_moves(movable: Sequence[Movable], excess: int) -> Numbers:
    """Return the fewest groups whose frames have at least `excess` bytes, in the order of moving; all if too few."""
    chosen: list[Numbers] = [np.empty(0, np.int64)]
    for numbers, sizes, order in movable:
        if excess > 0 and len(numbers):
            taken = _take(sizes, excess, order)
            chosen.append(numbers[taken])
            excess -= sum_bytes(sizes[taken])
    return np.concatenate(chosen)


def _take(sizes: npt.NDArray[np.int32], excess: int, keys: npt.NDArray[np.generic] | None) -> npt.NDArray[np.int64]:
    """Return the positions of the fewest groups with the largest keys, largest first; without keys the first ones.

    Of equal keys the last stored group counts as larger. No full sort: a million groups take 15 ms.
    """
    if keys is None:
        order = np.arange(len(sizes))
    else:
        enough = min(len(sizes), int(excess / max(1.0, float(sizes.mean())) * 1.25) + 64)
        while True:
            bound = np.partition(keys, len(keys) - enough)[len(keys) - enough]
            above, equal = np.flatnonzero(keys > bound), np.flatnonzero(keys == bound)
            candidates = np.concatenate([above, equal[len(equal) - (enough - len(above)) :]])
            if enough == len(sizes) or sum_bytes(sizes[candidates]) >= excess:
                break
            enough = min(len(sizes), 2 * enough)
        order = candidates[np.lexsort([candidates, keys[candidates]])][::-1]
    through = int(np.searchsorted(np.cumsum(sizes[order], dtype=np.int64), excess)) + 1
    return order[:through]
