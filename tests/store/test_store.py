"""The store on a real Valkey, and on unsuitable servers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
import redis

from replaybuf.errors import (
    CheckOutdated,
    Conflict,
    DataLost,
    LedgerGap,
    NoRoom,
    NotLeader,
    ServiceUnavailable,
    TooLarge,
    UnsupportedServer,
)
from replaybuf.store import EmbeddedServer, PendingGroup, Store, WritePolicy, keys
from replaybuf.store.redis import pipeline
from replaybuf.store.redis.server import read_name
from replaybuf.wire.config import RUN_NAME
from replaybuf.wire.frame import encode_frame, stored_checksum
from replaybuf.wire.group import GroupJson, RolloutJson, group_from_json
from replaybuf.wire.ledger import AckRecord, ConfigRecord, RewindRecord
from tests.valkeys import Valkey

Work = Callable[[Store], Awaitable[None]]


def with_store(server: EmbeddedServer, work: Work) -> None:
    """Run `work` on a new store."""

    async def main() -> None:
        store = await Store.open(server.url)
        try:
            await store.streams.read_end("none")  # the first call shows that this Redis is empty, and no older copy
            await work(store)
        finally:
            await store.close()

    asyncio.run(main())


def to_append(group_id: str, prompt_key: str = "", adapter: str = "") -> PendingGroup:
    """Build a small group ready to be stored."""
    rollout = RolloutJson(prompt_ids=[1], completion_ids=[2], inference_logprobs=[-0.5], reward=1.0)
    sent = GroupJson(group_id=group_id, prompt_id="p", adapter=adapter, policy_version=0, rollouts=[rollout])
    group = group_from_json(sent)
    frame = encode_frame(group)
    return PendingGroup(group, group_id, prompt_key, frame, stored_checksum(frame))


def test_a_stored_payload_has_no_ttl_and_a_duplicates_payload_is_deleted(server: EmbeddedServer) -> None:
    """Two appends of one id leave exactly one payload, without TTL."""

    async def work(store: Store) -> None:
        first = await store.groups.append("ttl", [to_append("a")], {"": 0}, time.time())
        second = await store.groups.append("ttl", [to_append("a"), to_append("b")], {"": 0}, time.time())
        assert [result.stored for result in first + second] == [True, False, True]
        assert second[0].number == first[0].number

    with_store(server, work)
    with redis.Redis(unix_socket_path=str(server.socket_path)) as client:
        payloads = list(client.scan_iter("rb:p:{ttl:*"))
        assert len(payloads) == 2
        assert {client.ttl(key) for key in payloads} == {-1}


def test_names_in_redis_that_are_no_names_of_runs_are_left_out(
    server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A server would write `../../../evil.ends`, and read and delete keys that are not its own."""
    strange = [b"../../../evil", b"Evil", b"", b"a" * 64, b"a}:b", b"\xff"]
    mark = b"deleting"

    async def work(store: Store) -> None:
        with redis.Redis(unix_socket_path=str(server.socket_path)) as client:
            for listed in (keys.RUNS, keys.DELETING):
                client.sadd(listed, "good.name", *strange)
            for name in (b"good.name", *strange):
                client.set(b"rb:{%s}:deleted" % name, mark)
        for _ in range(2):
            runs, deletions = await store.runs.list_names(), await store.runs.read_deletions()
            assert "good.name" in runs and all(RUN_NAME.fullmatch(name) for name in runs)
            assert deletions == {"good.name": mark.decode()}

    with_store(server, work)
    logged = [record for record in caplog.records if "not the name of a run" in record.message]
    assert len(logged) == len(strange), "once each"


def test_entries_come_in_the_requested_order(server: EmbeddedServer) -> None:
    """Unknown numbers are left out."""

    async def work(store: Store) -> None:
        names = [f"g{number}" for number in range(1, 8)]
        await store.groups.append("order", [to_append(name) for name in names], {"": 0}, time.time())
        for asked in ([1, 2, 3, 4, 5, 6, 7], [7, 2, 3, 1, 6], [5, 9, 6, 0, 7, 8], [4, 4, 3]):
            entries = await store.groups.read_entries("order", asked)
            assert [entry.number for entry in entries] == [number for number in asked if 1 <= number <= 7]
            assert all(entry.strings.group_id == f"g{entry.number}" for entry in entries)

    with_store(server, work)


def test_one_prompt_has_one_group_under_any_id(server: EmbeddedServer) -> None:
    """Two groups of one ticket's prompt with different ids: the second is a duplicate."""

    async def work(store: Store) -> None:
        results = await store.groups.append(
            "prompt", [to_append("x", "p7"), to_append("y", "p7")], {"": 0}, time.time()
        )
        assert [result.stored for result in results] == [True, False]

    with_store(server, work)


def test_a_ledger_append_is_fenced_ordered_and_repeatable(server: EmbeddedServer) -> None:
    """A repeat is accepted; another record at the same number, a gap and an old token are errors."""

    async def work(store: Store) -> None:
        lease = await store.runs.take_lease("led", "one", 5.0)
        assert lease.token is not None
        record = AckRecord(step=0, epoch=1)
        await store.ledger.append("led", lease.token, 1, record)
        await store.ledger.append("led", lease.token, 1, record)
        with pytest.raises(ServiceUnavailable, match=r"entry 1 is taken; .* send the request again"):
            await store.ledger.append("led", lease.token, 1, AckRecord(step=5, epoch=1))
        with pytest.raises(DataLost, match="entry 2 was acknowledged"):
            await store.ledger.append("led", lease.token, 3, record)
        newer = await store.runs.take_lease("led", "two", 5.0, force=True)
        assert newer.token != lease.token
        with pytest.raises(NotLeader):
            await store.ledger.append("led", lease.token, 2, record)

    with_store(server, work)


def test_a_clock_of_redis_that_was_set_back_does_not_prolong_the_lease_of_a_dead_leader(
    server: EmbeddedServer,
) -> None:
    """Redis stores when a key ends, so the lease of a leader that died before the change would last an hour more."""

    async def work(store: Store) -> None:
        assert (await store.runs.take_lease("back", "dead", 5.0)).token
        await store.connection.client.pexpire(keys.lead("back"), 3_600_000)
        refused = await store.runs.take_lease("back", "standby", 5.0)
        assert refused.token is None and refused.left_s <= 5.0

    with_store(server, work)


def test_a_command_larger_than_redis_accepts_is_refused_with_its_size(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis would close the connection, which looks like an outage; the connection is still good."""
    monkeypatch.setattr(pipeline, "LARGEST_STORED_BYTES", 10_000)

    async def work(store: Store) -> None:
        lease = await store.runs.take_lease("large", "one", 5.0)
        assert lease.token is not None
        record = AckRecord(step=0, epoch=1, feedback={"notes": "x" * 10_000})
        with pytest.raises(TooLarge, match=r"argument of 100\d\d bytes; Redis accepts at most 10000"):
            await store.ledger.append("large", lease.token, 1, record)
        await store.ledger.append("large", lease.token, 1, AckRecord(step=0, epoch=1))

    with_store(server, work)


def test_a_lease_has_one_holder_until_it_is_released(server: EmbeddedServer) -> None:
    """The second holder gets the lease after the first releases it."""

    async def work(store: Store) -> None:
        first = await store.runs.take_lease("lease", "one", 0.2)
        assert (await store.runs.take_lease("lease", "two", 0.2)).token is None
        assert (await store.runs.take_lease("lease", "one", 0.2)).token == first.token
        await store.runs.release_lease("lease", "one")
        assert (await store.runs.take_lease("lease", "two", 0.2)).token not in (None, first.token)

    with_store(server, work)


def test_a_lead_is_handed_over_by_its_leader_to_one_successor(server: EmbeddedServer) -> None:
    """In one step the successor has the lease and the leader is fenced; nobody else can take it before it ends."""

    async def work(store: Store) -> None:
        first = await store.runs.take_lease("handed", "one", 60.0)
        assert first.token is not None
        with pytest.raises(NotLeader):
            await store.runs.hand_over("handed", "0:older", "two", 60.0)
        while not await store.runs.hand_over("handed", first.token, "two", 60.0):  # noqa: ASYNC110 - Valkey settles
            await asyncio.sleep(0.01)
        for token in (first.token, ""):
            with pytest.raises(NotLeader):
                await store.runs.hand_over("handed", token, "one", 60.0)
        with pytest.raises(NotLeader):
            await store.ledger.append("handed", first.token, 1, AckRecord(step=0, epoch=1))
        for name in ("one", "three"):
            assert (await store.runs.take_lease("handed", name, 60.0)).holder == "two"
        second = await store.runs.take_lease("handed", "two", 60.0)
        assert second.token is not None
        await store.ledger.append("handed", second.token, 1, AckRecord(step=0, epoch=1))
        assert await store.runs.hand_over("handed", second.token, "dead", 0.02)
        while (lease := await store.runs.take_lease("handed", "three", 60.0)).token is None:  # noqa: ASYNC110 - of Redis
            await asyncio.sleep(0.01)
        assert lease.holder == "three"

    with_store(server, work)


def test_a_redis_belongs_to_the_deployment_that_named_it_first(server: EmbeddedServer) -> None:
    """Without names every server is welcome; afterwards only those of the same name."""

    async def work(store: Store) -> None:
        await store.servers.claim(None)
        for _ in range(2):
            await store.servers.claim("mine")
        for other in ("yours", None):
            with pytest.raises(Conflict, match="belongs to the deployment 'mine'"):
                await store.servers.claim(other)
        await store.connection.client.delete(keys.DEPLOYMENT)
        await store.servers.claim("yours")
        await store.connection.client.delete(keys.DEPLOYMENT)

    with_store(server, work)


def test_servers_that_fall_silent_are_forgotten(server: EmbeddedServer) -> None:
    """A server that comes back counts as a new one; strange values do no harm."""

    async def work(store: Store) -> None:
        servers, client = store.servers, store.connection.client
        first_s = time.monotonic()
        await servers.announce("a", "1.0", 60.0, 0.0)
        assert [server.holder for server in await servers.announce("b", "1.1", 60.0, 0.0)] == ["b", "a"]
        await client.hset(keys.SERVERS, mapping={"strange": "value", "old": "1 2 1.0"})
        await asyncio.sleep(0.05)
        own, other = await servers.announce("a", "1.0", 60.0, 0.0)
        assert (own.holder, own.release, own.silent_s, other.holder, other.release) == ("a", "1.0", 0.0, "b", "1.1")
        assert 0.05 <= own.alive_s <= time.monotonic() - first_s + 1.0 and other.silent_s >= 0.05
        assert set(await client.hkeys(keys.SERVERS)) == {b"a", b"b"}
        await asyncio.sleep(0.05)
        assert [server[:4] for server in await servers.announce("b", "1.1", 0.02, 0.0)] == [("b", "1.1", 0.0, 0.0)]
        await servers.withdraw("b")
        assert not await client.exists(keys.SERVERS)

    with_store(server, work)


def test_an_out_of_memory_server_refuses_groups_and_takes_control_writes(tmp_path: Path) -> None:
    """Producers get `NoRoom`; ledger, lease and tickets still work."""

    async def main() -> None:
        embedded = EmbeddedServer(tmp_path)
        await embedded.start()
        store = await Store.open(embedded.url)
        try:
            await store.streams.read_end("full")
            await store.groups.append("full", [to_append("before")], {"": 0}, time.time())
            with redis.Redis(unix_socket_path=str(embedded.socket_path)) as client:
                client.config_set("maxmemory", 1)
            with pytest.raises(NoRoom):
                await store.groups.append("full", [to_append("before"), to_append("a")], {"": 0}, time.time())
            (repeat,) = await store.groups.append("full", [to_append("before")], {"": 0}, time.time())
            assert (repeat.stored, repeat.number) == (False, 1), "a repeat needs no memory"
            lease = await store.runs.take_lease("full", "one", 5.0)
            assert lease.token is not None
            await store.ledger.append("full", lease.token, 1, AckRecord(step=0, epoch=1))
            await store.tickets.change("full", lease.token, left_s={"t0-0-1": 1.0}, counts={"issued": 1})
            counts = await store.counters.read("full")
            assert counts.pop("entry_key") > 0
            assert counts == {
                "stored": 1,
                "duplicate": 1,
                "issued": 1,
                "entries": 1,
            }
        finally:
            await store.close()
            await embedded.stop()

    asyncio.run(main())


def test_a_server_with_weaker_settings_is_reported_as_relaxed(tmp_path: Path) -> None:
    """Each risk names the setting to change."""

    async def main() -> None:
        embedded = EmbeddedServer(tmp_path)
        await embedded.start()
        store = await Store.open(embedded.url, WritePolicy("relaxed"))
        try:
            assert (await store.connection.report()).durability == "strict"
            with redis.Redis(unix_socket_path=str(embedded.socket_path)) as client:
                client.config_set("appendfsync", "everysec")
                client.config_set("maxmemory-policy", "allkeys-lru")
            report = await store.connection.report()
            assert report.durability == "relaxed"
            assert ["appendfsync" in report.reasons[0], "maxmemory-policy" in report.reasons[1]] == [True, True]
        finally:
            await store.close()
            await embedded.stop()

    asyncio.run(main())


def test_a_server_without_our_functions_gets_them_before_the_next_command(tmp_path: Path) -> None:
    """One command fails if functions are flushed; functions of another release are replaced after a lost connection."""

    async def main() -> None:
        store = await Store.open(valkey.url)
        try:
            valkey.client.function_flush("SYNC")
            with pytest.raises(ServiceUnavailable, match="lacked our functions"):
                await store.counters.add("r", {"x": 1})
            await store.counters.add("r", {"x": 1})
            assert await store.counters.read("r") == {"x": 1}
            valkey.client.function_load(other_release, replace=True)
            valkey.kill()
            with pytest.raises(ServiceUnavailable, match="cannot be reached"):
                await store.counters.read("r")
            valkey.start()
            await store.counters.add("r", {"x": 1})
            assert await store.counters.read("r") == {"x": 2}
        finally:
            await store.close()

    other_release = """#!lua name=replaybuf1
        redis.register_function('rb_count', function() return {'ok', ''} end)"""
    with Valkey(tmp_path / "valkey") as valkey:
        asyncio.run(main())


def test_a_report_names_the_program_with_its_own_version() -> None:
    """Valkey says in `redis_version` which Redis it is compatible with."""
    assert read_name({"redis_version": "7.2.4", "valkey_version": "9.1.2", "server_name": "valkey"}) == "valkey 9.1.2"
    assert read_name({"redis_version": "7.4.1"}) == "redis 7.4.1"


async def old_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer like a Redis 6.2, with the commands that read its version."""
    info = b"redis_version:6.2.14\r\n"
    with contextlib.closing(writer):
        while line := await reader.readline():
            words = []
            for _ in range(int(line[1:])):
                await reader.readline()
                words.append((await reader.readline()).strip())
            if words[0] == b"HELLO":
                writer.write(b"%1\r\n$6\r\nserver\r\n$5\r\nredis\r\n")
            elif words[0] == b"INFO":
                writer.write(b"$%d\r\n%b\r\n" % (len(info), info))
            elif words[0] == b"CONFIG":
                writer.write(b"%0\r\n")
            else:
                writer.write(b"+OK\r\n")
            await writer.drain()


def test_an_old_server_is_rejected_with_both_versions() -> None:
    """The error names 6.2.14 and 7.0."""

    async def main() -> None:
        async with await asyncio.start_server(old_server, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            with pytest.raises(UnsupportedServer, match=r"version 6\.2\.14; the minimum is 7\.0"):
                await Store.open(f"redis://127.0.0.1:{port}")

    asyncio.run(main())


def test_an_unreachable_server_is_named() -> None:
    """The error contains the address."""

    async def main() -> None:
        with pytest.raises(ServiceUnavailable, match=r"redis://127\.0\.0\.1:1 cannot be reached"):
            await Store.open("redis://127.0.0.1:1")

    asyncio.run(main())


def test_all_keys_of_a_run_except_payloads_share_one_hash_tag() -> None:
    """One function can use them all in a cluster; payloads spread."""
    control = [keys.index, keys.group_ids, keys.ledger, keys.tickets, keys.counts, keys.fence, keys.lead]
    assert {key("r")[: key("r").index("}") + 1] for key in control} == {"rb:{r}"}
    assert keys.payload("r", "a").startswith("rb:p:{r:a}:")
    assert keys.payload("r", "a") != keys.payload("r", "a")


def test_groups_that_were_checked_before_the_rules_changed_are_not_stored(server: EmbeddedServer) -> None:
    """A rewind or a new configuration changes them, an ack does not; a producer that writes directly checks nothing."""

    async def work(store: Store) -> None:
        token = str((await store.runs.take_lease("checked", "one", 5.0)).token)
        config = ConfigRecord(config={}, max_uses=1)
        await store.ledger.append("checked", token, 1, config)
        await store.ledger.append("checked", token, 2, AckRecord(step=0, epoch=1))
        (stored,) = await store.groups.append("checked", [to_append("a")], {"": 0}, time.time(), 1)
        assert stored.stored
        rewind = RewindRecord(step=0, generation=1, on_resume="resample", version=0, until=0)
        written = await store.ledger.append("checked", token, 3, rewind)
        assert written.record == msgspec.structs.replace(rewind, until=1)
        with redis.Redis(unix_socket_path=str(server.socket_path)) as client:
            before = {*client.keys()}
            with pytest.raises(CheckOutdated, match="checked"):
                await store.groups.append("checked", [to_append("b")], {"": 0}, time.time(), 2)
            assert {*client.keys()} == before
        for checked_at, group_id in ((3, "b"), (None, "c")):
            (result,) = await store.groups.append("checked", [to_append(group_id)], {"": 0}, time.time(), checked_at)
            assert result.stored
        read = [entry async for chunk in store.ledger.read("checked", 2) for entry in chunk]
        assert read == [written]

    with_store(server, work)


@pytest.mark.parametrize("erased", [False, True])
def test_a_deleted_run_takes_nothing_from_a_process_that_has_forgotten_it(server: EmbeddedServer, erased: bool) -> None:
    """A server forgets a deleted run while an append to it is on its way. Nobody would delete its keys again."""

    async def work(store: Store) -> None:
        name = f"deleted-{int(erased)}"
        await store.runs.add(name)
        token = str((await store.runs.take_lease(name, "one", 5.0)).token)
        await store.ledger.append(name, token, 1, ConfigRecord(config={}, max_uses=1))
        await store.runs.mark_deleted(name, token)
        if erased:
            assert await store.delete_run(name, (await store.runs.read_deletions())[name]) == 0
        store.connection.known.forget(name)
        with redis.Redis(unix_socket_path=str(server.socket_path)) as client:
            before = {*client.keys()}
            writes: list[Callable[[], Awaitable[object]]] = [
                lambda: store.groups.append(name, [to_append("a")], {"": 0}, time.time(), 1),
                lambda: store.groups.append(name, [to_append("a")], {"": 0}, time.time()),
                lambda: store.counters.add(name, {"rejected:broken": 1}),
                lambda: store.evaluations.append(name, b"result"),
            ]
            for write in writes:
                with pytest.raises(LedgerGap, match=f"run {name} was deleted"):
                    await write()
            assert {*client.keys()} == before

    with_store(server, work)
