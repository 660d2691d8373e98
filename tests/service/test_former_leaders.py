"""A server that was stopped while it deletes, and goes on when others have gone on without it: it destroys nothing.

Each test stops one server at a different await of its work, lets another one finish, and lets the first go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from replaybuf.backup.archive import ArchiveWriter, read_manifest, read_sections
from replaybuf.backup.source import Source
from replaybuf.backup.target import open_target
from replaybuf.errors import Conflict, DataLost, NoRoom, NotLeader, ServiceUnavailable
from replaybuf.service.host import Service
from replaybuf.service.run.append.group_check import Incoming
from replaybuf.service.run.served_run import Run
from replaybuf.store import EmbeddedServer, Store, keys
from replaybuf.wire.config import BatchSpec, Limits, RunConfig, SpillSpec
from replaybuf.wire.contract import AttachRequest
from replaybuf.wire.group import group_from_json
from tests.builders import arriving, rollout, wire_group
from tests.led_run import append, train

_names = itertools.count()
LEASE_S = 60.0
FRAME_BYTES = 1_400
"""A little more than a small group takes."""
TAKEOVER_CALLS = 15
"""Calls to Redis and the folder, of a takeover and the sweep after it."""
DELETION_CALLS = 10
"""Calls to Redis and the folder, of a deletion."""
RESTORE_CALLS = 12
"""Calls to Redis of a restore, up to the one that lets the run appear."""


class Stop:
    """Stops its caller at call number `at`, until `go`."""

    def __init__(self, at: int) -> None:
        self.reached = asyncio.Event()
        self._left = at
        self._go = asyncio.Event()

    def go(self) -> None:
        """Let the stopped caller go on."""
        self._go.set()

    async def here(self) -> None:
        """Stop here, if this is the call."""
        self._left -= 1
        if self._left < 0 and not self._go.is_set():
            self.reached.set()
            await self._go.wait()

    def before(self, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """Stop before a call."""

        async def stopping(*arguments: Any, **named: Any) -> Any:
            await self.here()
            return await call(*arguments, **named)

        return stopping

    def after(self, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """Stop after a call: its caller goes on with an old answer."""

        async def stopping(*arguments: Any, **named: Any) -> Any:
            answer = await call(*arguments, **named)
            await self.here()
            return answer

        return stopping


@asynccontextmanager
async def opened(server: EmbeddedServer, count: int) -> AsyncIterator[list[Store]]:
    """Open connections of several servers."""
    stores = [await Store.open(server.url) for _ in range(count)]
    try:
        yield stores
    finally:
        for store in stores:
            await store.close()


async def token_of(store: Store, run: str, holder: str) -> str:
    """Take the lead from any holder."""
    lease = await store.runs.take_lease(run, holder, LEASE_S, force=True)
    assert lease.token is not None
    return lease.token


async def leader(store: Store, run: str, holder: str) -> Run:
    """Load a run and lead it."""
    loaded = await Run.load(run, store)
    assert loaded is not None
    await loaded.lead(await token_of(store, run, holder))
    return loaded


async def move(run: Run) -> None:
    """Do the spill's work."""
    run.spill.start()
    if run.spill._task:
        await run.spill._task


async def lead_and_sweep(run: Run, token: str) -> None:
    """Take over, and delete files of freed groups, unless another server leads by then."""
    with contextlib.suppress(NotLeader):
        await run.lead(token)
        await move(run)


async def fill(run: Run, numbers: range) -> None:
    """Store groups; move frames while there is no room."""
    for number in numbers:
        while True:
            try:
                await append(run, f"g{number}")
                break
            except NoRoom:
                await move(run)


async def until_done_or_stopped(task: asyncio.Task[Any], stop: Stop) -> None:
    """Wait until the task is done, or stops."""
    waits = asyncio.create_task(stop.reached.wait())
    ended, _ = await asyncio.wait({task, waits}, return_when=asyncio.FIRST_COMPLETED, timeout=30.0)
    waits.cancel()
    assert ended


@pytest.mark.parametrize("at", range(TAKEOVER_CALLS))
def test_a_former_leader_deletes_no_frame_of_the_new_one(server: EmbeddedServer, tmp_path: Path, at: int) -> None:
    """It is stopped before a call to Redis or the folder, in its takeover or the sweep; the new leader moves frames."""

    async def main() -> None:
        name = f"sweep-{next(_names)}"
        async with opened(server, 2) as (first, second):
            spec = RunConfig(
                batch=BatchSpec(groups_per_batch=2),
                limits=Limits(max_bytes_in_memory=4 * FRAME_BYTES, max_group_bytes=FRAME_BYTES),
                spill=SpillSpec(url=f"file://{tmp_path}/spill"),
                seed=at,
            )
            first_run = await Run.create(name, first, await token_of(first, name, "a"), spec)
            epoch = (await first_run.trainer_calls.attach(AttachRequest())).epoch
            await fill(first_run, range(12))
            await move(first_run)
            await train(first_run, epoch, range(2))
            await first_run.trainer_calls.checkpoint(2, epoch, 1)

            second_run, stop, token = await Run.load(name, second), Stop(at), await token_of(second, name, "b")
            assert second_run is not None and second_run.spill.files is not None
            files = second_run.spill.files
            files._do = stop.before(files._do)  # type: ignore[method-assign, assignment]
            second.connection.run = stop.before(second.connection.run)  # type: ignore[method-assign, assignment]
            sweeping = asyncio.create_task(lead_and_sweep(second_run, token))
            await until_done_or_stopped(sweeping, stop)
            assert stop.reached.is_set()

            first_run = await leader(first, name, "a")
            await fill(first_run, range(12, 30))
            await move(first_run)
            stop.go()
            await asyncio.wait_for(sweeping, 30.0)
            await move(first_run)

            spilled = await first.spill.read_spilled(name)
            assert len(spilled) >= 12
            entries = await first.groups.read_entries(name, sorted(spilled))
            sizes = {entry.strings.payload_key: FRAME_BYTES for entry in entries}
            assert None not in await first.groups.read_frames(name, sizes)
            for run in (first_run, second_run):
                run.close()

    asyncio.run(main())


def test_background_work_of_a_leader_ends_with_its_lead(server: EmbeddedServer, tmp_path: Path) -> None:
    """It is cancelled at the moment at which the server learns that another one leads."""

    async def main() -> None:
        name = f"ends-{next(_names)}"
        async with opened(server, 1) as (store,):
            spill, limits = SpillSpec(url=f"file://{tmp_path}"), Limits(max_bytes_in_memory=9999, max_group_bytes=9999)
            spec = RunConfig(batch=BatchSpec(groups_per_batch=2), limits=limits, spill=spill)
            run = await Run.create(name, store, await token_of(store, name, "a"), spec)
            work = run.journal.start(asyncio.sleep(60.0), "work")
            run.journal.become_follower(None)
            await asyncio.wait({work}, timeout=10.0)
            assert work.cancelled()
            run.close()

    asyncio.run(main())


def test_tickets_that_are_read_during_a_takeover_do_not_replace_its_own(server: EmbeddedServer) -> None:
    """The old leader died before it removed the ticket of a stored group; a follower's watch reads that ticket."""

    async def main() -> None:
        name = f"watch-{next(_names)}"
        async with opened(server, 2) as (first, second):
            spec = RunConfig(batch=BatchSpec(groups_per_batch=1))
            first_run = await Run.create(name, first, await token_of(first, name, "a"), spec)
            (ticket,) = (await first_run.tickets.issue("me", 1, "", 0.0)).tickets
            wire = wire_group(rollout(), ticket=ticket.ticket, group_id=None)
            second_run = await Run.load(name, second)
            assert second_run is not None
            held = await second.tickets.read_one(name)
            await first_run.appends.append(arriving([Incoming(group_from_json(wire))]))

            take_over = second_run.spill.take_over

            async def watched() -> None:
                await take_over()
                second_run.restore_side_state(held, second_run.journal.terms)

            second_run.spill.take_over = watched  # type: ignore[method-assign]
            await second_run.lead(await token_of(second, name, "b"))
            assert not second_run.book.pending_prompts()
            for run in (first_run, second_run):
                run.close()

    asyncio.run(main())


@pytest.mark.parametrize("leads", [True, False], ids=["from the start", "since then"])
def test_a_group_is_not_rejected_by_a_server_that_loses_the_lead_meanwhile(server: EmbeddedServer, leads: bool) -> None:
    """The next leader has issued its ticket. The server learns that it does not lead just before it answers."""

    async def main() -> None:
        name = f"rejects-{next(_names)}"
        async with opened(server, 2) as (first, second):
            other = await Run.create(name, second, await token_of(second, name, "b"), RunConfig(batch=BatchSpec()))
            loser = await leader(first, name, "a") if leads else await Run.load(name, first)
            assert loser is not None
            before, answering = Stop(0), Stop(0)
            loser.spill.make_room = before.before(loser.spill.make_room)  # type: ignore[method-assign, assignment]
            first.groups.find_repeats = answering.before(first.groups.find_repeats)  # type: ignore[method-assign, assignment]
            wire = wire_group(rollout(), ticket="t0-0-1-1", group_id=None)
            appending = asyncio.create_task(loser.appends.append(arriving([Incoming(group_from_json(wire))])))
            await until_done_or_stopped(appending, before)
            if not leads:
                await loser.lead(await token_of(first, name, "a"))
            before.go()
            await until_done_or_stopped(appending, answering)
            await other.lead(await token_of(second, name, "b"))
            assert (await other.tickets.issue("me", 1, "", 0.0)).tickets[0].ticket == "t0-0-1-1"
            loser.journal.become_follower(None)
            answering.go()
            with pytest.raises(ServiceUnavailable, match="the lead of run"):
                await asyncio.wait_for(appending, 30.0)
            for run in (loser, other):
                run.close()

    asyncio.run(main())


async def dumped(store: Store, run: str) -> dict[bytes, Any]:
    """Return all keys of a run, with its payloads and lifetimes, and whether it is listed."""
    client = store.connection.client
    names = [key for part in (f"{{{run}}}:*", f"p:{{{run}:*") async for key in client.scan_iter(f"rb:{part}", 1000)]
    names = [name for name in names if not name.endswith((b":lead", b":lost", b":fence"))]
    held = {name: (await client.dump(name), await client.ttl(name)) for name in names}
    return held | {b"listed": await client.sismember(keys.RUNS, run)}


@pytest.mark.parametrize("at", range(DELETION_CALLS))
def test_a_deletion_that_was_overtaken_destroys_nothing_of_the_restored_run(
    server: EmbeddedServer, tmp_path: Path, at: int
) -> None:
    """Two servers delete; one is stopped before some command, the other finishes, and the run is restored."""

    async def main() -> None:
        name, file = f"again-{next(_names)}", tmp_path / "run.backup"
        async with opened(server, 3) as (first, second, third):
            spec = RunConfig(
                batch=BatchSpec(groups_per_batch=2),
                limits=Limits(max_bytes_in_memory=4 * FRAME_BYTES, max_group_bytes=FRAME_BYTES),
                spill=SpillSpec(url=f"file://{tmp_path}/spill"),
            )
            run = await Run.create(name, first, await token_of(first, name, "a"), spec)
            await fill(run, range(8))
            await move(run)
            assert await first.spill.read_folder(name)
            await back_up(third, name, file)
            async with run.journal.decision():
                await run.journal.set_phase("finished", None)
            await run.delete()
            await first.runs.release_lease(name, "a")

            stop, deleting = Stop(at), asyncio.create_task(_delete(second, name))
            second.connection.run = stop.before(second.connection.run)  # type: ignore[method-assign, assignment]
            second.spill.remove_files = stop.before(second.spill.remove_files)  # type: ignore[method-assign, assignment]
            await until_done_or_stopped(deleting, stop)
            assert stop.reached.is_set()
            await _delete(first, name)
            await restore(third, name, file)
            restored = await dumped(third, name)
            stop.go()
            await asyncio.wait_for(deleting, 30.0)
            assert await dumped(third, name) == restored and restored[b"listed"]
            again = await leader(third, name, "c")
            assert len([key for key in restored if key.startswith(b"rb:p:")]) == again.state.stored == 8
            for instance in (run, again):
                instance.close()

    asyncio.run(main())


async def _delete(store: Store, run: str) -> None:
    """Delete the keys of a deleted run, as the background work of a server does."""
    mark = (await store.runs.read_deletions()).get(run)
    if mark is not None:
        store.connection.known.forget(run)
        await store.delete_run(run, mark)


async def back_up(store: Store, run: str, file: Path) -> None:
    """Write a backup."""
    with ArchiveWriter(file) as archive:
        archive.finish(await Source(store, run, archive, lambda *_: None).copy())


async def restore(store: Store, run: str, file: Path) -> None:
    """Restore a run from its backup."""
    async with open_target(store, run) as target:
        for section in read_sections(file, read_manifest(file)):
            await target.add(section)
        await target.finish()


@pytest.mark.parametrize("at", range(RESTORE_CALLS))
def test_a_restore_that_was_overtaken_changes_nothing_of_the_restored_run(
    server: EmbeddedServer, tmp_path: Path, at: int
) -> None:
    """It is stopped before some command until its lease has ended, and another restore finishes."""

    async def main() -> None:
        name, file = f"twice-{next(_names)}", tmp_path / "run.backup"
        async with opened(server, 3) as (first, second, third):
            run = await Run.create(name, first, await token_of(first, name, "a"), RunConfig(batch=BatchSpec()))
            for number in range(8):
                await append(run, f"g{number}")
            await run.tickets.issue("me", 2, "", 0.0)
            await back_up(third, name, file)
            async with run.journal.decision():
                await run.journal.set_phase("finished", None)
            await run.delete()
            await first.runs.release_lease(name, "a")
            run.close()
            await _delete(first, name)

            stop = Stop(at)
            second.connection.run = stop.before(second.connection.run)  # type: ignore[method-assign, assignment]
            restoring = asyncio.create_task(restore(second, name, file))
            await until_done_or_stopped(restoring, stop)
            assert stop.reached.is_set()
            await third.connection.client.delete(keys.lead(name))
            await restore(third, name, file)
            restored = await dumped(third, name)
            stop.go()
            with pytest.raises(Conflict):
                await asyncio.wait_for(restoring, 30.0)
            assert await dumped(third, name) == restored and restored[b"listed"]

    asyncio.run(main())


@asynccontextmanager
async def served(server: EmbeddedServer, folder: Path) -> AsyncIterator[tuple[Service, Store, Run]]:
    """Serve a run of 8 groups that has a backup, and open another connection. The run is finished."""
    async with opened(server, 2) as (store, other):
        store.connection.known.load(folder / "acknowledged")
        service = Service(store, url="http://here", embedded=False)
        run, _ = await service.create(f"served-{next(_names)}", RunConfig(batch=BatchSpec(groups_per_batch=2)))
        for number in range(8):
            await append(run, f"g{number}")
        async with run.journal.decision():
            await run.journal.set_phase("finished", None)
        await back_up(other, run.name, folder / "run.backup")
        try:
            yield service, other, run
        finally:
            await service.stop()


async def replace(service: Service, store: Store, run: Run, file: Path) -> asyncio.Task[list[ServiceUnavailable]]:
    """Let another server delete a run that is marked, restore it, and let `service` open it, as far as it may now."""
    service._drop(run)
    await store.runs.release_lease(run.name, service._servers.holder)
    await _delete(store, run.name)
    await restore(store, run.name, file)
    opening = asyncio.create_task(service._discover())
    await asyncio.wait({opening}, timeout=0.5)
    return opening


async def check_served(service: Service, name: str, folder: Path) -> None:
    """Check that a restored run is served, and that its ends are known and in their file."""
    assert not service.runs[name].journal.closed
    assert service.store.connection.known.of(name).group == 8
    assert (folder / "acknowledged" / f"{name}.ends").exists()


def test_a_server_with_an_old_mark_of_a_deletion_keeps_the_restored_run(server: EmbeddedServer, tmp_path: Path) -> None:
    """It read the mark; others deleted the run and restored it before it goes on."""

    async def main() -> None:
        async with served(server, tmp_path) as (service, other, run):
            await run.delete()
            stop, marks = Stop(0), service.store.runs.read_deletions
            service.store.runs.read_deletions = stop.after(marks)  # type: ignore[method-assign, assignment]
            deleting = asyncio.create_task(service._delete())
            await until_done_or_stopped(deleting, stop)
            opening = await replace(service, other, run, tmp_path / "run.backup")
            stop.go()
            await asyncio.wait_for(asyncio.gather(deleting, opening), 30.0)
            await check_served(service, run.name, tmp_path)

    asyncio.run(main())


def test_work_on_a_deleted_run_keeps_the_ends_of_the_restored_one(server: EmbeddedServer, tmp_path: Path) -> None:
    """The work for the old run finds no data, and a mark; the restored run is served before it goes on."""

    async def main() -> None:
        async with served(server, tmp_path) as (service, other, run):
            await run.delete()
            stop, deleted = Stop(0), service.store.runs.is_deleted
            service.store.runs.is_deleted = stop.after(deleted)  # type: ignore[method-assign, assignment]
            loss = functools.partial(run.check_ends, DataLost("no data", name="run", value=run.name))
            working = asyncio.create_task(service._work(run, loss))
            await until_done_or_stopped(working, stop)
            opening = await replace(service, other, run, tmp_path / "run.backup")
            stop.go()
            await asyncio.wait_for(asyncio.gather(working, opening), 30.0)
            await check_served(service, run.name, tmp_path)

    asyncio.run(main())
