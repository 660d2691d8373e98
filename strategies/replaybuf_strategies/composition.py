"""How `replay` makes a batch of drawn groups: the longest beginning of a sequence of places that fits the budget.

Every beginning of the sequence keeps the rules (shares of sources, share of fresh groups, groups per prompt), so the
batch does too, wherever the budget ends it. No group is passed over because it is long: that would fill batches with
short ones.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from replaybuf.strategy import Budget, Groups
from replaybuf_strategies.draws import May, Pieces, Positions

Candidate = tuple[int, int, bool, int]
"""Position, tokens, never used, prompt index."""

_EXACT = 1e-9
_LONGEST_SEARCH = 64
_FIRST_PIECE = 2048


@dataclasses.dataclass(frozen=True, slots=True)
class Composed:
    """Chosen positions, whether they fill the batch, and whether it ended for lack of groups that were never used."""

    positions: Positions
    full: bool
    lacks_fresh: bool = False


def beginning(groups: Groups, pieces: Pieces, budget: Budget) -> Composed:
    """Take positions in their order until the batch is full: enough groups, or the next one does not fit."""
    limit = len(groups) if budget.groups is None else budget.groups
    room = np.iinfo(np.int64).max if budget.tokens is None else budget.tokens
    taken: list[Positions] = []
    full = False
    for piece in pieces:
        wanted = piece[:limit]
        total = np.cumsum(groups.take(wanted).tokens, dtype=np.int64)
        fitting = int(np.searchsorted(total, room, side="right"))
        taken.append(wanted[:fitting])
        limit -= fitting
        room -= int(total[fitting - 1]) if fitting else 0
        full = fitting < len(wanted) or room == 0 or (limit == 0 and budget.groups is not None)
        if full:
            break
    positions = np.concatenate(taken) if taken else np.empty(0, np.int64)
    return Composed(positions, full and len(positions) > 0)


class Mix:
    """Whose turn it is, so that after every place t each source i has s_i * t places, within one.

    The rule of Tijdeman ("The chairman assignment problem", 1980): with n sources and d = 1 / (2n - 2), of those with
    s_i * t - x_i >= d the one with the least (x_i + 1 - d) / s_i comes next; then |x_i - s_i * t| <= 1 - d for every t.
    A source that has nothing left gives its further places to the others, by their shares.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        self._shares = dict(enumerate(shares))
        self._start()

    def _start(self) -> None:
        total = sum(self._shares.values())
        self._parts = {lane: share / total for lane, share in self._shares.items()}
        self._places = dict.fromkeys(self._shares, 0)

    def turns(self) -> list[int]:
        """List the sources that have something left, the one whose turn it is first."""
        lanes = len(self._parts)
        if lanes < 2:
            return list(self._parts)
        slack = 1 / (2 * lanes - 2)
        place = 1 + sum(self._places.values())

        def urgency(lane: int) -> tuple[bool, float]:
            part, places = self._parts[lane], self._places[lane]
            return part * place - places < slack - _EXACT, (places + 1 - slack) / part

        return sorted(self._parts, key=urgency)

    def took(self, lane: int) -> None:
        """Count a place of a source."""
        self._places[lane] += 1

    def ended(self, lane: int) -> None:
        """Leave out a source that has nothing left."""
        del self._shares[lane]
        self._start()


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
    """What every beginning of a batch keeps: `shares` of sources, least share of fresh groups, groups per prompt."""

    shares: tuple[float, ...] = (1.0,)
    fresh_fraction: float = 0.0
    groups_per_prompt: int | None = None


class Composition:
    """Place after place, a batch under `Rules`. `pieces(source, fresh)` opens an order of its groups, or of all."""

    def __init__(self, groups: Groups, pieces: Callable[[int, bool], Pieces], rules: Rules) -> None:
        self._groups = groups
        self._pieces = pieces
        self._rules = rules
        self._mix = Mix(rules.shares)
        self._open: dict[tuple[int, bool], Iterator[Candidate]] = {}
        self._taken: set[int] = set()
        self._of_prompt: Counter[int] = Counter()
        self._fresh = 0

    def fill(self, budget: Budget) -> Composed:
        """Give places until the batch is full or no group may take the next one."""
        limit = math.inf if budget.groups is None else budget.groups
        room = math.inf if budget.tokens is None else budget.tokens
        chosen: list[int] = []
        while len(chosen) < limit and room > 0:
            candidate = self._next(len(chosen) + 1)
            if candidate is None:
                return Composed(np.array(chosen, np.int64), full=False, lacks_fresh=self._needs_fresh(len(chosen) + 1))
            if candidate[1] > room:
                break
            room -= candidate[1]
            chosen.append(candidate[0])
        return Composed(np.array(chosen, np.int64), full=bool(chosen))

    def _needs_fresh(self, place: int) -> bool:
        return self._fresh < math.ceil(self._rules.fresh_fraction * place - _EXACT)

    def _next(self, place: int) -> Candidate | None:
        """Give one place: to the source whose turn it is, or to the next one that has a group for it."""
        needs_fresh = self._needs_fresh(place)
        for lane in self._mix.turns():
            candidate = self._candidate(lane, needs_fresh)
            if candidate is not None:
                self._take(lane, candidate)
                return candidate
            if not needs_fresh:
                self._mix.ended(lane)
        return None

    def _candidate(self, lane: int, fresh: bool) -> Candidate | None:
        opened = self._open.get((lane, fresh))
        if opened is None:
            opened = self._open[lane, fresh] = _candidates(self._groups, self._pieces(lane, fresh))
        most = self._rules.groups_per_prompt
        for candidate in opened:
            position, prompt = candidate[0], candidate[3]
            if position not in self._taken and (most is None or prompt < 0 or self._of_prompt[prompt] < most):
                return candidate
        return None

    def _take(self, lane: int, candidate: Candidate) -> None:
        position, _, fresh, prompt = candidate
        self._taken.add(position)
        self._of_prompt[prompt] += 1
        self._fresh += fresh
        self._mix.took(lane)


def _candidates(groups: Groups, pieces: Pieces) -> Iterator[Candidate]:
    for piece in pieces:
        there = groups.take(piece)
        fresh = there.times_sampled == 0
        yield from zip(piece.tolist(), there.tokens.tolist(), fresh.tolist(), there.prompt_index.tolist(), strict=True)


def by_prompt(groups: Groups, may: May, pieces: Pieces, budget: Budget) -> Composed:
    """Take prompts in the order of their first group, each with all its groups that `may` be used.

    A prompt whose groups do not all fit is passed over; one that alone exceeds the budget comes alone, with as many as
    fit, in their order.
    """
    limit = math.inf if budget.groups is None else budget.groups
    room = math.inf if budget.tokens is None else budget.tokens
    seen: list[Positions] = []
    chosen: list[Positions] = []
    passed_over = 0
    for prompt in _prompts(groups, may, pieces, seen):
        if limit <= 0 or room <= 0 or passed_over >= _LONGEST_SEARCH:
            break
        members, tokens = prompt.members, prompt.tokens
        if len(members) <= limit and tokens <= room:
            chosen.append(members)
            limit -= len(members)
            room -= tokens
        elif _exceeds(len(members), tokens, budget) and not chosen:
            own = groups.prompt_index == groups.prompt_index[members[0]]
            in_order = (piece[own[piece]] for piece in itertools.chain(seen, pieces))
            return beginning(groups, in_order, budget)
        else:
            passed_over += 1
    positions = np.concatenate(chosen) if chosen else np.empty(0, np.int64)
    full = limit <= 0 or room <= 0 or passed_over > 0
    return Composed(positions, full and len(positions) > 0)


def _exceeds(members: int, tokens: int, budget: Budget) -> bool:
    return (budget.groups is not None and members > budget.groups) or (
        budget.tokens is not None and tokens > budget.tokens
    )


class _Prompt(NamedTuple):
    """The groups of one prompt, as they stand, and their tokens."""

    members: Positions
    tokens: int


def _prompts(groups: Groups, may: May, pieces: Pieces, seen: list[Positions]) -> Iterator[_Prompt]:
    """Yield prompts by their first position in `pieces`; a group without a prompt is one of its own.

    The other groups of all prompts of a piece are found in one pass over the column; pieces that are looked at are
    added to `seen`, and cut: each twice as long as the one before, for a batch rarely needs more than the first.
    """
    known = np.empty(0, np.int64)
    length = _FIRST_PIECE
    for piece in pieces:
        seen.append(piece)
        start = 0
        while start < len(piece):
            part = piece[start : start + length]
            start, length = start + length, 2 * length
            prompts = groups.take(part).prompt_index
            prompts = np.where(prompts < 0, -1 - part, prompts)
            _, first = np.unique(prompts, return_index=True)
            new = prompts[np.sort(first)]
            new = new[~np.isin(new, known)]
            known = np.concatenate([known, new])
            yield from _with_members(groups, may, new)


def _with_members(groups: Groups, may: May, prompts: npt.NDArray[np.int64]) -> Iterator[_Prompt]:
    """Find the groups of each of these distinct prompts; -1 - position names one group without a prompt."""
    found = np.flatnonzero(np.isin(groups.prompt_index, prompts[prompts >= 0]))
    found = np.concatenate([found[may(groups.take(found))], -1 - prompts[prompts < 0]])
    there = groups.take(found)
    owner = np.where(there.prompt_index < 0, -1 - found, there.prompt_index)
    order = np.argsort(owner, kind="stable")
    found, owner = found[order], owner[order]
    before = np.concatenate([[0], np.cumsum(there.tokens[order], dtype=np.int64)])
    starts, ends = np.searchsorted(owner, prompts), np.searchsorted(owner, prompts, side="right")
    tokens = before[ends] - before[starts]
    for start, end, size in zip(starts.tolist(), ends.tolist(), tokens.tolist(), strict=True):
        yield _Prompt(found[start:end], size)
