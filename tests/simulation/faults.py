"""How hostile the world of one schedule is: rates drawn from its seed, so that each seed has another mix."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tests.simulation.mix import CLUSTER, SENTINEL, SINGLE

if TYPE_CHECKING:
    from tests.simulation.world import World

MIXES = (0.0, 0.0, 0.5, 1.0, 3.0)
"""Factors of a rate: a schedule with few kinds of faults goes deeper into each than one with all of them."""

LATE_NEWS, NEWS_MIXES = 0.1, MIXES
LATE_SEND, SEND_MIXES = 0.004, MIXES
SINGLE_KINDS = ("kill", "stop", "end", "handover", "jump", "crash", "pause", "cut", "lease", "full", "failover")
KINDS = {
    SINGLE: SINGLE_KINDS,
    CLUSTER: (*SINGLE_KINDS, "crash", "pause", "move"),
    SENTINEL: (*SINGLE_KINDS, "crash", "pause", "sentinels"),
}
"""Faults of processes, by kind of Redis: a server is killed, stopped, ended in order, hands its run over, or its clock
jumps; Redis, or one node of it, crashes, stands still, loses connections or a lease, has no memory left, or goes back
to a shorter history for a while; a slot of the run moves to another node; sentinels stand still."""


@dataclasses.dataclass(slots=True)
class Faults:
    """Rates of faults; `active` ends with the fault phase, and everything heals.

    - `cut`: share of sends to Redis whose connection is cut, before, within or after their commands
    - `late`: share of replies that are late by up to `LATEST_S`
    - `late_send`: share of commands that arrive late by up to `LATEST_SEND_S`: what was decided may be outdated then
    - `lost_call`: share of calls of clients whose request or answer is lost
    - `slow_sync`: share of syncs of the disk that take longer than writes wait
    - `late_news`: share of followers' reads of new entries that are answered late, by up to `LATEST_NEWS_S`
    - `only`: numbers of the faults that happen, None = all; `happened`: those that did, each with its time and kind
    - `last_s`: when the last one happened
    - `node_every_s`: mean time between two faults of a process, each of one of the `kinds`; None = none
    """

    cut: float
    late: float
    late_send: float
    lost_call: float
    slow_sync: float
    late_news: float
    node_every_s: float | None
    kinds: list[str]
    only: frozenset[int] | None
    active: bool = False
    happened: dict[int, tuple[float, str]] = dataclasses.field(default_factory=dict)
    last_s: float = 0.0
    _drawn: int = 0

    @classmethod
    def draw(cls, rng: random.Random, only: Sequence[int] | None, redis: str) -> Faults:
        """Draw a mix for a kind of Redis."""
        return cls(
            cut=0.004 * rng.choice(MIXES),
            late=0.006 * rng.choice(MIXES),
            late_send=LATE_SEND * rng.choice(SEND_MIXES),
            lost_call=0.03 * rng.choice(MIXES),
            slow_sync=0.03 * rng.choice(MIXES),
            late_news=LATE_NEWS * rng.choice(NEWS_MIXES),
            node_every_s=rng.choice((None, 0.7, 1.0, 1.0, 2.0, 2.0, 4.0)),
            kinds=rng.sample(KINDS[redis], rng.randint(1, 4)),
            only=None if only is None else frozenset(only),
        )

    def happens(self, kind: str, rate: float, world: World) -> bool:
        """Draw whether a fault of this rate happens now."""
        return self.active and world.rng.random() < rate and self.take(kind, world.now_s())

    def take(self, kind: str, now_s: float) -> bool:
        """Number a fault that was drawn; return whether it happens."""
        number, self._drawn = self._drawn, self._drawn + 1
        if self.only is not None and number not in self.only:
            return False
        self.happened[number] = (now_s, kind)
        self.last_s = now_s
        return True
