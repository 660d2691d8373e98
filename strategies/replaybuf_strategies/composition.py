"""Batches of `replay`: the longest prefix of a sequence of groups that fits the budget.

Every prefix keeps the rules (shares of sources, share of fresh groups, groups per prompt), so the batch does too,
wherever the budget ends it. Groups that follow may fill the tokens left, unless a rule on shares gives them their turn.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from replaybuf.strategy import Budget, Groups
from replaybuf_strategies.draws import Pieces, Positions


@dataclasses.dataclass(frozen=True, slots=True)
class Composed:
    """Chosen positions; `full`: they fill the batch; `lacks_fresh`: too few groups were never used.

    `following`: groups that come next in the order, if each of them may take a place that tokens are left for.
    """

    positions: Positions
    full: bool
    lacks_fresh: bool = False
    following: Positions = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))


def prefix(groups: Groups, pieces: Pieces, budget: Budget, look_ahead: int = 0) -> Composed:
    """Take positions in order until the batch is full: enough groups, or the next one does not fit.

    `look_ahead`: positions to return as `following`, if tokens are left.
    """
    groups_left = len(groups) if budget.groups is None else budget.groups
    tokens_left = np.iinfo(np.int64).max if budget.tokens is None else budget.tokens
    taken: list[Positions] = []
    following: list[Positions] = []
    full = False
    for piece in pieces:
        wanted = piece[:groups_left]
        total = np.cumsum(groups.take(wanted).tokens, dtype=np.int64)
        fitting = int(np.searchsorted(total, tokens_left, side="right"))
        taken.append(wanted[:fitting])
        groups_left -= fitting
        tokens_left -= int(total[fitting - 1]) if fitting else 0
        full = fitting < len(wanted) or tokens_left == 0 or (groups_left == 0 and budget.groups is not None)
        if full:
            following.append(piece[fitting : fitting + look_ahead])
            break
    positions = np.concatenate(taken) if taken else np.empty(0, np.int64)
    if not full or not look_ahead:
        return Composed(positions, full and len(positions) > 0)
    for piece in pieces:
        if sum(map(len, following)) >= look_ahead:
            break
        following.append(piece)
    return Composed(positions, len(positions) > 0, following=np.concatenate(following)[:look_ahead])
