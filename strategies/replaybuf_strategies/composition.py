"""Batches of `replay`: the longest prefix of a sequence of groups that fits the budget.

Every prefix keeps the rules (shares of sources, share of fresh groups, groups per prompt), so the batch does too,
wherever the budget ends it. Long groups are not skipped: that would fill batches with short ones.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from replaybuf.strategy import Budget, Groups
from replaybuf_strategies.draws import May, Pieces, Positions

Candidate = tuple[int, int, bool, int]
"""Position, tokens, never used, prompt index."""

_ROUNDING = 1e-9
_MAX_SKIPPED = 64
_FIRST_PIECE = 2048


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


class Mix:
    """Order of the sources in which, after every place t, each source i has s_i * t places, within one.

    The rule of Tijdeman ("The chairman assignment problem", 1980): with n sources and d = 1 / (2n - 2), the next place
    goes to the source with the least (x_i + 1 - d) / s_i of those with s_i * t - x_i >= d. Then, for every t,
    |x_i - s_i * t| <= 1 - d. The places of a source without further groups go to the others, by their shares.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        self._shares = dict(enumerate(shares))
        self._restart()

    def _restart(self) -> None:
        total = sum(self._shares.values())
        self._parts = {source: share / total for source, share in self._shares.items()}
        self._places = dict.fromkeys(self._shares, 0)

    def order(self) -> list[int]:
        """Return the sources with further groups, the one that gets the next place first."""
        count = len(self._parts)
        if count < 2:
            return list(self._parts)
        slack = 1 / (2 * count - 2)
        place = 1 + sum(self._places.values())

        def urgency(source: int) -> tuple[bool, float]:
            part, places = self._parts[source], self._places[source]
            return part * place - places < slack - _ROUNDING, (places + 1 - slack) / part

        return sorted(self._parts, key=urgency)

    def count(self, source: int) -> None:
        """Count a place of a source."""
        self._places[source] += 1

    def remove(self, source: int) -> None:
        """Remove a source without further groups."""
        del self._shares[source]
        self._restart()


class Composition:
    """A batch, place after place: `shares` of sources, least share of fresh groups, most groups per prompt.

    `pieces(source, fresh)` opens an order of a source's groups: of those never used, or of all.
    """

    def __init__(
        self,
        groups: Groups,
        pieces: Callable[[int, bool], Pieces],
        *,
        shares: Sequence[float],
        fresh_fraction: float,
        groups_per_prompt: int | None,
    ) -> None:
        self._groups = groups
        self._pieces = pieces
        self._fresh_fraction = fresh_fraction
        self._groups_per_prompt = groups_per_prompt
        self._mix = Mix(shares)
        self._open: dict[tuple[int, bool], Iterator[Candidate]] = {}
        self._taken: set[int] = set()
        self._of_prompt: Counter[int] = Counter()
        self._fresh = 0

    def fill(self, budget: Budget) -> Composed:
        """Assign places until the batch is full or no group may take the next one."""
        most_groups = math.inf if budget.groups is None else budget.groups
        tokens_left = math.inf if budget.tokens is None else budget.tokens
        chosen: list[int] = []
        while len(chosen) < most_groups and tokens_left > 0:
            needs_fresh = self._fresh < math.ceil(self._fresh_fraction * (len(chosen) + 1) - _ROUNDING)
            candidate = self._next(needs_fresh)
            if candidate is None:
                return Composed(np.array(chosen, np.int64), full=False, lacks_fresh=needs_fresh)
            if candidate[1] > tokens_left:
                break
            tokens_left -= candidate[1]
            chosen.append(candidate[0])
        return Composed(np.array(chosen, np.int64), full=bool(chosen))

    def _next(self, needs_fresh: bool) -> Candidate | None:
        """Assign one place to the source that gets the next one, or to the first after it that has a group."""
        for source in self._mix.order():
            candidate = self._candidate(source, needs_fresh)
            if candidate is not None:
                position, _, fresh, prompt = candidate
                self._taken.add(position)
                self._of_prompt[prompt] += 1
                self._fresh += fresh
                self._mix.count(source)
                return candidate
            if not needs_fresh:
                self._mix.remove(source)
        return None

    def _candidate(self, source: int, fresh: bool) -> Candidate | None:
        opened = self._open.get((source, fresh))
        if opened is None:
            opened = self._open[source, fresh] = _candidates(self._groups, self._pieces(source, fresh))
        most = self._groups_per_prompt
        for candidate in opened:
            position, prompt = candidate[0], candidate[3]
            if position not in self._taken and (most is None or prompt < 0 or self._of_prompt[prompt] < most):
                return candidate
        return None


def _candidates(groups: Groups, pieces: Pieces) -> Iterator[Candidate]:
    for piece in pieces:
        some = groups.take(piece)
        fresh = some.times_sampled == 0
        yield from zip(piece.tolist(), some.tokens.tolist(), fresh.tolist(), some.prompt_index.tolist(), strict=True)


def by_prompt(groups: Groups, may: May, pieces: Pieces, budget: Budget) -> Composed:
    """Take prompts in the order of their first group, each with all its usable groups.

    A prompt that does not fit completely is skipped. A prompt larger than the budget comes alone, as the longest prefix
    of its groups that fits.
    """
    groups_left = math.inf if budget.groups is None else budget.groups
    tokens_left = math.inf if budget.tokens is None else budget.tokens
    seen: list[Positions] = []
    chosen: list[Positions] = []
    skipped = 0
    for members, tokens in _prompts(groups, may, pieces, seen):
        if groups_left <= 0 or tokens_left <= 0 or skipped >= _MAX_SKIPPED:
            break
        if len(members) <= groups_left and tokens <= tokens_left:
            chosen.append(members)
            groups_left -= len(members)
            tokens_left -= tokens
        elif not chosen and (len(members) > (budget.groups or math.inf) or tokens > (budget.tokens or math.inf)):
            own = groups.prompt_index == groups.prompt_index[members[0]]
            return prefix(groups, (piece[own[piece]] for piece in itertools.chain(seen, pieces)), budget)
        else:
            skipped += 1
    positions = np.concatenate(chosen) if chosen else np.empty(0, np.int64)
    full = groups_left <= 0 or tokens_left <= 0 or skipped > 0
    return Composed(positions, full and len(positions) > 0)


def _prompts(groups: Groups, may: May, pieces: Pieces, seen: list[Positions]) -> Iterator[tuple[Positions, int]]:
    """Yield positions and tokens of each prompt's groups, in the order of prompts; `seen` collects the pieces read.

    A group without a prompt is a prompt of its own. The other groups of all prompts of a part are found in one pass
    over the column. Each part is twice as long as the one before: a batch rarely needs more than the first.
    """
    yielded = np.empty(0, np.int64)
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
            new = new[~np.isin(new, yielded)]
            yielded = np.concatenate([yielded, new])
            yield from _with_members(groups, may, new)


def _with_members(groups: Groups, may: May, prompts: npt.NDArray[np.int64]) -> Iterator[tuple[Positions, int]]:
    """Yield positions and tokens of the groups of distinct prompts; -1 - position names a group without a prompt."""
    found = np.flatnonzero(np.isin(groups.prompt_index, prompts[prompts >= 0]))
    found = np.concatenate([found[may(groups.take(found))], -1 - prompts[prompts < 0]])
    some = groups.take(found)
    owner = np.where(some.prompt_index < 0, -1 - found, some.prompt_index)
    order = np.argsort(owner, kind="stable")
    found, owner = found[order], owner[order]
    before = np.concatenate([[0], np.cumsum(some.tokens[order], dtype=np.int64)])
    starts, ends = np.searchsorted(owner, prompts), np.searchsorted(owner, prompts, side="right")
    for start, end, size in zip(starts.tolist(), ends.tolist(), (before[ends] - before[starts]).tolist(), strict=True):
        yield found[start:end], size
