"""Known ends of a run's streams: no function changes a Redis that holds less."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import redis

from replaybuf.errors import DataLost, LedgerGap, NotLeader, ServiceUnavailable
from replaybuf.store import EmbeddedServer, Ends, Store, WritePolicy, keys
from replaybuf.store.known_ends import LINE_BYTES, KnownEnds
from replaybuf.wire.ledger import AckRecord
from tests.store.test_store import to_append, with_store
from tests.valkeys import Valkey
from tests.waiting import eventually


def test_known_ends_never_move_back_until_they_are_forgotten() -> None:
    """Each end advances for itself; a payload key that becomes known is kept."""
    known = KnownEnds()
    for ends in (Ends(3, 5, "b"), Ends(2, 9), Ends(4, 8, "c"), Ends(0, 9, "d"), Ends(0, 9), Ends(4, 0, entry_key="7")):
        known.advance("r", ends)
    assert known.of("r") == Ends(4, 9, "d", entry_key="7")
    known.forget("r")
    assert known.of("r") == Ends(0, 0)


def writes(store: Store, run: str, token: str) -> dict[str, Callable[[], Awaitable[object]]]:
    """List all writes of a run that go through a function."""
    return {
        "append": lambda: store.groups.append(run, [to_append("new")], {"": 0}, time.time(), 0),
        "direct append": lambda: store.groups.append(run, [to_append("new")], {"": 0}, time.time()),
        "free": lambda: store.groups.free_payloads(run, token, ["other"], 1),
        "ledger": lambda: store.ledger.append(run, token, 2, AckRecord(step=0, epoch=1)),
        "tickets": lambda: store.tickets.change(run, token, left_s={"t0-0-1-1": 9.0}, counts={"issued": 1}),
        "counters": lambda: store.counters.add(run, {"x": 1}),
        "snapshot": lambda: store.snapshots.write(run, token, b"snap" + b"%020d" % 1, 1, 1, {}),
        "bits": lambda: store.snapshots.mark_prompts_done(run, token, [("", 0, 1)]),
        "old entries": lambda: store.snapshots.delete_old_entries(run, token, [1]),
        "evaluations": lambda: store.evaluations.append(run, b"{}"),
        "samples": lambda: store.samples.write(run, token, [(0, 1, b"{}")]),
        "ends": lambda: store.streams.read_end(run),
        "confirmed ends": lambda: store.streams.read_confirmed_end(run),
    }


def dump(client: redis.Redis, run: str) -> dict[bytes, object]:
    """Return what Redis holds of a run, but for the ends that it lacks."""
    return {key: client.dump(key) for key in client.scan_iter(f"*{run}*") if not key.endswith(b":lost")}


async def read_all(chunks: AsyncIterator[object]) -> list[object]:
    """Read all chunks."""
    return [chunk async for chunk in chunks]


def reads(store: Store, run: str) -> dict[str, Callable[[], Awaitable[object]]]:
    """List all reads of a run on which a decision or an answer depends."""
    return {
        "index": lambda: read_all(store.groups.read_index(run, 0)),
        "index entries": lambda: store.groups.read_entries(run, [1, 2]),
        "numbers": lambda: store.groups.find_numbers(run, ["a", "p0"]),
        "frames": lambda: store.groups.read_frames(run, {"other": 1}),
        "ledger": lambda: read_all(store.ledger.read(run, 0)),
        "snapshot": lambda: store.snapshots.read(run),
        "old entries": lambda: read_all(store.snapshots.read_old_entries(run)),
        "tickets": lambda: store.tickets.read_one(run),
    }


@pytest.mark.parametrize("missing", ["entry", "group", "other entry", "other group"])
def test_no_function_changes_a_redis_that_holds_less_than_is_known(server: EmbeddedServer, missing: str) -> None:
    """Ledger entries or groups are missing, or another one has the number of a known one."""
    run = f"less-{missing.replace(' ', '-')}"
    known = {
        "entry": Ends(2, 1),
        "group": Ends(1, 2),
        "other entry": Ends(1, 1, entry_key="1"),
        "other group": Ends(1, 1, f"rb:p:{{{run}:a}}:other"),
    }[missing]

    async def work(store: Store) -> None:
        token = (await store.runs.take_lease(run, "one", 5.0)).token
        assert token is not None
        await store.groups.append(run, [to_append("a")], {"": 0}, time.time(), 0)
        await store.ledger.append(run, token, 1, AckRecord(step=0, epoch=1))
        store.connection.known.forget(run)
        store.connection.known.advance(run, known)
        with redis.Redis(unix_socket_path=str(server.socket_path)) as client:
            client.set("other", 1)
            before = dump(client, run)
            for read in reads(store, run).values():  # what is missing would look as if it was never stored
                with pytest.raises(DataLost, match="missing: "):
                    await read()
            for name, write in writes(store, run, token).items():
                with pytest.raises(DataLost, match="missing: "):
                    await write()
                assert dump(client, run) == before, name
            assert client.exists("other")
            lease = await store.runs.take_lease(run, "one", 5.0)
            assert lease.token is None, "nobody leads on such a Redis"
            assert client.get(keys.fence(run)) == token.encode()
        (ends,) = await store.streams.read_ends([run])
        assert isinstance(ends, DataLost)

    with_store(server, work)


def test_functions_of_a_leader_change_nothing_without_a_token(server: EmbeddedServer) -> None:
    """A server that has lost the lead has none; what any server or producer may write needs none."""
    of_anyone = {"append", "direct append", "counters", "evaluations", "ends", "confirmed ends"}

    async def work(store: Store) -> None:
        token = (await store.runs.take_lease("fenced", "one", 5.0)).token
        assert token is not None
        await store.groups.append("fenced", [to_append("a")], {"": 0}, time.time(), 0)
        await store.ledger.append("fenced", token, 1, AckRecord(step=0, epoch=1))
        with redis.Redis(unix_socket_path=str(server.socket_path)) as client:
            client.set("other", 1)
            before = dump(client, "fenced")
            for name in writes(store, "fenced", "").keys() - of_anyone:
                with pytest.raises(NotLeader, match="our fencing token is missing"):
                    await writes(store, "fenced", "")[name]()
                assert dump(client, "fenced") == before, name
            assert client.exists("other")
        for name in of_anyone:
            await writes(store, "fenced", "")[name]()

    with_store(server, work)


def test_a_relaxed_redis_may_lose_its_last_second_but_not_everything(server: EmbeddedServer) -> None:
    """`LedgerGap`: the run is loaded again from what is left; an emptied Redis is a loss at any level."""

    async def main() -> None:
        store = await Store.open(server.url, WritePolicy("relaxed"))
        try:
            token = str((await store.runs.take_lease("relaxed", "one", 5.0)).token)
            await store.ledger.append("relaxed", token, 1, AckRecord(step=0, epoch=1))
            store.connection.known.advance("relaxed", Ends(3, 0))
            with pytest.raises(LedgerGap, match="Redis lost ledger entries 2 to 3"):
                await store.streams.read_end("relaxed")
            store.connection.known.advance("emptied", Ends(1, 0))
            with pytest.raises(DataLost):
                await store.streams.read_end("emptied")
        finally:
            await store.close()

    asyncio.run(main())


def test_a_follower_behind_the_trimming_is_not_taken_for_a_loss(server: EmbeddedServer) -> None:
    """Its newest group is trimmed, and newer ones are there; the newest group is never trimmed."""

    async def work(store: Store) -> None:
        token = str((await store.runs.take_lease("behind", "one", 5.0)).token)
        await store.groups.append("behind", [to_append("a")], {"": 0}, time.time(), 0)
        follower = await Store.open(server.url)
        try:
            follower.connection.known.advance("behind", store.connection.known.of("behind"))
            await store.groups.append("behind", [to_append("b"), to_append("c")], {"": 0}, time.time(), 0)
            await store.snapshots.write("behind", token, b"snap" + b"%020d" % 0, 4, 1, {})
            assert [entry.number for entry in await store.groups.read_entries("behind", [1, 2, 3])] == [3]
            for reader in (store, follower):
                assert (await reader.streams.read_end("behind")).group == 3
        finally:
            await follower.close()

    with_store(server, work)


def test_a_follower_that_is_behind_knows_its_entry_from_another(server: EmbeddedServer) -> None:
    """Its newest entry is not the newest of Redis; once it is trimmed nothing is left to compare."""

    async def work(store: Store) -> None:
        token = str((await store.runs.take_lease("between", "one", 5.0)).token)
        first, _ = [await store.ledger.append("between", token, n, AckRecord(step=n, epoch=1)) for n in (1, 2)]
        await store.groups.append("between", [to_append("a")], {"": 0}, time.time(), 0)
        for key, same in ((first.key, True), ("1", False)):
            follower = await Store.open(server.url, private=True)
            try:
                follower.connection.known.advance("between", Ends(1, 0, entry_key=key))
                with contextlib.nullcontext() if same else pytest.raises(DataLost, match="ledger entry 1 "):
                    await follower.streams.read_end("between")
                if not same:
                    await store.snapshots.write("between", token, b"snap" + b"%020d" % 0, 1, 2, {})
                    await follower.streams.read_end("between")
            finally:
                await follower.close()

    with_store(server, work)


def test_ends_that_others_show_do_not_hide_what_a_caller_knows(server: EmbeddedServer) -> None:
    """Redis holds the shown entry, and another one than the caller knows under the same number."""

    async def work(store: Store) -> None:
        token = str((await store.runs.take_lease("two", "one", 5.0)).token)
        key = (await store.ledger.append("two", token, 1, AckRecord(step=0, epoch=1))).key
        with redis.Redis(unix_socket_path=str(server.socket_path)) as client:
            client.set(keys.lost("two"), f"0 1:{key} 0 ")
        assert (await store.streams.read_end("two")).entry_key == key
        store.connection.known.forget("two")
        store.connection.known.advance("two", Ends(1, 0, entry_key="1"))
        with pytest.raises(DataLost):
            await store.streams.read_end("two")

    with_store(server, work)


def load_ends(folder: Path) -> KnownEnds:
    """Read what an earlier process saved, as a restart does."""
    known = KnownEnds()
    known.load(folder)
    return known


def test_ends_are_saved_and_forgotten_by_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder that cannot be written is logged and stops nothing."""
    known = load_ends(tmp_path / "ends")
    for run in ("kept", "deleted"):
        known.advance(run, Ends(1, 2, "key"))
    known.forget("deleted")
    known.sync()
    again = load_ends(tmp_path / "ends")
    assert (again.runs, again.of("kept")) == (["kept"], Ends(1, 2, "key"))
    shutil.rmtree(tmp_path / "ends")
    again.advance("kept", Ends(5, 5))
    again.advance("kept", Ends(6, 6))
    again.sync()
    assert caplog.text.count("cannot be saved") == 1
    (tmp_path / "file").touch()
    load_ends(tmp_path / "file" / "ends")
    assert "are not kept" in caplog.text


def test_a_file_of_saved_ends_that_somebody_deleted_is_written_again(tmp_path: Path) -> None:
    known = KnownEnds()
    known.load(tmp_path)
    known.advance("math", Ends(1, 1))
    (tmp_path / "math.ends").unlink()
    known.sync()  # notices it
    known.advance("math", Ends(1, 2))
    known.close()
    later = KnownEnds()
    later.load(tmp_path)
    assert later.of("math") == Ends(1, 2)


def test_a_line_of_saved_ends_that_was_cut_is_never_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever part of the newest line reached the disk, the file gives the newest ends or those before."""
    known = load_ends(tmp_path)
    longest = f"rb:p:{{{'r' * 63}:{chr(34) * 256}}}:0123456789abcdef"
    steps = [Ends(number, 10 * number, longest) for number in range(1, 5)]
    file, versions = tmp_path / "r.ends", [bytes(2 * LINE_BYTES)]
    for ends in steps:
        known.advance("r", ends)
        assert load_ends(tmp_path).of("r") == ends
        versions.append(file.read_bytes().ljust(2 * LINE_BYTES, b"\0"))
    for number, (before, after) in enumerate(itertools.pairwise(versions)):
        start = number % 2 * LINE_BYTES
        for cut in range(start, start + LINE_BYTES, 7):
            file.write_bytes(after[:cut] + before[cut:])
            seen = load_ends(tmp_path).of("r")
            assert seen in (steps[number], steps[number - 1] if number else Ends(0, 0))
    assert "no line has its checksum" in caplog.text
    file.write_bytes(versions[-2])
    known = load_ends(tmp_path)
    known.advance("r", Ends(9, 9))
    file.write_bytes(file.read_bytes()[:LINE_BYTES] + bytes(LINE_BYTES))
    assert load_ends(tmp_path).of("r") == steps[2], "a restart overwrites the older line first"


def test_an_end_that_one_process_knows_stops_the_others(server: EmbeddedServer) -> None:
    """Redis went back: who knows less changes nothing either, and remembers the ends after the other is gone."""

    async def work(store: Store) -> None:
        token = str((await store.runs.take_lease("shown", "one", 5.0)).token)
        await store.groups.append("shown", [to_append("a")], {"": 0}, time.time(), 0)
        await store.ledger.append("shown", token, 1, AckRecord(step=0, epoch=1))
        other = await Store.open(server.url)
        try:
            assert (await other.streams.read_end("shown")).group == 1
            store.connection.known.advance("shown", Ends(4, 3, "lost"))
            with pytest.raises(DataLost):
                await store.streams.read_end("shown")
            for write in writes(other, "shown", token).values():
                with pytest.raises(DataLost, match="missing: ledger entries 2 to 4 and groups 2 to 3"):
                    await write()
            assert (await other.runs.take_lease("shown", "two", 5.0, force=True)).token is None
            assert other.connection.known.of("shown") == Ends(4, 3, "lost")
        finally:
            await other.close()

    with_store(server, work)


def test_nobody_takes_the_lead_on_a_redis_that_has_just_started(tmp_path: Path) -> None:
    """Servers that know more need time to show it. A new run, a private Valkey and a holder wait for nothing."""

    async def lead(url: str, holder: str, *, force: bool = False) -> str | None:
        store = await Store.open(url)
        try:
            return (await store.runs.take_lease("r", holder, 60.0, force=force)).token
        finally:
            await store.close()

    async def create(url: str) -> None:
        store = await Store.open(url)
        try:
            token = str((await store.runs.take_lease("r", "one", 60.0)).token)
            await store.ledger.append("r", token, 1, AckRecord(step=0, epoch=1))
        finally:
            await store.close()

    with Valkey(tmp_path / "valkey") as valkey:
        asyncio.run(create(valkey.url))
        valkey.kill()
        valkey.start()
        assert asyncio.run(lead(valkey.url, "one")), "it holds the lease"
        valkey.client.delete(keys.lead("r"))
        assert asyncio.run(lead(valkey.url, "two")) is None
        assert asyncio.run(lead(valkey.url, "two", force=True))
        valkey.client.delete(keys.lead("r"))
        eventually(lambda: asyncio.run(lead(valkey.url, "three")), within_s=20.0)


def test_a_leader_writes_nothing_to_a_redis_that_just_started_until_others_showed_what_they_know(
    tmp_path: Path,
) -> None:
    """A follower has stored a group of which the leader has not heard, and an older copy of Redis lacks it."""
    names = ("ledger", "tickets", "append", "counters", "samples")

    async def main(valkey: Valkey) -> None:
        leader, follower = await Store.open(valkey.url), await Store.open(valkey.url)
        try:
            token = str((await leader.runs.take_lease("r", "one", 60.0)).token)
            await leader.ledger.append("r", token, 1, AckRecord(step=0, epoch=1))
            valkey.kill()
            shutil.copytree(valkey.folder, tmp_path / "older")
            valkey.start()
            await _once_answered(lambda: follower.groups.append("r", [to_append("new")], {"": 0}, time.time()))
            valkey.kill()
            shutil.rmtree(valkey.folder)
            (tmp_path / "older").rename(valkey.folder)
            valkey.start()
            for write in (writes(leader, "r", token)[name] for name in names):
                with pytest.raises(ServiceUnavailable, match="has just started"):
                    await _once_answered(write, but="has just started")
            with pytest.raises(DataLost):
                await _once_answered(lambda: follower.streams.read_end("r"))
            with pytest.raises(DataLost):
                await _once_answered(writes(leader, "r", token)["ledger"])
        finally:
            await leader.close()
            await follower.close()

    with Valkey(tmp_path / "valkey") as valkey:
        asyncio.run(main(valkey))


def test_reads_do_not_use_up_the_time_before_the_first_write(tmp_path: Path) -> None:
    """A server may read from a new primary that takes no writes yet; who knows more has not reached it either."""

    async def main(valkey: Valkey) -> None:
        leader = await Store.open(valkey.url)
        try:
            token = str((await leader.runs.take_lease("r", "one", 60.0)).token)
            await leader.ledger.append("r", token, 1, AckRecord(step=0, epoch=1))
            valkey.kill()
            valkey.start()
            began_s = valkey.client.time()[0]
            while valkey.client.time()[0] < began_s + 3:
                await _once_answered(lambda: leader.streams.read_end("r"))
            with pytest.raises(ServiceUnavailable, match="has just started"):
                await _once_answered(writes(leader, "r", token)["ledger"], but="has just started")
        finally:
            await leader.close()

    with Valkey(tmp_path / "valkey") as valkey:
        asyncio.run(main(valkey))


async def _once_answered(call: Callable[[], Awaitable[object]], *, but: str | None = None) -> object:
    """Make a call until Redis answers it otherwise than with `ServiceUnavailable`, or with one that says `but`."""
    async with asyncio.timeout(30.0):
        while True:
            try:
                return await call()
            except ServiceUnavailable as error:
                if but and but in error.detail:
                    raise
            await asyncio.sleep(0.02)
