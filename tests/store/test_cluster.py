"""The store on a Valkey Cluster: cut appends are swept, and nodes that lose data are refused."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from replaybuf.errors import DataLost, Invalid, NoRoom, NotLeader, ServiceUnavailable, UnsupportedServer
from replaybuf.store import Ends, PendingGroup, Store, WritePolicy, buckets, keys
from replaybuf.store.buckets import Attempt, BucketStore
from replaybuf.store.ledger import NewColumn
from replaybuf.store.redis.pipeline import FastPipeline
from replaybuf.wire.ledger import ColumnsRecord, LossRecord, encode_record
from tests.clusters import ValkeyCluster
from tests.store.test_store import to_append
from tests.valkeys import Valkey

LEASE_S = 60.0
WITHIN_S = 30.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyCluster]:
    """Three primaries without replicas."""
    with ValkeyCluster(tmp_path_factory.mktemp("cluster"), replicas=0) as nodes:
        yield nodes


def on_cluster(url: str, work: Callable[[Store], Awaitable[None]], policy: WritePolicy | None = None) -> None:
    async def main() -> None:
        store = await Store.open(url, policy or WritePolicy())
        try:
            await work(store)
        finally:
            await store.close()

    asyncio.run(main())


def buckets_of(store: Store) -> BucketStore:
    assert store.groups.buckets
    return store.groups.buckets


async def append(store: Store, run: str, *groups: PendingGroup) -> list[bool]:
    return [result.stored for result in await store.groups.append(run, groups, {"": 0}, time.time())]


def exists(cluster: ValkeyCluster, key: str) -> bool:
    return bool(cluster.owner(key).client.exists(key))


def test_what_a_cut_append_leaves_behind_goes_after_two_rounds(cluster: ValkeyCluster) -> None:
    """Payloads that the index names stay, though the note of their attempt was not removed."""

    async def work(store: Store) -> None:
        token = (await store.runs.take_lease("cut", "leader", LEASE_S)).token or ""
        cut = keys.payload_in_bucket("cut", "b")
        await buckets_of(store).write("cut", {cut: b"never published"})
        assert await append(store, "cut", to_append("a")) == [True]
        (entry,) = await store.groups.read_entries("cut", [1])
        stored = entry.strings.payload_key
        assert [await store.groups.sweep("cut", token) for _ in range(2)] == [0, 1]
        assert (exists(cluster, cut), exists(cluster, stored)) == (False, True)
        assert not exists(cluster, keys.attempts("cut", keys.bucket_of("a")))
        assert await append(store, "cut", to_append("b")) == [True]

    on_cluster(cluster.url, work)


def test_an_append_older_than_two_rounds_starts_again(cluster: ValkeyCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that was suspended between its two steps publishes nothing that was deleted meanwhile."""

    async def work(store: Store) -> None:
        token = (await store.runs.take_lease("late", "leader", LEASE_S)).token or ""
        slow = await Store.open(cluster.url)
        attempts: list[str] = []
        write = buckets_of(slow).write

        async def write_slowly(run: str, payloads: Mapping[str, bytes | memoryview]) -> Attempt:
            attempt = await write(run, payloads)
            attempts.extend(payloads)
            while len(attempts) == 1 and exists(cluster, attempts[0]):
                await store.groups.sweep("late", token)
            return attempt

        try:
            monkeypatch.setattr(buckets_of(slow), "write", write_slowly)
            assert await append(slow, "late", to_append("a")) == [True]
        finally:
            await slow.close()
        (entry,) = await store.groups.read_entries("late", [1])
        assert exists(cluster, entry.strings.payload_key) and len(attempts) == 2

    on_cluster(cluster.url, work)


def test_an_append_is_of_the_round_of_its_notes(cluster: ValkeyCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other appends of the server learn of a newer round while it writes; its payloads are deleted by its notes."""

    async def work(store: Store) -> None:
        token = (await store.runs.take_lease("rounds", "leader", LEASE_S)).token or ""
        run_durably, writes = store.connection.run_durably, 0

        async def write_slowly(pipe: Any, **options: Any) -> list[Any]:
            nonlocal writes
            replies = await run_durably(pipe, **options)
            writes += 1
            if writes == 1:
                assert [await store.groups.sweep("rounds", token) for _ in range(2)] == [0, 1]
                assert await append(store, "rounds", to_append("b")) == [True]
            return replies

        monkeypatch.setattr(store.connection, "run_durably", write_slowly)
        assert await append(store, "rounds", to_append("a")) == [True]
        for entry in await store.groups.read_entries("rounds", [1, 2]):
            assert exists(cluster, entry.strings.payload_key)

    on_cluster(cluster.url, work)


def test_a_slot_on_its_way_is_followed(cluster: ValkeyCluster) -> None:
    """Payloads are read on the node that has them, before and after the move; nobody sees an error."""

    async def work(store: Store) -> None:
        await append(store, "moved", to_append("a"))
        (entry,) = await store.groups.read_entries("moved", [1])
        key = entry.strings.payload_key
        source = cluster.owner(key)
        target = next(node for node in cluster.nodes if node is not source)
        cluster.begin_move(key, target)
        source.client.migrate("127.0.0.1", target.port, key, 0, 5000)
        assert all(await store.groups.read_payloads("moved", [key]))
        cluster.end_move(key, source, target)
        assert await append(store, "moved", to_append("a"), to_append("b")) == [False, True]
        assert all(await store.groups.read_payloads("moved", [key]))

    on_cluster(cluster.url, work)


def test_the_bucket_of_a_missing_payload_is_checked(cluster: ValkeyCluster) -> None:
    """A payload that was freed is missing; one in a bucket that was emptied is lost."""

    async def work(store: Store) -> None:
        token = (await store.runs.take_lease("read", "leader", LEASE_S)).token or ""
        await append(store, "read", to_append("a"), to_append("b"))
        names = [entry.strings.payload_key for entry in await store.groups.read_entries("read", [1, 2])]
        assert all(await store.groups.read_payloads("read", names))
        await store.groups.free_payloads("read", token, names[:1], 1)
        assert [bool(payload) for payload in await store.groups.read_payloads("read", names)] == [False, True]
        written = keys.written("read", keys.bucket_of("b"))
        cluster.owner(written).client.delete(written, names[1])
        with pytest.raises(DataLost, match=f"bucket {keys.bucket_of('b')} on node .* has had 0 payloads, but 1 were"):
            await store.groups.read_payloads("read", names)

    on_cluster(cluster.url, work)


def test_a_server_that_stored_nothing_in_a_bucket_notices_its_loss(cluster: ValkeyCluster) -> None:
    """Its own payload would make the count right again, and the lost one would look as if it had been freed."""

    async def work(store: Store) -> None:
        bucket = keys.bucket_of("a")
        other = next(name for name in (f"x{n}" for n in range(1000)) if keys.bucket_of(name) == bucket)
        beside = await Store.open(cluster.url)
        try:
            await append(beside, "beside", to_append("b"))
            await append(store, "beside", to_append("a"))
            (entry,) = await store.groups.read_entries("beside", [2])
            written = keys.written("beside", bucket)
            cluster.owner(written).client.delete(written, entry.strings.payload_key)
            with pytest.raises(DataLost, match=f"bucket {bucket} on node"):
                await append(beside, "beside", to_append(other))
            assert not exists(cluster, written)
        finally:
            await beside.close()

    on_cluster(cluster.url, work)


def test_a_loss_is_accepted_while_its_bucket_is_checked_again(
    cluster: ValkeyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check finds nothing wrong any more; a run that lost both payloads and entries is `DataLost`."""

    async def work(store: Store) -> None:
        run, buckets = "accepted", buckets_of(store)
        await append(store, run, to_append("a"))
        await lose_payloads(cluster, store, run, "a")
        find_loss = buckets.find_loss

        async def accept_and_find(run: str, checked: Iterable[int]) -> DataLost | None:
            await buckets.accept_loss(run)
            return await find_loss(run, checked)

        monkeypatch.setattr(buckets, "find_loss", accept_and_find)
        (ends,) = await store.streams.read_ends([run])
        assert isinstance(ends, Ends) and ends.group == 1

        monkeypatch.setattr(buckets, "find_loss", find_loss)
        await lose_payloads(cluster, store, run, "a")
        store.connection.known.advance(run, Ends(9, 9, ""))
        (lost,) = await store.streams.read_ends([run])
        assert isinstance(lost, DataLost) and "group" in str(lost)

    on_cluster(cluster.url, work)


@pytest.mark.parametrize("cuts", [0, 2])
def test_an_append_of_a_suspended_server_does_not_hide_a_loss(
    cluster: ValkeyCluster, monkeypatch: pytest.MonkeyPatch, cuts: int
) -> None:
    """It read what is published before another server stored a group, which the bucket has lost since.

    The second read may be cut some times: without an answer the loss would stay hidden.
    """

    async def work(store: Store) -> None:
        name, left = f"suspended-{cuts}", cuts
        monkeypatch.setattr(buckets, "SUSPENDED_S", 0.0)
        monkeypatch.setattr(buckets, "READ_AGAIN_S", (0.0, 0.0))
        first, second = names_of_one_bucket(2)
        suspended = await Store.open(cluster.url)
        read = buckets_of(suspended)._read_published

        async def read_cut(run: str) -> tuple[dict[int, int], int]:
            nonlocal left
            left -= 1
            if left >= 0:
                raise ServiceUnavailable("the connection was cut")
            return await read(run)

        async def read_long_ago(run: str) -> tuple[dict[int, int], int]:
            published = await read(run)
            monkeypatch.setattr(buckets_of(suspended), "_read_published", read_cut)
            assert await append(store, run, to_append(first)) == [True]
            cluster.owner(keys.written(run, keys.bucket_of(first))).client.delete(
                keys.written(run, keys.bucket_of(first))
            )
            return published

        try:
            monkeypatch.setattr(buckets_of(suspended), "_read_published", read_long_ago)
            with pytest.raises(DataLost, match="has had 0 payloads, but 1 were acknowledged"):
                await append(suspended, name, to_append(second))
            assert await buckets_of(store).find_loss(name)
            assert len(await store.groups.read_entries(name, [1, 2])) == 1
        finally:
            await suspended.close()

    on_cluster(cluster.url, work)


def test_a_failed_append_of_a_suspended_server_does_not_hide_a_loss(
    cluster: ValkeyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its write succeeds on the node of the bucket, and yet it gets an error, as when a primary was replaced meanwhile.

    Nobody publishes the group, so nobody compares its number later.
    """

    async def work(store: Store) -> None:
        monkeypatch.setattr(buckets, "SUSPENDED_S", 0.0)
        run, (first, second, third) = "failed", names_of_one_bucket(3)
        written = keys.written(run, keys.bucket_of(first))
        suspended = await Store.open(cluster.url)
        run_durably = suspended.connection.run_durably

        async def write_long_ago(pipe: FastPipeline, may_fail: int = 0) -> list[Any]:
            monkeypatch.setattr(suspended.connection, "run_durably", run_durably)
            assert await append(store, run, to_append(first)) == [True]
            node = cluster.owner(written).client
            node.delete(written)
            await run_durably(pipe, may_fail)
            assert node.get(written) == b"1"
            raise ServiceUnavailable("has another primary since the write began")

        try:
            monkeypatch.setattr(suspended.connection, "run_durably", write_long_ago)
            with pytest.raises(DataLost, match="has had 0 payloads, but 1 were acknowledged"):
                await append(suspended, run, to_append(second))
            assert await buckets_of(store).find_loss(run)
            with pytest.raises(DataLost):
                await append(suspended, run, to_append(third))
        finally:
            await suspended.close()

    on_cluster(cluster.url, work)


@pytest.mark.parametrize("full", [False, True])
def test_a_cut_append_that_hid_a_loss_is_found_by_the_sweep(
    cluster: ValkeyCluster, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    """A suspended server was killed after its write: it never compared its number. An older cut append hid nothing.

    A full node counts the payload, and then refuses it.
    """

    async def work(store: Store) -> None:
        run, (cut, first, second, third) = f"hidden-{full}", names_of_one_bucket(4)
        token = (await store.runs.take_lease(run, "leader", LEASE_S)).token or ""
        written = keys.written(run, keys.bucket_of(first))
        node, left = cluster.owner(written).client, buckets_of(store)
        await left.write(run, {keys.payload_in_bucket(run, cut): b"cut"})
        assert await append(store, run, to_append(first)) == [True]
        suspended = await Store.open(cluster.url)
        known = await buckets_of(suspended)._read_published(run)
        assert await append(store, run, to_append(second)) == [True]
        node.set(written, 2)  # the node has lost the payload of the second group
        try:
            monkeypatch.setattr(buckets_of(suspended), "_read_published", mock.AsyncMock(return_value=known))
            monkeypatch.setattr(buckets_of(suspended), "withdraw", mock.AsyncMock())
            node.config_set("maxmemory", int(full))
            with pytest.raises(NoRoom) if full else contextlib.nullcontext():
                await buckets_of(suspended).write(run, {keys.payload_in_bucket(run, third): b"killed"})
        finally:
            node.config_set("maxmemory", 0)
            await suspended.close()
        assert await left.find_loss(run) is None
        assert await store.groups.sweep(run, token) == 0
        with pytest.raises(DataLost, match="has had 2 payloads, but 3 were acknowledged"):
            await store.groups.sweep(run, token)
        assert await left.find_loss(run)
        assert await store.groups.sweep(run, token) == 1
        assert node.get(written) == b"2"

    on_cluster(cluster.url, work)


def test_a_freed_payload_whose_note_was_left_hides_no_loss(cluster: ValkeyCluster) -> None:
    """It has the newest number of its bucket, and the index lacks its group, which is trimmed."""

    async def work(store: Store) -> None:
        run, bucket = "freed", keys.bucket_of("a")
        token = (await store.runs.take_lease(run, "leader", LEASE_S)).token or ""
        assert await append(store, run, to_append("a")) == [True]
        (entry,) = await store.groups.read_entries(run, [1])
        assert exists(cluster, keys.attempts(run, bucket))
        await store.groups.free_payloads(run, token, [entry.strings.payload_key], 1)
        assert not exists(cluster, entry.strings.payload_key)
        cluster.owner(keys.group_ids(run)).client.delete(keys.group_ids(run))
        assert [await store.groups.sweep(run, token) for _ in range(2)] == [0, 0]
        assert await buckets_of(store).find_loss(run) is None

    on_cluster(cluster.url, work)


def test_the_payload_of_a_repeat_hides_no_loss(cluster: ValkeyCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server was killed before it deleted the payload, which has the newest number of its bucket."""

    async def work(store: Store) -> None:
        run, (first, second) = "repeated", names_of_one_bucket(2)
        token = (await store.runs.take_lease(run, "leader", LEASE_S)).token or ""
        monkeypatch.setattr(buckets_of(store), "withdraw", mock.AsyncMock())
        assert await append(store, run, to_append(first)) == [True]
        assert await append(store, run, to_append(second), to_append(first)) == [True, False]
        assert [await store.groups.sweep(run, token) for _ in range(2)] == [0, 1]
        assert await buckets_of(store).find_loss(run) is None
        assert cluster.owner(keys.buckets(run)).client.hgetall(keys.buckets(run)) == {b"0": b"2"}
        assert await append(store, run, to_append(second)) == [False]

    on_cluster(cluster.url, work)


def test_an_append_whose_own_payload_was_lost_is_written_again(
    cluster: ValkeyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server was given its number, and published it: nothing that was acknowledged is missing."""

    async def work(store: Store) -> None:
        first, second = names_of_one_bucket(2)
        slow = await Store.open(cluster.url)
        write = buckets_of(slow).write

        async def write_long_ago(run: str, payloads: Mapping[str, bytes | memoryview]) -> Attempt:
            attempt = await write(run, payloads)
            monkeypatch.setattr(buckets_of(slow), "write", write)
            written = keys.written(run, keys.bucket_of(first))
            notes = keys.attempts(run, keys.bucket_of(first))  # written with the count, so lost with it
            cluster.owner(written).client.delete(written, notes, *payloads)
            assert await append(store, run, to_append(second)) == [True]
            return attempt

        try:
            monkeypatch.setattr(buckets_of(slow), "write", write_long_ago)
            assert await append(slow, "again", to_append(first)) == [True]
        finally:
            await slow.close()
        for entry in await store.groups.read_entries("again", [1, 2]):
            assert exists(cluster, entry.strings.payload_key)
        assert await buckets_of(store).find_loss("again") is None

    on_cluster(cluster.url, work)


def names_of_one_bucket(count: int) -> list[str]:
    """Return names of groups whose payloads are in the first bucket."""
    names = map("g{}".format, range(10_000))
    return [name for name in names if keys.bucket_of(name) == 0][:count]


def test_a_loss_that_another_server_has_accepted_is_over(cluster: ValkeyCluster) -> None:
    """This server still knows the run of before, and reports no loss instead of failing."""

    async def work(store: Store) -> None:
        beside = await Store.open(cluster.url)
        try:
            assert await append(store, "over", to_append("a")) == [True]
            await lose_payloads(cluster, store, "over", "a")
            loss = await beside.runs.read_loss("over")
            record = encode_record(LossRecord(entries=0, groups=1, by="", at_s=0.0))
            assert loss and await beside.runs.accept_loss("over", loss, record)
            assert await store.runs.read_loss("over") is None
        finally:
            await beside.close()

    on_cluster(cluster.url, work)


def test_a_loss_whose_acceptance_was_cut_short_is_not_over_for_another_server(
    cluster: ValkeyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node was away after the ledger had the record: the operator is asked to send it again."""

    async def work(store: Store) -> None:
        beside = await Store.open(cluster.url)
        try:
            assert await append(store, "unfinished", to_append("a")) == [True]
            await lose_payloads(cluster, store, "unfinished", "a")
            loss = await beside.runs.read_loss("unfinished")
            assert loss
            record = encode_record(LossRecord(entries=0, groups=1, by="", at_s=0.0))
            with monkeypatch.context() as away, pytest.raises(ServiceUnavailable):
                away.setattr(buckets_of(beside), "accept_loss", mock.AsyncMock(side_effect=ServiceUnavailable("away")))
                await beside.runs.accept_loss("unfinished", loss, record)
            with pytest.raises(ServiceUnavailable, match="send it again"):
                await store.runs.read_loss("unfinished")
            loss = await beside.runs.read_loss("unfinished")
            assert loss and await beside.runs.accept_loss("unfinished", loss, record)
            assert await store.runs.read_loss("unfinished") is None
        finally:
            await beside.close()

    on_cluster(cluster.url, work)


async def lose_payloads(cluster: ValkeyCluster, store: Store, run: str, name: str) -> None:
    """Let the bucket of a group forget that it had payloads, and let the store find it out."""
    written = keys.written(run, keys.bucket_of(name))
    cluster.owner(written).client.delete(written)
    assert await buckets_of(store).find_loss(run)


@pytest.mark.parametrize(
    ("setting", "good", "bad"), [("appendonly", "yes", "no"), ("maxmemory-policy", "noeviction", "allkeys-lru")]
)
def test_a_node_that_loses_data_is_refused_under_strict(
    setting: str, good: str, bad: str, cluster: ValkeyCluster
) -> None:
    """Node and setting are named; with relaxed durability it is used and reported."""
    node = cluster.nodes[1]
    node.client.config_set(setting, bad)

    async def check_report(store: Store) -> None:
        report = await store.connection.report()
        assert report.durability == "relaxed"
        assert any(f"127.0.0.1:{node.port}: {setting} is {bad!r}" in reason for reason in report.reasons)
        assert await append(store, f"relaxed-{bad}", *(to_append(f"g{number}") for number in range(20))) == [True] * 20

    async def nothing(store: Store) -> None:
        pass

    try:
        with pytest.raises(UnsupportedServer, match=f"127.0.0.1:{node.port}: {setting} is {bad!r}"):
            on_cluster(cluster.url, nothing)
        on_cluster(cluster.url, check_report, WritePolicy("relaxed"))
    finally:
        node.client.config_set(setting, good)


def test_strict_needs_a_replica_that_confirms(cluster: ValkeyCluster) -> None:
    async def check_report(store: Store) -> None:
        report = await store.connection.report()
        assert report.durability == "relaxed"
        assert any("wait_replicas is 0" in reason for reason in report.reasons)

    on_cluster(cluster.url, check_report)


def test_a_single_server_is_not_a_cluster(tmp_path: Path) -> None:
    async def nothing(store: Store) -> None:
        pass

    with Valkey(tmp_path / "single") as single, pytest.raises(Invalid, match="is not a node of a cluster"):
        on_cluster(f"redis+cluster://127.0.0.1:{single.port}", nothing)


def test_a_restarted_primary_waits_for_its_replicas_before_it_is_written_to(tmp_path: Path) -> None:
    """One that keeps the older history has the higher offset: it would take over without the newer writes."""
    with ValkeyCluster(tmp_path, replicas=2, cluster_node_timeout="10000") as nodes:

        async def work(store: Store) -> None:
            async def refusal(name: str) -> str:
                """Return why a group is not stored; "" if it is."""
                try:
                    await append(store, "split", to_append(name))
                except ServiceUnavailable as error:
                    await asyncio.sleep(0.05)
                    return error.detail
                return ""

            primary = nodes.owner(keys.counts("split"))
            stranger, _ = (node for node in nodes.nodes if node.client.role()[2] == primary.port)
            async with asyncio.timeout(WITHIN_S):
                for name in map("before-{}".format, range(20)):
                    while await refusal(name):
                        pass
            stranger.client.config_set("primaryauth", "wrong")  # it is alive, and cannot synchronize any more
            await asyncio.to_thread(primary.kill)
            await asyncio.to_thread(primary.start)
            async with asyncio.timeout(WITHIN_S):
                while "restarted" not in (why := await refusal("newer")) or "1 of 2 replicas follow it" not in why:
                    assert why, "a write was acknowledged that a failover would lose"
                stranger.client.config_set("primaryauth", "")
                while await refusal("newer"):
                    pass

        on_cluster(nodes.url, work, WritePolicy(replicas=1))


def test_a_former_leader_replaces_no_late_column_of_the_next_one(
    cluster: ValkeyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was suspended after it had seen the frame of a cut call; the next leader published another frame."""

    async def work(store: Store) -> None:
        run, record = "column", ColumnsRecord(groups=[])
        assert await append(store, run, to_append("a")) == [True]
        (entry,) = await store.groups.read_entries(run, [1])
        payload_key = entry.strings.payload_key
        cut, former, newest = (NewColumn(payload_key, "judge", frame) for frame in (b"cut", b"former", b"newest"))
        token = (await store.runs.take_lease(run, "former", LEASE_S)).token or ""
        await store.connection.client.set(keys.late_column(payload_key, "judge"), cut.frame)
        second = await Store.open(cluster.url)
        call = store.connection.call

        async def suspended(*words: Any, **options: Any) -> tuple[str, Any]:
            answer = await call(*words, **options)
            if words[1] == "rb_count" and not options:  # the last question before frames are replaced
                newer = (await second.runs.take_lease(run, "next", LEASE_S, force=True)).token or ""
                await second.ledger.append_columns(run, newer, 1, record, [newest])
            return answer

        monkeypatch.setattr(store.connection, "call", suspended)
        with pytest.raises(NotLeader):
            await store.ledger.append_columns(run, token, 1, record, [former])
        await second.close()
        assert await store.connection.client.get(keys.late_column(payload_key, "judge")) == newest.frame

    on_cluster(cluster.url, work)


def test_a_loss_is_accepted_while_the_node_of_the_bucket_is_full(cluster: ValkeyCluster) -> None:
    """Else the ledger says that it is accepted, and the bucket still lacks what it lacked."""

    async def work(store: Store) -> None:
        run, bucket = "full", keys.bucket_of("a")
        assert await append(store, run, to_append("a")) == [True]
        node = cluster.owner(keys.written(run, bucket)).client
        node.delete(keys.written(run, bucket))
        assert await buckets_of(store).find_loss(run, [bucket])
        node.config_set("maxmemory", 1)
        try:
            await buckets_of(store).accept_loss(run)
        finally:
            node.config_set("maxmemory", 0)
        assert await buckets_of(store).find_loss(run, [bucket]) is None

    on_cluster(cluster.url, work)
