"""Faults: what is hurt next and when it comes back, drawn from a seed."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from tests.chaos.cluster import Cluster
from tests.chaos.failover import Failover
from tests.chaos.history import Faulted, Healed, Recorder, now_s
from tests.chaos.hostile import NAMES
from tests.chaos.older_redis import Substitution
from tests.chaos.processes import Child, Valkey
from tests.chaos.runs import ADAPTERS
from tests.chaos.trainer import FENCED
from tests.waiting import eventually

ROLES = (
    *("leader", "leader", "standby", "standby", "valkey", "valkey"),
    *("producer", "generator", "trainer", "trainer", "reader", "stage"),
)
"""Roles whose death breaks the most are listed twice. There is no standby while a killed server restarts."""
FAILOVER_ROLES = ("valkey", "valkey", "valkey", "sentinel")
CUT_SHARE = 1 / 3
"""Share of the faults on Valkeys under Sentinel that cut the network instead."""
OTHERS = {
    "older": "older Redis",
    "lagging": "lagging promotion",
    "jump": "clock jump",
    "crowd": "mass eviction",
    "ranks": "512 waiting ranks",
    "hostile": "hostile bodies",
    "side_run": "restored runs",
    "lost_run": "accepted losses",
    "cut": "network cuts",
}
"""Faults of other kinds than `kill` and `stop`, with their names in the report."""
WEIGHTS = {
    "process": 14,
    "older": 1,
    "lagging": 1,
    "jump": 2,
    "crowd": 1,
    "ranks": 1,
    "hostile": 2,
    "side_run": 2,
    "lost_run": 1,
}
NOT_IN_FAILOVERS = ("older", "lagging", "side_run")
"""They put another Redis behind the address of one, or write without waiting for a replica."""
JUMPS_S = (660.0, 660.0, 86_400.0, -660.0, -3_600.0)
"""A jump of +11 minutes is longer than the default lifetime of a ticket."""
LOAD_TIMEOUT_S = 120.0
RESTART_PAUSE_S = (0.05, 1.0)
STOP_S = (0.2, 5.0)
"""Some stops are longer than the lease of 3 s."""
BETWEEN_S = (0.6, 3.4)
REPLACED_FROM_S = 1.5
"""A trainer that is stopped for longer may get a successor."""
START_GRACE_S = 20.0
"""A server may end if Redis is away at its start; it is started again, as a service manager would."""


@dataclasses.dataclass(order=True)
class _Due:
    at_s: float
    order: int
    heal: Callable[[], None] = dataclasses.field(compare=False)


class Faults:
    """Injects faults and counts them in `done`, then restarts every process. `ended` lists those that ended alone.

    `weights`: how often each kind of fault is drawn.
    """

    def __init__(
        self, cluster: Cluster, recorder: Recorder, rng: random.Random, weights: Mapping[str, int] = WEIGHTS
    ) -> None:
        self.done = 0
        self._weights = weights
        self.ended: list[str] = []
        self._cluster, self._recorder, self._rng = cluster, recorder, rng
        self._due: list[_Due] = []
        self._order = itertools.count()
        self._down: set[str] = set()
        self._valkey_back_s = 0.0
        self._postponed = ""
        self._older = Substitution(cluster, recorder, rng)
        self._clocks: dict[str, float] = defaultdict(float)

    def run(self, kills: int, ends_s: float) -> None:
        """Inject faults until `kills` are done or the time is over, then bring all processes back."""
        next_s = now_s() + self._rng.uniform(*BETWEEN_S)

        def step() -> bool:
            nonlocal next_s
            self._heal_due()
            self._restart_ended()
            if now_s() >= next_s and self._inject_one():
                self.done += 1
                next_s = now_s() + self._rng.uniform(*BETWEEN_S)
            return self.done >= kills or now_s() >= ends_s

        eventually(step, math.inf)
        self.heal_all()

    def heal_all(self) -> None:
        """Bring all processes back, each at its time, and wait for the loads that end by themselves."""

        def step() -> bool:
            self._heal_due()
            self._restart_ended()
            return not self._due

        eventually(step, math.inf)
        for load in self._cluster.loads:
            code = load.wait_end(LOAD_TIMEOUT_S)
            if code != 0:
                self.ended.append(f"{load.name} with {code}: {_last_line(load)}")
                load.kill()

    # ------------------------------------------------------------------ hurting

    def _inject_one(self) -> bool:
        """Inject one fault; return False if what was drawn is not possible now."""
        kind = self._postponed or self._rng.choices(list(self._weights), list(self._weights.values()))[0]
        self._postponed = ""
        match kind:
            case "older" | "lagging":
                if self._works("side_run"):  # an older Redis would bring its deleted run back
                    return False
                if self._due or not self._older.possible:
                    self._postponed = kind  # until every process works again
                    return False
                injected = self._older.inject(kind)
                self._valkey_back_s = now_s()
                return injected
            case "jump":
                return self._jump()
            case "crowd" | "ranks" | "hostile" | "side_run" | "lost_run":
                return self._start_load(kind)
        return self._hurt_process()

    def _hurt_process(self) -> bool:
        cluster = self._cluster
        role = self._rng.choice((*ROLES, *FAILOVER_ROLES) if cluster.failover else ROLES)
        kind = self._rng.choice(("kill", "stop"))
        child, led = self._choose(role)
        cuts = isinstance(cluster.failover, Failover) and isinstance(child, Valkey) and self._rng.random() < CUT_SHARE
        if child is None or child.name in self._down or child.exit_code is not None:
            return False
        self._down.add(child.name)
        kind = "cut" if cuts else kind
        self._recorder.write(
            Faulted(at_s=now_s(), process=child.name, role=role, kind=kind, server=cluster.url_of(child), led=led)
        )
        if kind == "cut":
            self._cut(child)
        elif kind == "kill":
            child.kill()
            self._later(RESTART_PAUSE_S, lambda: self._restart(child))
        else:
            child.stop()
            pause_s = self._later(STOP_S, lambda: self._resume(child))
            if role == "trainer" and pause_s > REPLACED_FROM_S and self._rng.random() < 0.6:
                run = next(run for run, trainer in cluster.trainers.items() if trainer is child)
                cluster.replace_trainer(run)
        return True

    def _cut(self, child: Child) -> None:
        failover = self._cluster.failover
        if not isinstance(failover, Failover) or not isinstance(child, Valkey):
            raise TypeError(f"{child.name} is not watched by Sentinel")
        failover.cut(child)

        def join() -> None:
            failover.join(child)
            self._healed(child)

        self._later(STOP_S, join)

    def _jump(self) -> bool:
        """Move the wall clock of one server; it stays moved, also after a restart."""
        url = self._rng.choice(self._cluster.urls)
        self._clocks[url] += self._rng.choice(JUMPS_S)
        self._cluster.move_clock(url, self._clocks[url])
        name = self._cluster.servers[url].name
        self._recorder.write(Faulted(at_s=now_s(), process=name, role="server", kind="jump", server=url))
        return True

    def _start_load(self, kind: str) -> bool:
        """Start a load of a kind, unless the last one of the kind still works."""
        if self._works(kind):
            return False
        run = self._rng.choice([run for run in self._cluster.runs if run != ADAPTERS])
        options = {
            "hostile": ("--attack", self._rng.choice(NAMES)),
            "side_run": ("--redis-url", self._cluster.redis_url, "--folder", str(self._cluster.folder)),
            "lost_run": ("--folder", str(self._cluster.folder)),
        }
        load = self._cluster.start_load(kind, "--run", run, *options.get(kind, ()))
        self._recorder.write(Faulted(at_s=now_s(), process=load.name, role="load", kind=kind))
        return True

    def _works(self, kind: str) -> bool:
        """Return whether a load of a kind still works."""
        return any(load.role == kind and load.exit_code is None for load in self._cluster.loads)

    def _choose(self, role: str) -> tuple[Child | None, list[str]]:
        cluster = self._cluster
        if role in ("leader", "standby"):
            led = {url: cluster.led_by(url) for url in cluster.urls}
            urls = [url for url in cluster.urls if bool(led[url]) == (role == "leader")]
            url = self._rng.choice(urls) if urls and any(led.values()) else None
            return (cluster.servers[url], led[url]) if url else (None, [])
        failover = cluster.failover
        if failover and role in ("valkey", "sentinel"):
            if self._down & {child.name for child in failover.all} or not failover.whole():
                return None, []  # with two away, what is acknowledged may be on none of the others
            if role == "valkey":
                return failover.choose(self._rng), []
            return (self._rng.choice(failover.sentinels) if failover.sentinels else None), []
        processes: dict[str, Sequence[Child]] = {
            "valkey": [cluster.valkey],
            "producer": cluster.producers,
            "generator": [cluster.generator] if cluster.generator else [],
            "reader": [cluster.reader],
            "stage": [cluster.stage] if cluster.stage else [],
            "trainer": [cluster.trainers[run] for run in cluster.runs],
        }
        found_of_role = processes[role]
        return (self._rng.choice(found_of_role) if found_of_role else None), []

    # ------------------------------------------------------------------ healing

    def _later(self, between_s: tuple[float, float], heal: Callable[[], None]) -> float:
        pause_s = self._rng.uniform(*between_s)
        heapq.heappush(self._due, _Due(now_s() + pause_s, next(self._order), heal))
        return pause_s

    def _heal_due(self) -> None:
        while self._due and self._due[0].at_s <= now_s():
            heapq.heappop(self._due).heal()

    def _restart(self, child: Child) -> None:
        child.start()
        self._healed(child)

    def _resume(self, child: Child) -> None:
        child.resume()
        self._healed(child)

    def _healed(self, child: Child) -> None:
        failover = self._cluster.failover
        if failover and child.role == "valkey" and not failover.whole():
            self._later((0.2, 0.3), lambda: self._healed(child))  # until a replica is in sync, no write is confirmed
            return
        self._down.discard(child.name)
        self._recorder.write(Healed(at_s=now_s(), process=child.name))
        if child.role == "valkey":
            self._valkey_back_s = now_s()

    def _restart_ended(self) -> None:
        storage = self._cluster.storage
        for child in [*self._cluster.actors, *self._cluster.servers.values(), *storage]:
            code = child.exit_code
            if code is None or child.name in self._down:
                continue
            hurt = not self._down.isdisjoint(child.name for child in storage)
            valkey_away = hurt or now_s() - self._valkey_back_s < START_GRACE_S
            # A stopped trainer may have attached before its successor; the checker verifies the fencing.
            fenced = child.role == "trainer" and code == FENCED
            if not (fenced or (child.role == "server" and valkey_away)):
                self.ended.append(f"{child.name} with {code}: {_last_line(child)}")
            self._down.add(child.name)
            self._later((0.3, 0.5), lambda child=child: self._restart(child))  # type: ignore[misc]


def _last_line(child: Child) -> str:
    lines = child.log.read_text(errors="replace").splitlines()
    return lines[-1] if lines else "(nothing logged)"
