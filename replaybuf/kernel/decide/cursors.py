"""Decide which cursor gives way to a new one, and which groups a checkpoint keeps for cursors."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np

from replaybuf.errors import Conflict, NoRoom
from replaybuf.kernel.rows.index import Integers
from replaybuf.kernel.state.cursors import Cursor
from replaybuf.kernel.state.run_state import RunState

MOST_CURSORS = 16
"""Cursors of one run."""
GIVES_WAY_S = 10.0
"""Beyond `MOST_CURSORS`, a cursor with a lifetime gives way to a new one after so long without use."""
KEPT_BYTES = 256 << 20
"""Bytes of frames that a checkpoint keeps for the cursors of one kind; a cursor that falls further behind has a gap."""


def find_superfluous(cursors: Collection[Cursor], idle_s: Callable[[str], float]) -> Cursor | None:
    """Return the cursor that gives way to a new one; None if there is room. `idle_s`: time since its last use, by name.

    Raises `NoRoom` if one may give way soon, `Conflict` if all are without a lifetime.
    """
    count, mortal = len(cursors), [cursor for cursor in cursors if cursor.lifetime_s is not None]
    if count < MOST_CURSORS:
        return None
    if not mortal:
        detail = f"the run has {count} cursors; the maximum is {MOST_CURSORS}: delete one"
        raise Conflict(detail, name="cursors", value=count, bound=MOST_CURSORS)
    longest = max(mortal, key=lambda cursor: idle_s(cursor.name))
    left_s = GIVES_WAY_S - idle_s(longest.name)
    if left_s > 0:
        detail = (
            f"the run has {count} cursors; the maximum is {MOST_CURSORS}. The {len(mortal)} with a lifetime were "
            f"all used within {GIVES_WAY_S:g} s: try again, or delete one"
        )
        raise NoRoom(detail, retry_after_s=left_s, name="cursors", value=count, bound=MOST_CURSORS)
    return longest


class Kept(NamedTuple):
    """Groups whose bytes a checkpoint keeps for cursors: of numbers above `after`, and used at `from_step` or later."""

    after: int | None = None
    from_step: int | None = None


NOTHING_KEPT = Kept()


def find_kept(state: RunState, cursors: list[Cursor], oldest: int) -> Kept:
    """Return what a checkpoint whose oldest step is `oldest` keeps for cursors: at most `KEPT_BYTES` of each kind."""
    if not cursors:
        return NOTHING_KEPT
    stored = [cursor.position.number for cursor in cursors if cursor.kind == "stored"]
    trained = [cursor.position.step for cursor in cursors if cursor.kind == "trained"]
    index = state.index
    freeable = np.flatnonzero(state.pool.freeable(oldest))
    numbers, steps, sizes = (index[name][freeable] for name in ("number", "last_step", "frame_bytes"))
    return Kept(
        _within_bound(numbers, sizes, min(stored) + 1) - 1 if stored else None,
        _within_bound(steps, sizes, min(trained)) if trained else None,
    )


def _within_bound(places: Integers, sizes: Integers, lowest: int) -> int:
    """Return the lowest place from `lowest` on from which all groups together have at most `KEPT_BYTES`."""
    wanted = places >= lowest
    places, sizes = places[wanted], sizes[wanted]
    newest_first = np.argsort(-places, kind="stable")
    too_many = np.cumsum(sizes[newest_first], dtype=np.int64) > KEPT_BYTES
    if not too_many.any():
        return lowest
    return int(places[newest_first[int(np.argmax(too_many))]]) + 1
