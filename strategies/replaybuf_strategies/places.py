"""Batches that keep several rules at once, place after place: each choice depends on all before it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from replaybuf.strategy import Budget, Groups
from replaybuf_strategies.composition import Composed
from replaybuf_strategies.draws import Pieces
from replaybuf_strategies.mixture import Mix

Candidate = tuple[int, int, bool, int]
"""Position, tokens, never used, prompt index."""

_ROUNDING = 1e-9


class Composition:
    """A batch, place after place: `shares` of sources, least share of fresh groups, most groups per prompt.

    `pieces(source, fresh)` opens an order of a source's groups: of those never used, or of all. `strict`: no other
    source takes the place of a source without further groups. `most`: groups of each source.
    """

    def __init__(
        self,
        groups: Groups,
        pieces: Callable[[int, bool], Pieces],
        *,
        shares: Sequence[float],
        fresh_fraction: float,
        groups_per_prompt: int | None,
        strict: bool,
        most: Sequence[int] | None,
    ) -> None:
        self._strict = strict
        self._left = None if most is None else list(most)
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
        for source in self._mix.order()[: 1 if self._strict else None]:
            candidate = None
            if self._left is None or self._left[source] > 0:
                candidate = self._candidate(source, needs_fresh)
            if candidate is not None:
                position, _, fresh, prompt = candidate
                if self._left is not None:
                    self._left[source] -= 1
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
