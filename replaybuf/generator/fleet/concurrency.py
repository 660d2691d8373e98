"""Limit of groups generated at the same time: as many as the engines sample, without a queue there.

A group in an engine's queue is sampled later, by newer weights, and is older when it is trained on. So the limit
follows the engines' gauges, between two bounds. Without gauges it is the upper bound.

A queue after a burst of requests is normal, because an engine admits only so many prompts per step. Only a standing
queue counts: the smallest of `WINDOW` readings (CoDel, Nichols and Jacobson 2012, measures a router's queue so).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable

from replaybuf.errors import Invalid
from replaybuf.generator.engines import Load

logger = logging.getLogger(__name__)

WINDOW = 5
"""Readings per decision, all made under the same limit."""


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of the limit: 1 <= `least` <= `most`; where both are equal the gauges are not read."""

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise Invalid(
                f"min_inflight_groups is {self.least}; it must be from 1 to max_inflight_groups, {self.most}",
                name="min_inflight_groups",
                value=self.least,
                bound=self.most,
            )


def next_limit(limit: int, load: Load | None, bounds: Bounds, *, sampling: int, scoring: int) -> int:
    """Return the limit until the next decision.

    `sampling` and `scoring`: this generator's groups in engines and in rewards. `load`: rollouts of every generator,
    over all engines.

    - Rollouts run and wait: scoring + sampling * running / (running + waiting), so that every generator gives up the
      same share.
    - None waits and this generator has reached the limit: 1.5 * limit.
    - Otherwise, and where rollouts wait but none runs (paused engines): the same limit.
    """
    if load is None:
        return bounds.most
    target = limit
    if load.waiting and load.running:
        target = min(limit, scoring + sampling * load.running // (load.running + load.waiting))
    elif not load.waiting and sampling + scoring >= limit:
        target = limit + max(1, limit // 2)
    return max(bounds.least, min(target, bounds.most))


def total(loads: Iterable[Load | None]) -> Load | None:
    """Add up the loads of servers; None where no server has gauges."""
    reported = [load for load in loads if load is not None]
    return Load(sum(load.running for load in reported), sum(load.waiting for load in reported)) if reported else None


@dataclasses.dataclass(frozen=True, slots=True)
class _Reading:
    load: Load
    sampling: int
    scoring: int

    @property
    def groups(self) -> int:
        return self.sampling + self.scoring

    @property
    def running_share(self) -> float:
        rollouts = self.load.running + self.load.waiting
        return self.load.running / rollouts if rollouts else 1.0


class Concurrency:
    """The current limit, which starts at the upper bound, and the readings since the last decision."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.limit = bounds.most
        self._readings: list[_Reading] = []

    @property
    def adaptive(self) -> bool:
        """Whether the limit can change."""
        return self.bounds.least < self.bounds.most

    def set_bounds(self, bounds: Bounds) -> None:
        """Replace the bounds; a limit at the old upper bound moves to the new one."""
        at_most = self.limit == self.bounds.most
        self.bounds = bounds
        self.limit = bounds.most if at_most else max(bounds.least, min(self.limit, bounds.most))

    def update(self, loads: Iterable[Load | None], *, sampling: int, scoring: int) -> bool:
        """Add a reading of the gauges, and decide at every `WINDOW`th; return whether the limit changed.

        The decision uses the load of the reading with the shortest queue and this generator's groups of the reading
        with the most groups: at the end of a burst it has few groups, which do not show what it had queued.
        """
        load = total(loads)
        if load is None:
            return self._decide(None, 0, 0)
        self._readings.append(_Reading(load, sampling, scoring))
        if len(self._readings) < WINDOW:
            return False
        calmest = max(self._readings, key=lambda reading: reading.running_share)
        busiest = max(self._readings, key=lambda reading: reading.groups)
        return self._decide(calmest.load, busiest.sampling, busiest.scoring)

    def _decide(self, load: Load | None, sampling: int, scoring: int) -> bool:
        self._readings.clear()
        before, self.limit = self.limit, next_limit(self.limit, load, self.bounds, sampling=sampling, scoring=scoring)
        if self.limit != before:
            logger.debug("limit of groups in flight: %d, was %d; engines: %s", self.limit, before, load)
        return self.limit != before
