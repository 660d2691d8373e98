"""Batches of `replay`: the longest prefix of a sequence of groups that fits the budget.

Every prefix keeps the rules (shares of sources, share of fresh groups, groups per prompt), so the batch does too,
wherever the budget ends it. Long groups are not skipped: that would fill batches with short ones.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from replaybuf.strategy import Budget, Groups
from replaybuf_strategies.draws import Pieces, Positions


@dataclasses.dataclass(frozen=True, slots=True)
class Composed:
    """Chosen positions; `full`: they fill the batch; `lacks_fresh`: too few groups were never used."""

    positions: Positions
    full: bool
    lacks_fresh: bool = False


def prefix(groups: Groups, pieces: Pieces, budget: Budget) -> Composed:
    """Take positions in order until the batch is full: enough groups, or the next one does not fit."""
    groups_left = len(groups) if budget.groups is None else budget.groups
    tokens_left = np.iinfo(np.int64).max if budget.tokens is None else budget.tokens
    taken: list[Positions] = []
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
            break
    positions = np.concatenate(taken) if taken else np.empty(0, np.int64)
    return Composed(positions, full and len(positions) > 0)
