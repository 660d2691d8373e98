"""How many groups to generate at the same time: as many as the engines sample, and none that only queue there.

A group that queues at an engine is sampled later, by newer weights than it could have had elsewhere, and is older when
it is trained on. So the limit follows the engines' own gauges, between two bounds; without gauges it is the upper one.

A queue right after a burst of requests is normal: an engine takes in only so many prompts per step. What counts is the
queue that stands, the least of `WINDOW` looks (as CoDel judges a router's queue: Nichols and Jacobson, 2012).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable

from replaybuf.errors import Invalid
from replaybuf.generator.engines.protocol import Load

logger = logging.getLogger(__name__)

WINDOW = 5
"""Looks at the gauges behind each decision, all of them made at the same limit."""


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
    """Return the limit until the next decision.

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


@dataclasses.dataclass(frozen=True, slots=True)
class _Look:
    load: Load
    sampling: int
    scoring: int

    @property
    def groups(self) -> int:
        return self.sampling + self.scoring

    @property
    def sampled_share(self) -> float:
        rollouts = self.load.running + self.load.waiting
        return self.load.running / rollouts if rollouts else 1.0


class Concurrency:
    """The limit in force, and the looks at the gauges since it was decided on; it starts at the upper bound."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.limit = bounds.most
        self._looks: list[_Look] = []

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
        """Take in what the gauges say, and decide at every `WINDOW`th look; True where the limit changed.

        The load counts where the least of it queued, this generator's groups where there were most of them: at the end
        of a burst, or between two tickets, it has few of its own that say nothing of what it had in the queue.
        """
        load = total(loads)
        if load is None:
            return self._decide(None, 0, 0)
        self._looks.append(_Look(load, sampling, scoring))
        if len(self._looks) < WINDOW:
            return False
        calmest = max(self._looks, key=lambda look: look.sampled_share)
        busiest = max(self._looks, key=lambda look: look.groups)
        return self._decide(calmest.load, busiest.sampling, busiest.scoring)

    def _decide(self, load: Load | None, sampling: int, scoring: int) -> bool:
        self._looks.clear()
        before, self.limit = self.limit, next_limit(self.limit, load, self.bounds, sampling=sampling, scoring=scoring)
        if self.limit != before:
            logger.debug("groups at the same time: %d, were %d; engines: %s", self.limit, before, load)
        return self.limit != before
