"""What runs in one schedule: a draw of features and sizes from its seed, so that each seed has another world."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

from tests.chaos.content import COLUMN, GROUP_SIZE, VOCAB_SIZE
from tests.chaos.runs import ADAPTERS, REPLAY, adapters_of, spill_to

TICKET_TTL_S = 3.0
EXACT = "exact slots"
STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "one step": ("one-step-off-policy", {"max_staleness": 2}),
    "on-policy": ("on-policy", {}),
    "replay": ("replay", {name: value for name, value in REPLAY.items() if name != "mix"}),
    EXACT: ("one-step-off-policy", {"max_staleness": 2, "exact_slots": True}),
}
SINGLE, CLUSTER, SENTINEL = "single", "cluster", "sentinel"
REDIS = (SINGLE, SINGLE, CLUSTER, CLUSTER, SENTINEL)
"""Kinds of Redis: one server; three primaries with replicas; a primary with replicas that three sentinels watch.
A schedule draws one of these."""
TWO_REPLICAS = 0.4
"""Share of schedules whose primaries have two replicas each, where they have any."""
CONFIRMING = (1, 2)
"""How many of two replicas confirm each write: a schedule draws one of these."""
COPIED = 0.25
"""Share of schedules with a run that is backed up, deleted and restored."""
REWOUND = 0.3
"""Share of schedules with many rewinds."""
LOST = 0.2
"""Share of schedules with a run whose newest groups are lost, and that goes on without them."""
BY_HTTP = 0.4
"""Share of schedules whose producers call the servers by HTTP."""
REVISED = ("max_staleness", (1, 2, 3))
"""The option that an operator changes, and its values."""


@dataclasses.dataclass(frozen=True, slots=True)
class Mix:
    """Features of one schedule.

    - `redis`: its kind; `servers`: how many; `tick_s`: time between two rounds of their background work
    - `faults_s`: length of the fault phase
    - `staged`: groups need a late column before they are trained; `reads`: a cursor follows the run
    - `spills`: frames move to a folder; `revises`: an operator changes strategy and limits of the run
    - `copies`: another run is backed up, deleted and restored meanwhile
    - `direct`: a producer writes to Redis itself, and the ranks read frames from there
    - `loses`: Redis loses the newest groups and entries of another run, and an operator accepts the loss
    - `rewinds`: the trainer often resumes at an older step, and asks any server for its batches
    - `http`: producers call the servers by HTTP, else in their processes
    - `replicas`: of each primary; `confirming`: how many of them confirm each write
    """

    redis: str
    servers: int
    tick_s: float
    faults_s: float
    history_groups: int
    strategy: str
    adapters: int
    staged: bool
    reads: bool
    spills: bool
    direct: bool
    revises: bool
    copies: bool
    rewinds: bool
    loses: bool
    http: bool
    replicas: int
    confirming: int

    @classmethod
    def draw(cls, seed: int, rng: random.Random, redis: str) -> Mix:
        """Draw a mix for a kind of Redis.

        What came later has generators of its own: it does not change the draws before it.
        """
        replicating = random.Random(f"replicas {seed}")
        replicas = 2 if redis != SINGLE and replicating.random() < TWO_REPLICAS else 1
        strategy = rng.choice(tuple(STRATEGIES))
        several = strategy == "one step" and rng.random() < 0.3
        spills = rng.random() < 0.2
        rewinds = rng.random() < REWOUND
        mix = cls(
            redis=redis,
            servers=rng.choice((2, 2, 3)),
            tick_s=rng.choice((0.25, 0.5, 1.0)),
            faults_s=rng.choice((12.0, 20.0, 30.0) if rewinds else (6.0, 12.0, 20.0)),
            history_groups=rng.choice((8, 40, 100_000)),
            strategy=strategy,
            adapters=2 if several else 0,
            staged=strategy in ("one step", EXACT) and rng.random() < 0.3,
            reads=rng.random() < 0.2,
            spills=spills,
            direct=not spills and rng.random() < 0.2,
            revises=strategy in ("one step", "replay") and rng.random() < 0.3,
            copies=rng.random() < COPIED,
            rewinds=rewinds,
            loses=rng.random() < LOST,
            http=random.Random(f"http {seed}").random() < BY_HTTP,
            replicas=replicas,
            confirming=min(replicas, replicating.choice(CONFIRMING)),
        )
        if redis == SINGLE:
            return mix
        # A cluster takes no spill folder and no restored run. Direct clients and restores wait for no replica.
        return dataclasses.replace(mix, spills=mix.spills and redis == SENTINEL, copies=False, direct=False)

    @property
    def policies(self) -> tuple[str, ...]:
        """Adapters that producers generate for; "" without adapters."""
        return tuple(self.all_adapters) or ("",)

    @property
    def own_batches(self) -> dict[str, dict[str, int]]:
        """Batch and publication of each adapter."""
        return adapters_of(ADAPTERS, self.adapters)

    @property
    def all_adapters(self) -> dict[str, dict[str, int]]:
        """Batch and publication of each adapter that the run ever has: an operator adds one."""
        return adapters_of(ADAPTERS, self.adapters + 1) if self.changes_adapters else self.own_batches

    @property
    def changes_adapters(self) -> bool:
        """Whether an operator adds, pauses and removes adapters."""
        return self.revises and self.adapters > 0

    @property
    def can_fail_over(self) -> bool:
        """Whether every client of Redis knows enough to notice a shorter history.

        A producer that writes directly knows its own groups only, and a restore nothing at all. A loss that is accepted
        while a replica answers would come back with the right server.
        """
        return not (self.direct or self.copies or self.loses)

    def options(self) -> dict[str, Any]:
        """Return the options of the strategy."""
        return STRATEGIES[self.strategy][1] | ({"requires": [COLUMN]} if self.staged else {})

    def config(self, folder: Path) -> dict[str, Any]:
        """Return the configuration of the run; `folder` is for frames."""
        batch: dict[str, int] = {"tokens_per_batch": 128} if self.adapters else {"groups_per_batch": 4}
        config = {
            "strategy": {"name": STRATEGIES[self.strategy][0], "options": self.options()},
            "batch": batch | {"seq_len": 64},
            "group_size": GROUP_SIZE,
            "vocab_size": VOCAB_SIZE,
            "tickets": {"ttl_s": TICKET_TTL_S, "max_attempts": 3},
        }
        if self.adapters:
            config["adapters"] = self.own_batches
        return config | (spill_to(folder) if self.spills else {})

    def last_revision(self) -> dict[str, Any]:
        """Return the change after which every adapter is there and trains."""
        return {"adapters": {name: own | {"paused": False} for name, own in self.all_adapters.items()}}

    def revision(self, rng: random.Random) -> dict[str, Any]:
        """Draw a change of the run. The first adapter always stays, so that the run trains."""
        if self.changes_adapters and rng.random() < 0.7:
            changed = rng.choice(tuple(self.all_adapters)[1:])
            own = self.all_adapters[changed]
            return {"adapters": {changed: rng.choice((None, own | {"paused": True}, own | {"paused": False}))}}
        name, values = REVISED
        options = self.options() | {name: rng.choice(values)}
        return {
            "strategy": {"name": STRATEGIES[self.strategy][0], "options": options},
            "limits": {"max_tokens_live": rng.choice((400, 2000, None))},
        }
