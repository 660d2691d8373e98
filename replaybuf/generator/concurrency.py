"""How many groups to generate at the same time: as many as the engines sample, and none that only queue there.

A group that queues at an engine is sampled later, by newer weights than it could have had elsewhere, and is older when
it is trained on. So the limit follows the engines' own gauges, between two bounds; without gauges it is the upper one.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable

from replaybuf.errors import Invalid
from replaybuf.generator.engines.load import Load

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """Least and most groups at the same time; the same number twice switches following the gauges off."""

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise Invalid(
                f"min_inflight_groups is {self.least}; needed is 1 to max_inflight_groups, {self.most}",
                name="min_inflight_groups",
                value=self.least,
                bound=self.most,
            )


def next_limit(limit: int, load: Load | None, bounds: Bounds, *, sampling: int, scoring: int) -> int:
    """Return the limit for the next second.

    `sampling` and `scoring` are this generator's groups in engines and in rewards; `load` is that of all engines and
    counts the rollouts of every generator. Where rollouts queue, the new limit is what is left when the same share of
    this generator's groups is taken away: scoring + sampling * running / (running + waiting). With none waiting it
    rises by half where it was what kept more from being asked for. With some waiting and none running the engines
    are paused, not full, and it stays.
    """
    if load is None:
        return bounds.most
    wanted = limit
    if load.waiting and load.running:
        wanted = min(limit, scoring + sampling * load.running // (load.running + load.waiting))
    elif not load.waiting and sampling + scoring >= limit:
        wanted = limit + max(1, limit // 2)
    return max(bounds.least, min(wanted, bounds.most))


def total(loads: Iterable[Load | None]) -> Load | None:
    """Add up the loads of servers; None where no server told any."""
    known = [load for load in loads if load is not None]
    return Load(sum(load.running for load in known), sum(load.waiting for load in known)) if known else None


class Concurrency:
    """The limit in force, and what it was last made of; it starts at the upper bound."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.limit = bounds.most

    @property
    def adaptive(self) -> bool:
        """Whether there is anything to follow the gauges for."""
        return self.bounds.least < self.bounds.most

    def rebound(self, bounds: Bounds) -> None:
        """Take other bounds; what lies between them stays, and an upper bound that is reached moves along."""
        reached = self.limit == self.bounds.most
        self.bounds = bounds
        self.limit = bounds.most if reached else max(bounds.least, min(self.limit, bounds.most))

    def follow(self, loads: Iterable[Load | None], *, sampling: int, scoring: int) -> bool:
        """Take in what the gauges say; True where the limit changed."""
        load = total(loads)
        before, self.limit = self.limit, next_limit(self.limit, load, self.bounds, sampling=sampling, scoring=scoring)
        if self.limit != before:
            logger.debug("groups at the same time: %d, were %d; engines: %s", self.limit, before, load)
        return self.limit != before
