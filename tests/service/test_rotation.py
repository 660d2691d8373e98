"""Quiet runs are looked at in turn, busy ones each time: runs of this process on a real Valkey, a clock by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from replaybuf.service.clock import Clock
from replaybuf.service.host import Service
from replaybuf.service.http.call.metrics import KEPT_S, Exposition
from replaybuf.service.rotation import BusyRuns, Rotation
from replaybuf.service.run.lease_timer import LEASE_S
from replaybuf.service.run.served_run import QUIET_AFTER_S, Run
from replaybuf.store import EmbeddedServer, Store
from replaybuf.wire.config import BatchSpec, RunConfig
from replaybuf.wire.config_patch import ConfigPatch
from tests.led_run import append

NAMES = ("a", "b", "c")
CONFIG = RunConfig(batch=BatchSpec(groups_per_batch=1))


class Hand:
    """A monotonic clock that is put forward by hand."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def with_runs(server: EmbeddedServer, work: Callable[[Service, Hand], Awaitable[None]]) -> None:
    """Do `work` with a service that leads three runs and does nothing by itself."""

    async def main() -> None:
        store, clock = await Store.open(server.url), Hand()
        try:
            service = Service(store, url="http://here", embedded=True, clock=Clock(monotonic=clock))
            for name in NAMES:
                await service.create(f"rotating-{name}", CONFIG, if_absent=True)
            await work(service, clock)
            await service.stop()
        finally:
            await store.close()

    asyncio.run(main())


def names(runs: list[Run]) -> list[str]:
    """Return the last letters of runs."""
    return sorted(run.name[-1] for run in runs)


def test_a_quiet_run_has_its_turn_and_a_change_makes_it_busy_at_once(server: EmbeddedServer) -> None:
    """Nothing waits for its turn but what nobody has asked for."""

    async def work(service: Service, clock: Hand) -> None:
        busy, runs = BusyRuns(), service.runs
        rotation = Rotation(busy, rounds=3)
        for run in runs.values():
            busy.watch(run)
        assert names(rotation.next(runs)) == [*NAMES]
        clock.now_s += 2 * QUIET_AFTER_S
        turns = [names(rotation.next(runs)) for _ in NAMES]
        assert sorted(turns) == [["a"], ["b"], ["c"]]
        await append(runs["rotating-a"], "g")
        assert names(rotation.next(runs)) == ["a", "c"], "it does not wait for its turn"
        assert all("a" in names(rotation.next(runs)) for _ in NAMES)
        runs["rotating-b"].journal.presence.record_producer("p")  # it changes nothing, and is noticed in its turn
        for _ in NAMES:
            rotation.next(runs)
        assert names(busy.list()) == ["a", "b"]

    with_runs(server, work)


def test_a_quiet_run_stays_quiet_when_it_is_taken_over_unless_there_is_something_new(server: EmbeddedServer) -> None:
    """Else the runs of a killed server would all be busy at once, and slow their own takeover down."""

    async def work(service: Service, clock: Hand) -> None:
        run, store = service.runs["rotating-c"], service.store
        other = await Run.load(run.name, store, service.clock)
        assert other
        quiet = []
        for follower, leader in ((other, run), (run, other)):
            clock.now_s += 3 * QUIET_AFTER_S
            follower.quiet()
            clock.now_s += 3 * QUIET_AFTER_S
            assert follower.quiet()
            if leader is other:
                await append(leader, "new")
            leader.journal.become_follower(None)
            lease = await store.runs.take_lease(run.name, f"{id(follower)}", LEASE_S, force=True)
            await follower.lead(str(lease.token), (lease.entries, lease.stored))
            quiet.append(follower.quiet())
        assert quiet == [True, False]

    with_runs(server, work)


def test_a_finished_run_leaves_the_metrics_when_its_last_values_are_scraped(server: EmbeddedServer) -> None:
    """It costs nothing from then on, and is there again when it goes on."""

    async def work(service: Service, clock: Hand) -> None:
        run, exposition = service.runs["rotating-c"], Exposition(service)
        await run.patch(ConfigPatch(state="finished"))
        shown = b'run="rotating-c"'
        assert not run.quiet() and shown in await exposition.text()
        clock.now_s += QUIET_AFTER_S + KEPT_S
        text = await exposition.text()
        assert shown not in text and b'run="rotating-b"' in text
        await run.patch(ConfigPatch(state="running"))
        assert shown in await exposition.text()

    with_runs(server, work)
