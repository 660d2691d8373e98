"""When a server asks for a lease, and how it asks for many at once: its parts in this process, on a real Valkey."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

from replaybuf.service.leadership import Leadership
from replaybuf.service.peers.living_servers import LivingServers
from replaybuf.service.run.lease_timer import LEASE_S, LEFT_S, MARGIN_S, RENEWAL_S, TOGETHER_S, LeaseTimer
from replaybuf.service.run.served_run import Run
from replaybuf.store import EmbeddedServer, HeldLease, Store, keys
from replaybuf.wire.config import BatchSpec, RunConfig
from replaybuf.wire.config_patch import ConfigPatch

HELD_S = 60.0
"""Leases of a test, which end in none, however slow the machine is."""
_names = itertools.count()


class Clock:
    """A clock that is put forward by hand."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_lease_is_renewed_after_a_third_of_it_and_a_little_earlier_with_others() -> None:
    """From the moment it was asked for; a lease never asked for is due at once."""
    clock = Clock()
    lease = LeaseTimer(clock)
    assert lease.due() and lease.ended()
    lease.extend(LEASE_S, asked_s=99.6)
    assert (lease.due(), lease.due(TOGETHER_S), lease.ended()) == (False, False, False)
    assert abs(lease.due_in_s() - (RENEWAL_S - 0.4)) < 1e-9
    clock.now_s = 99.6 + RENEWAL_S - TOGETHER_S
    assert (lease.due(), lease.due(TOGETHER_S)) == (False, True)
    clock.now_s = 99.6 + RENEWAL_S
    assert lease.due()
    clock.now_s = 99.6 + LEASE_S
    assert lease.ended()


def test_a_follower_asks_when_the_leaders_lease_ends() -> None:
    """Asked for earlier it would be held still, and asked for again and again until it ends."""
    clock = Clock()
    lease = LeaseTimer(clock)
    lease.extend(0.1)
    assert abs(lease.due_in_s() - (0.1 + MARGIN_S)) < 1e-9
    assert not lease.due(TOGETHER_S)
    clock.now_s += 0.1 + MARGIN_S
    assert lease.due()


def test_a_free_lease_is_left_to_another_server_once_and_for_a_moment() -> None:
    """Counted from the first time that it was free, however often it is asked for."""
    clock = Clock()
    lease = LeaseTimer(clock)
    assert lease.leave(clock.now_s) and not lease.due(TOGETHER_S)
    clock.now_s += LEFT_S / 2
    assert lease.leave(clock.now_s)
    clock.now_s += LEFT_S / 2 + MARGIN_S
    assert lease.due(TOGETHER_S) and not lease.leave(clock.now_s)
    lease.extend(LEASE_S)
    assert lease.leave(clock.now_s)


def led_here(server: EmbeddedServer, work: Callable[[Store, Leadership, list[Run]], Awaitable[None]]) -> None:
    """Do `work` on three runs led here, whose leases are due."""

    async def main() -> None:
        store = await Store.open(server.url)
        try:
            servers, runs = LivingServers(store, "here"), []
            for name in (f"lease-{next(_names)}" for _ in range(3)):
                token = (await store.runs.take_lease(name, servers.holder, HELD_S)).token
                runs.append(await Run.create(name, store, str(token), RunConfig(batch=BatchSpec(groups_per_batch=1))))
                runs[-1].lease = LeaseTimer(Clock())
            await work(store, Leadership(store, servers, "here"), runs)
        finally:
            await store.close()

    asyncio.run(main())


def test_many_leases_are_renewed_in_one_round_trip(server: EmbeddedServer) -> None:
    """Each one from the moment of asking; the tokens stay."""

    async def work(store: Store, leadership: Leadership, runs: list[Run]) -> None:
        sent = []
        ask = store.runs.hold_leases

        async def counted(names: list[str], *arguments: Any) -> list[HeldLease | float | None]:
            sent.append(names)
            return await ask(names, *arguments)

        store.runs.hold_leases = counted  # type: ignore[assignment,method-assign]
        tokens = [run.journal.token for run in runs]
        assert await leadership.renew(runs) == []
        assert sent == [[run.name for run in runs]]
        assert not any(run.lease.due() for run in runs)
        assert [run.journal.token for run in runs] == tokens

    led_here(server, work)


def test_a_lease_that_is_as_expected_is_renewed_and_not_read(server: EmbeddedServer) -> None:
    """Another holder, newer ends and a free lease are read."""

    async def work(store: Store, leadership: Leadership, runs: list[Run]) -> None:
        kept, lost, grown = runs
        holder = leadership._holder
        expected = [HeldLease.expect(holder, run.state.entries, run.state.stored) for run in runs]
        await store.runs.take_lease(lost.name, "2@there", HELD_S, force=True)
        await grown.patch(ConfigPatch(state="paused"))
        names = [run.name for run in runs]
        first, second, third = await store.runs.hold_leases(names, holder, LEASE_S, expected)
        assert isinstance(first, float) and 0 < first <= LEASE_S
        assert isinstance(second, HeldLease) and second.holder == "2@there"
        assert isinstance(third, HeldLease) and (third.holder, third.entries) == (holder, grown.state.entries)
        assert await store.connection.client.pttl(keys.lead(kept.name)) > 0
        await store.runs.release_lease(kept.name, holder)
        assert await store.runs.hold_leases(names[:1], holder, LEASE_S, expected) == [HeldLease("", 0.0, 1, 0)]

    led_here(server, work)


def test_renew_follows_a_lost_lease_and_returns_a_free_one(server: EmbeddedServer) -> None:
    """The others go on; taking over is left to `seek`, as it takes long."""

    async def work(store: Store, leadership: Leadership, runs: list[Run]) -> None:
        kept, lost, freed = runs
        await store.runs.take_lease(lost.name, "2@there", HELD_S, force=True)
        await store.runs.release_lease(freed.name, leadership._holder)
        assert await leadership.renew(runs) == [freed]
        assert (kept.journal.leading, lost.journal.leading) == (True, False)
        assert lost.journal.leader_url == "there"
        assert freed.lease.due() and not freed.lease.asking.locked()
        old = freed.journal.token
        await leadership.seek(freed)
        assert freed.journal.leading and freed.journal.token not in (None, old)
        assert not freed.lease.due()

    led_here(server, work)


def test_a_server_that_another_one_led_for_meanwhile_takes_over_from_it(server: EmbeddedServer) -> None:
    """It stood still while the other one led and handed the run back: the lease is its own, and its state is old."""

    async def work(store: Store, leadership: Leadership, runs: list[Run]) -> None:
        stalled = runs[0]
        between = await Run.load(stalled.name, store)
        assert between is not None
        await between.lead(str((await store.runs.take_lease(stalled.name, "2@there", HELD_S, force=True)).token))
        await between.patch(ConfigPatch(state="paused"))
        assert await store.runs.hand_over(stalled.name, between.journal.token, leadership._holder, HELD_S)
        assert stalled.journal.leading
        assert await leadership.renew([stalled]) == [stalled]
        await leadership.seek(stalled)
        assert (stalled.journal.leading, stalled.state.phase) == (True, "paused")

    led_here(server, work)


def test_renew_skips_a_run_whose_lease_is_being_asked_for(server: EmbeddedServer) -> None:
    """Two answers on their way could be heeded in the wrong order."""

    async def work(store: Store, leadership: Leadership, runs: list[Run]) -> None:
        async with runs[0].lease.asking:
            assert await leadership.renew(runs) == []
        assert [run.lease.due() for run in runs] == [True, False, False]

    led_here(server, work)
