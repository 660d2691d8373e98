"""Values in Redis that no service wrote: errors that name the key, and no file of another run is touched."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from replaybuf.errors import Invalid, Unreadable
from replaybuf.store import EmbeddedServer, HeldLease, Store, keys
from replaybuf.store.spill import SpillFiles
from replaybuf.store.spill_folder import LocalFolder

FOLDER = "other-0123456789abcdef"


def with_store(server: EmbeddedServer, work: Callable[[Store], Awaitable[None]]) -> None:
    async def main() -> None:
        store = await Store.open(server.url)
        try:
            await work(store)
        finally:
            await store.close()

    asyncio.run(main())


@pytest.mark.parametrize("field", [b"seven", b"0.5", b"9" * 30])
def test_an_old_entry_without_a_number_is_named(server: EmbeddedServer, field: bytes) -> None:
    async def work(store: Store) -> None:
        await store.connection.client.hset(keys.old_entries("strange"), field, b"x")
        with pytest.raises(Unreadable, match=r"rb:\{strange\}:old has the field"):
            _ = [chunk async for chunk in store.snapshots.read_old_entries("strange")]
        await store.connection.client.delete(keys.old_entries("strange"))

    with_store(server, work)


def test_reads_of_several_runs_name_the_strange_one_and_answer_for_the_others(server: EmbeddedServer) -> None:
    """A key of another type, and a counter that is not a number."""

    async def work(store: Store) -> None:
        client, runs = store.connection.client, ["fine", "type", "word"]
        await client.set(keys.counts("type"), "x")
        await client.hset(keys.counts("word"), "issued", "many")
        fine, *strange = await store.tickets.read(runs)
        assert not isinstance(fine, Unreadable) and all(isinstance(values, Unreadable) for values in strange)
        ends = await store.streams.read_ends(runs)
        assert [isinstance(end, Unreadable) for end in ends] == [False, True, False]
        await client.hset(keys.lead("type"), "x", "y")
        assert (await store.runs.take_lease("fine", "me", 1.0)).token
        held = await store.runs.hold_leases(runs, "me", 1.0, [""] * 3)
        assert [isinstance(lease, HeldLease) and lease.holder for lease in held] == ["me", "", ""]
        with pytest.raises(Unreadable):
            await store.runs.take_lease("type", "me", 1.0)

    with_store(server, work)


def test_deleting_a_run_leaves_the_spill_folder_of_another_run(server: EmbeddedServer, tmp_path: Path) -> None:
    """The key of the deleted run names it; a program that writes to Redis itself can do that."""
    url = f"file://{tmp_path}"
    folder = LocalFolder(url)
    folder.create(FOLDER)
    folder.write(f"{FOLDER}/0/1-0123456789abcdef", b"a frame of the other run")

    async def work(store: Store) -> None:
        await store.runs.add("mine")
        lease = await store.runs.take_lease("mine", "me", 60.0)
        assert lease.token is not None
        await store.connection.client.hset(keys.spill("mine"), mapping={"url": url, "folder": FOLDER})
        await store.runs.mark_deleted("mine", lease.token)
        assert await store.delete_run("mine", (await store.runs.read_deletions())["mine"]) == 0

    with_store(server, work)
    assert folder.read(f"{FOLDER}/0/1-0123456789abcdef") == b"a frame of the other run"


@pytest.mark.parametrize("url", ["memory://x", "file://host/x", "file:///a/../b", "https://x/y"])
def test_files_of_a_url_that_no_configuration_may_have_are_not_opened(url: str) -> None:
    """Also of one that Redis holds, such as in the copy of a run."""
    with pytest.raises(Invalid):
        SpillFiles(url)
