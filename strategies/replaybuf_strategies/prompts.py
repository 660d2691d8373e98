"""Several groups of one prompt in a batch: at most so many, or all of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from replaybuf.strategy import Budget, Groups
from replaybuf_strategies.composition import Composed, prefix
from replaybuf_strategies.draws import May, Pieces, Positions

_MAX_SKIPPED = 64
_FIRST_PIECE = 2048
_GROWTH = 8


def limit_prompts(groups: Groups, pieces: Pieces, most: int) -> Pieces:
    """Leave out groups after the first `most` of their prompt; a group without a prompt is one of its own."""
    prompts = np.empty(0, np.int64)
    for piece in pieces:
        own = groups.take(piece).prompt_index
        every = np.concatenate([prompts, own])
        by_prompt = np.argsort(every, kind="stable")
        ordered = every[by_prompt]
        starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        rank = np.empty(len(every), np.int64)
        rank[by_prompt] = np.arange(len(every)) - np.repeat(starts, np.diff(starts, append=len(every)))
        kept = (rank[len(prompts) :] < most) | (own < 0)
        prompts = np.concatenate([prompts, own[kept]])
        yield piece[kept]


class Prompts(NamedTuple):
    """Prompts in order: prompt n has the positions `members[bounds[n] : bounds[n + 1]]`; `tokens`: running sums."""

    members: Positions
    bounds: Positions
    tokens: Positions

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def fitting(self, start: int, groups: float, tokens: float) -> int:
        """Return the end of the longest run of prompts from `start` on that fits."""
        ends = (
            np.searchsorted(sums, sums[start] + left, side="right")
            for sums, left in ((self.bounds, groups), (self.tokens, tokens))
        )
        return int(min(ends)) - 1


def by_prompt(groups: Groups, may: May, pieces: Pieces, budget: Budget) -> Composed:
    """Take prompts in the order of their first group, each with all its usable groups.

    A prompt that does not fit completely is skipped. A prompt larger than the budget comes alone, as the longest prefix
    of its groups that fits.
    """
    most_groups, most_tokens = budget.groups or math.inf, budget.tokens or math.inf
    groups_left, tokens_left, skipped = most_groups, most_tokens, 0
    seen: list[Positions] = []
    chosen = np.empty(0, np.int64)
    for prompts in _prompts(groups, may, pieces, seen):
        start = 0
        while start < len(prompts) and groups_left > 0 and tokens_left > 0 and skipped < _MAX_SKIPPED:
            end = prompts.fitting(start, groups_left, tokens_left)
            members = prompts.members[prompts.bounds[start] : prompts.bounds[end]]
            chosen = np.concatenate([chosen, members])
            groups_left -= len(members)
            tokens_left -= int(prompts.tokens[end] - prompts.tokens[start])
            start = end + 1
            if end == len(prompts):
                break
            if not len(chosen) and prompts.fitting(end, most_groups, most_tokens) == end:
                own = groups.prompt_index == groups.prompt_index[prompts.members[prompts.bounds[end]]]
                return prefix(groups, (piece[own[piece]] for piece in itertools.chain(seen, pieces)), budget)
            skipped += 1
        if groups_left <= 0 or tokens_left <= 0 or skipped >= _MAX_SKIPPED:
            break
    return Composed(chosen, (groups_left <= 0 or tokens_left <= 0 or skipped > 0) and len(chosen) > 0)


def _prompts(groups: Groups, may: May, pieces: Pieces, seen: list[Positions]) -> Iterator[Prompts]:
    """Yield the prompts of the pieces in order; `seen` collects the pieces read.

    A group without a prompt is a prompt of its own. The other groups of all prompts of a part are found in one pass
    over the column. Each part is longer than the one before: a batch rarely needs more than the first.
    """
    yielded = np.empty(0, np.int64)
    length = _FIRST_PIECE
    for piece in pieces:
        seen.append(piece)
        start = 0
        while start < len(piece):
            part = piece[start : start + length]
            start, length = start + length, _GROWTH * length
            prompts = _distinct(groups, part, yielded)
            yielded = np.concatenate([yielded, prompts])
            yield _with_members(groups, may, prompts)


def _distinct(groups: Groups, part: Positions, yielded: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the prompts of a part in the order of their first group, without those `yielded` before."""
    own = groups.take(part).prompt_index
    prompts = np.where(own < 0, -1 - part, own)
    by_number = np.argsort(prompts, kind="stable")
    ordered = prompts[by_number]
    is_first = np.zeros(len(part), bool)
    is_first[by_number[np.concatenate([[True], ordered[1:] != ordered[:-1]])]] = True
    distinct = prompts[is_first]
    return distinct[~np.isin(distinct, yielded)] if len(yielded) else distinct


def _with_members(groups: Groups, may: May, prompts: npt.NDArray[np.int64]) -> Prompts:
    """Return all usable groups of distinct prompts; -1 - position names a group without a prompt."""
    rows = np.flatnonzero(np.isin(groups.prompt_index, prompts[prompts >= 0]))
    rows = np.concatenate([rows[may(groups.take(rows))], -1 - prompts[prompts < 0]])
    own = groups.take(rows).prompt_index
    by_number = np.argsort(prompts)
    place = by_number[np.searchsorted(prompts[by_number], np.where(own < 0, -1 - rows, own))]
    count = len(rows)
    members = rows[np.sort(place * count + np.arange(count)) % max(1, count)]  # by place, then by position
    bounds = np.concatenate([[0], np.cumsum(np.bincount(place, minlength=len(prompts)))])
    tokens = np.concatenate([[0], np.cumsum(groups.take(members).tokens, dtype=np.int64)])
    return Prompts(members, bounds, tokens[bounds])
