"""How servers share the runs: parts of servers in this process, on a real Valkey."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from replaybuf.errors import NotLeader, ServiceUnavailable
from replaybuf.kernel.decide.rendezvous import wanted_leader
from replaybuf.service.host import Service
from replaybuf.service.leadership import Leadership
from replaybuf.service.peers.balance import Balance
from replaybuf.service.peers.living_servers import FRESH_S, SILENT_S, STEADY_S, LivingServers, name_release
from replaybuf.service.run.lease_timer import EXPECTING_S, LEASE_S, LEFT_S, MARGIN_S, RENEWAL_S
from replaybuf.service.run.served_run import Run
from replaybuf.store import EmbeddedServer, Store, keys
from replaybuf.wire.config import BatchSpec, RunConfig
from replaybuf.wire.config_patch import ConfigPatch
from replaybuf.wire.contract import AttachRequest
from tests.led_run import append, train

RUNS = [f"balanced-{number}" for number in range(40)]
OTHER = "0123@http://there"
CONFIG = RunConfig(batch=BatchSpec(groups_per_batch=1))


@asynccontextmanager
async def alone(folder: Path) -> AsyncIterator[Store]:
    """Open a store on a Valkey of its own: other tests announce servers too."""
    embedded = EmbeddedServer(folder / "valkey")
    await embedded.start()
    try:
        store = await Store.open(embedded.url)
        try:
            yield store
        finally:
            await store.close()
    finally:
        await embedded.stop()


async def announce(
    store: Store, holder: str = OTHER, *, alive_s: float = STEADY_S + 1, silent_s: float = 0.0, of: str | None = None
) -> None:
    """Announce a server as one that has lived for a time."""
    now_ms = 1000 * time.time()
    value = f"{now_ms - 1000 * alive_s:.0f} {now_ms - 1000 * silent_s:.0f} {of or name_release()}"
    await store.connection.client.hset(keys.SERVERS, holder, value)


async def led(store: Store, servers: LivingServers, name: str) -> Run:
    """Create a run that `servers.holder` leads."""
    token = (await store.runs.take_lease(name, servers.holder, LEASE_S)).token
    return await Run.create(name, store, str(token), CONFIG)


def handed_to(servers: LivingServers) -> set[str]:
    """List the runs that are to be handed over."""
    return {run for run in RUNS if servers.successor(run)}


def test_runs_are_handed_over_to_steady_servers_of_the_same_release(tmp_path: Path) -> None:
    """Not to one that has just come, is silent, or is of another release; that of another release gets none at all."""

    async def main() -> None:
        async with alone(tmp_path) as store:
            servers = LivingServers(store, "http://here")
            await servers.announce()
            assert not handed_to(servers)
            await announce(store)
            await servers.announce()
            both = frozenset({servers.holder, OTHER})
            share = {run for run in RUNS if wanted_leader(run, both) == OTHER}
            assert handed_to(servers) == share and 0 < len(share) < len(RUNS)
            for alive_s, silent_s in ((STEADY_S - 1, 0.0), (STEADY_S + 1, FRESH_S + 1)):
                await announce(store, alive_s=alive_s, silent_s=silent_s)
                await servers.announce()
                assert not handed_to(servers)
                assert not any(servers.is_ours(run, "") for run in share)
            for release, silent_s, leads in (("0.0.1", 0.0, False), (None, SILENT_S + 1, True)):
                await announce(store, of=release, silent_s=silent_s)
                await servers.announce()
                assert not handed_to(servers) and servers.leads is leads
                assert all(servers.is_ours(run, "") for run in RUNS)

    asyncio.run(main())


def test_a_clock_that_differs_by_more_than_a_second_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One late announcement is no difference. Runs are shared all the same."""

    async def main() -> None:
        async with alone(tmp_path) as store:
            here = LivingServers(store, "http://here")
            late = LivingServers(store, "http://late", wall=lambda: time.time() - 3.0)
            for _ in range(4):
                await late.announce()
                await here.announce()
            messages = [record.getMessage() for record in caplog.records if "clocks differ" in record.getMessage()]
            assert [re.sub(r"\d\.\d", "x", message).partition(" ours")[0] for message in messages] == [
                "clocks differ: that of http://late is x s behind",
                "clocks differ: that of http://here is x s ahead of",
            ]
            assert here.any and late.any

    asyncio.run(main())


def test_one_run_at_a_time_is_offered_and_one_that_came_back_waits(tmp_path: Path) -> None:
    """The other server may be unable to lead it. An offer of which nothing came is made again, after all others."""

    async def main() -> None:
        async with alone(tmp_path) as store:
            servers = LivingServers(store, "http://here")
            runs = [await led(store, servers, name) for name in RUNS[:12]]
            balance = Balance(servers, time.monotonic)
            await announce(store)
            await servers.announce()
            moving = [run for run in runs if servers.successor(run.name)]
            for _ in range(2):
                assert [await balance.next(runs) for _ in moving] == [(run, OTHER) for run in moving]
            for run in moving[1:]:
                run.journal.terms += 1
            for _ in range(2):
                assert await balance.next(runs) == (moving[0], OTHER)
            unshared = LivingServers(store, "http://unshared", alone=True)
            assert await Balance(unshared, time.monotonic).next(runs) is None
            assert unshared.holder not in {
                server.holder for server in await store.servers.announce("x", "", SILENT_S, 0.0)
            }

    asyncio.run(main())


def test_a_run_is_handed_over_between_two_decisions_and_goes_on(tmp_path: Path) -> None:
    """The leader decides nothing from then on; the successor finds the lease that names it, and trains on."""

    async def main() -> None:
        async with alone(tmp_path) as store:
            here, there = LivingServers(store, "http://here"), LivingServers(store, "http://there")
            run = await led(store, here, "moved")
            await append(run, "g0", "g1")
            other = await Run.load("moved", store)
            assert other
            leadership, next_leadership = Leadership(store, here, "http://here"), Leadership(store, there, "")
            async with run.journal.decision():
                handing = asyncio.create_task(leadership.hand_over(run, there.holder))
                assert not (await asyncio.wait({handing}, timeout=0.1))[0]
                assert run.journal.leading
            await handing
            assert (run.journal.leading, run.journal.leader_url) == (False, "http://there")
            with pytest.raises(NotLeader):
                await run.patch(ConfigPatch())
            await append(run, "g2")  # any server stores groups
            assert (await store.runs.take_lease("moved", here.holder, LEASE_S)).holder == there.holder
            assert await next_leadership.renew([other]) == [other]
            await next_leadership.seek(other)
            assert other.journal.leading and other.state.stored == 3
            epoch = (await other.trainer_calls.attach(AttachRequest(dp_world_size=1))).epoch
            await train(other, epoch, range(2))

    asyncio.run(main())


def test_a_leader_takes_over_from_itself_if_a_handover_fails(tmp_path: Path) -> None:
    """It does not know whether it leads, so it follows, asks at once, and has the lease still."""

    async def main() -> None:
        async with alone(tmp_path) as store:
            here = LivingServers(store, "http://here")
            run = await led(store, here, "kept")
            leadership = Leadership(store, here, "http://here")
            await leadership.renew([run])
            call = store.connection.call

            async def fail(*_: object, **__: object) -> None:
                raise OSError("cut")

            store.connection.call = fail  # type: ignore[method-assign, assignment]
            with pytest.raises(OSError, match="cut"):
                await leadership.hand_over(run, OTHER)
            store.connection.call = call  # type: ignore[method-assign]
            assert not run.journal.leading and run.lease.due_in_s() <= MARGIN_S
            while not run.lease.due():  # noqa: ASYNC110 - its clock is the real one
                await asyncio.sleep(0.01)
            assert await leadership.renew([run]) == [run]
            await leadership.seek(run)
            assert run.journal.leading

    asyncio.run(main())


def test_a_server_of_another_release_follows_until_the_others_have_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes no free lease and creates no run, says so, and `doctor` sees it; then it leads."""

    async def main() -> None:
        async with alone(tmp_path) as store:
            await led(store, LivingServers(store, "http://there"), "followed")
            await store.connection.client.delete(keys.lead("followed"))
            await announce(store, of="0.0.1+old")
            service = Service(store, url="http://here", embedded=False)
            await service.start()
            run = service.runs["followed"]
            for _ in range(2):
                assert not run.journal.leading and not run.lease.due()
                run.lease.extend(-1.0)
                assert await service._leadership.renew([run]) == []
            with pytest.raises(ServiceUnavailable, match=r"http://there has the release and plug-ins 0.0.1\+old"):
                await service.create("new", CONFIG)
            releases = {server.holder: server.release for server in await store.servers.read()}
            assert releases[OTHER] == "0.0.1+old" and len(releases) == 2
            await store.servers.withdraw(OTHER)
            await service._servers.announce()
            run.lease.extend(-1.0)
            await service._leadership.seek(run)
            assert run.journal.leading and (await service.create("new", CONFIG))[1]
            await announce(store, of="0.0.2+new", alive_s=0.0)
            await service._servers.announce()
            assert service._servers.leads
            await service.stop()

    asyncio.run(main())
    assert [
        record.message.count("follows, and leads no run") for record in caplog.records if "plug-ins" in record.message
    ] == [1, 1]


def test_a_free_lease_goes_first_to_the_server_that_should_have_it(tmp_path: Path) -> None:
    """A moment later anybody takes it. The server that had it last does not count: it has lost it."""

    async def main() -> None:
        async with alone(tmp_path) as store:
            here = LivingServers(store, "http://here")
            await announce(store)
            await here.announce()
            ours, theirs = (next(run for run in RUNS if here.is_ours(run, "") is is_ours) for is_ours in (True, False))
            runs = [await led(store, LivingServers(store, "http://dead"), name) for name in (ours, theirs)]
            for run in runs:
                run.journal.become_follower(None)
                await store.connection.client.delete(keys.lead(run.name))
            leadership = Leadership(store, here, "http://here")
            assert await leadership.renew(runs) == [runs[0]]
            assert 0 < runs[1].lease.due_in_s() <= LEFT_S + 0.1
            runs[1].lease.holder = OTHER
            assert await leadership.renew(runs[1:]) == runs[1:]

    asyncio.run(main())


def test_a_server_that_is_to_get_a_run_asks_for_its_lease_often(tmp_path: Path) -> None:
    """So that the run stands still for a moment only."""

    async def main() -> None:
        async with alone(tmp_path) as store:
            here, there = LivingServers(store, "http://here"), LivingServers(store, "http://there")
            await announce(store, here.holder)
            await announce(store, there.holder)
            await here.announce()
            for name in RUNS[:12]:
                run = await led(store, there, name)
                run.journal.become_follower(None)
                await Leadership(store, here, "http://here").renew([run])
                asks_in_s = EXPECTING_S if here.is_ours(name, "") else RENEWAL_S
                assert asks_in_s - 0.2 < run.lease.due_in_s() <= asks_in_s

    asyncio.run(main())


def test_a_server_alone_on_its_redis_announces_nothing_and_one_that_ends_is_forgotten(tmp_path: Path) -> None:
    async def main() -> None:
        async with alone(tmp_path) as store:
            for embedded in (True, False):
                service = Service(store, url="http://here", embedded=embedded)
                await service.start()
                assert await store.connection.client.exists(keys.SERVERS) is not embedded
                await service.stop()
                assert not await store.connection.client.exists(keys.SERVERS)

    asyncio.run(main())
