"""Recorded batches: as many groups per step as a recording had, in the order of storing."""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from msgspec import Meta

from replaybuf.strategy import Budget, BufferView, Flow, Groups, Selection, Strategy, StrategyOptions, Waiting

LARGEST_BATCH = 131_072


class RecordedOptions(StrategyOptions, frozen=True):
    """Options of `recorded`."""

    sizes: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=LARGEST_BATCH)], ...],
        Meta(description="Groups of each step from 0 on; `replaybuf import --replay-order` sets them."),
    ] = ()


class Recorded(Strategy[RecordedOptions]):
    """Serves the batches of an export again: each group once, whatever its version. Producers get no tickets.

    Invariant: step s has the groups with numbers sum(sizes[:s]) + 1 to sum(sizes[:s + 1]).
    """

    Options: ClassVar[type[StrategyOptions]] = RecordedOptions
    max_staleness = None
    look_ahead = 1

    def admit(self, buffer: BufferView, flow: Flow) -> int:
        """Admit no groups: all of them are imported."""
        return 0

    def select(
        self, groups: Groups, buffer: BufferView, budget: Budget, rng: np.random.Generator
    ) -> Selection | Waiting:
        """Take the groups that were stored first."""
        size = self.options.sizes[buffer.step] if buffer.step < len(self.options.sizes) else 0
        if not 0 < size <= len(groups):
            return Waiting("too_few_groups" if len(groups) else "no_groups")
        return Selection(groups.row[:size])
