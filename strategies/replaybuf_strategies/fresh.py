"""Least share of groups that were never used: how the order of a batch changes to keep it in every prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from replaybuf.strategy import Budget, Groups
from replaybuf_strategies.composition import Composed, prefix
from replaybuf_strategies.draws import Pieces, Positions

_ROUNDING = 1e-9


def with_fresh(groups: Groups, open_pieces: Callable[[bool], Pieces], budget: Budget, fraction: float) -> Composed:
    """Take groups in order, but a fresh one earlier where the share of fresh groups would fall below `fraction`.

    `open_pieces(fresh)` opens an order of all usable groups, or of the fresh ones. The second is read only if the part
    of the first that a batch needs has too few; its groups come after that part.
    """
    every = open_pieces(False)
    seen = _read_enough(groups, every, budget)
    later: Pieces | None = None
    ahead = np.empty(0, np.int64)
    while True:
        sequence, lacks_fresh = _arrange(groups, seen, ahead, fraction)
        composed = prefix(groups, iter((sequence,)), budget)
        if composed.full:
            return composed
        if not lacks_fresh:
            piece = next(every, None)
            if piece is None:
                return composed
            # Groups of `ahead` without a place are in this piece, or in a later one.
            seen, ahead, later = np.concatenate([seen, piece]), ahead[:0], None
            continue
        later = later or _without(open_pieces(True), seen, len(groups))
        piece = next(later, None)
        if piece is None:
            return Composed(composed.positions, full=False, lacks_fresh=True)
        ahead = np.concatenate([ahead, piece])


def _read_enough(groups: Groups, pieces: Pieces, budget: Budget) -> Positions:
    """Read pieces until they fill the budget."""
    read: list[Positions] = []
    count = tokens = 0
    for piece in pieces:
        read.append(piece)
        count += len(piece)
        if budget.tokens is not None:
            tokens += int(groups.take(piece).tokens.sum(dtype=np.int64))
        if (budget.groups is not None and count >= budget.groups) or (budget.tokens or np.inf) < tokens:
            break
    return np.concatenate(read) if read else np.empty(0, np.int64)


def _without(pieces: Pieces, seen: Positions, count: int) -> Iterator[Positions]:
    left = np.ones(count, bool)
    left[seen] = False
    for piece in pieces:
        yield piece[left[piece]]


def _arrange(groups: Groups, seen: Positions, ahead: Positions, fraction: float) -> tuple[Positions, bool]:
    """Return the groups in training order, as far as the share f is kept, and whether fresh groups end it.

    Fresh group v (from 0) has h(v) used groups before it in `seen`, so its own place is v + h(v). Place t needs more
    than v fresh groups if f * (t + 1) > v, so the group comes at t = floor(v / f) at the latest:

        place of fresh group v = min(v + h(v), floor(v / f))

    Both grow with v, so no two groups get one place. Used groups take the other places, in order.
    """
    is_fresh = groups.take(seen).times_sampled == 0
    fresh, used = np.concatenate([seen[is_fresh], ahead]), seen[~is_fresh]
    number = np.arange(len(fresh) + 1)
    before = np.full(len(fresh), len(used))
    own = np.flatnonzero(is_fresh)
    before[: len(own)] = own - number[: len(own)]
    latest = np.floor((number + _ROUNDING) / fraction)
    places = np.minimum(latest[:-1], number[:-1] + before).astype(np.int64)
    is_used = np.ones(len(fresh) + len(used), bool)
    is_used[places] = False
    sequence = np.empty(len(is_used), np.int64)
    sequence[places], sequence[is_used] = fresh, used
    return sequence[: int(min(latest[-1], len(sequence)))], bool(latest[-1] <= len(sequence))
