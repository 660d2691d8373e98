"""A service on a Valkey Cluster: payloads lie on every node, and nothing acknowledged is lost in a failover."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import httpx
import pytest

from replaybuf.cli.main import main
from replaybuf.client.client import Client
from replaybuf.client.direct import DirectBodies
from replaybuf.errors import DataLost, ServiceUnavailable
from replaybuf.kernel.decide.rendezvous import wanted_leader
from replaybuf.service.host import Service
from replaybuf.service.run.lease_timer import LEASE_S
from replaybuf.store import Store, WritePolicy, keys
from replaybuf.store.redis.connection import text
from tests.appender import WITHIN_S, Appender
from tests.clusters import ValkeyCluster
from tests.conftest import RunClient, ServeProcess, group
from tests.service.test_several_servers import SoonSteady
from tests.valkeys import Valkey
from tests.waiting import eventually, patience

BLACKOUT_S = 10.0
"""Of a failover with a `cluster-node-timeout` of 1 s: less than the timeout of a command."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyCluster]:
    """Three primaries with a replica each; each test leaves every node running."""
    with ValkeyCluster(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def server(cluster: ValkeyCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """A service that waits for one replica."""
    options = ("--redis-url", cluster.url, "--wait-replicas", "1", "--no-balance")
    serve = ServeProcess(tmp_path_factory.mktemp("serve") / "data", *options)
    yield serve.start()
    serve.end()


def payloads(cluster: ValkeyCluster, run: str) -> dict[int, list[str]]:
    """Return the payload keys of a run on each primary, by port."""
    return {
        port: [key.decode() for key in node_keys if key.startswith(f"rb:b:{{{run}/".encode())]
        for port, node_keys in cluster.keys().items()
    }


def readiness(server: ServeProcess) -> tuple[int, str]:
    reply = httpx.get(f"{server.url}/readyz", timeout=WITHIN_S)
    return reply.status_code, str(reply.json()["waiting_for"])


def test_a_run_is_served_and_its_deletion_leaves_no_key(
    cluster: ValkeyCluster, server: ServeProcess, connect: Callable[[str, str], RunClient]
) -> None:
    """Payloads are on every node, a checkpoint frees them there, a deletion removes every other key."""
    assert readiness(server)[0] == 200
    before = {key for node_keys in cluster.keys().values() for key in node_keys}
    run = connect(server.url, "served")
    assert run.put(batch={"groups_per_batch": 30}, strategy={"options": {"max_staleness": 9}}).status_code == 201
    epoch = run.attach()
    stored = run.append(*(group(f"g{number}") for number in range(40)))
    assert [answer["status"] for answer in stored] == ["stored"] * 40
    assert [answer["status"] for answer in run.append(group("g1"), group("g2"))] == ["duplicate"] * 2
    held = payloads(cluster, "served")
    assert all(held.values()) and sum(map(len, held.values())) == 40, "payloads are on every node, repeats left none"
    for node in cluster.primaries():
        assert all(node.client.ttl(key) == -1 for key in held[node.port]), "nothing acknowledged has a lifetime"

    body = run.ready_batch(0, epoch).content
    assert run.ready_batch(0, epoch).content == body
    with Client(server.url, "served") as client, contextlib.closing(DirectBodies(client, cluster.url)) as direct:
        assert bytes(cast(memoryview, direct.fetch(0, epoch))) == body and direct.built == 1
    assert run.ack(0, epoch).status_code == 200
    assert run.publish(1, epoch).status_code == 200
    assert run.post("checkpoints", epoch=epoch, step=1).is_success
    eventually(lambda: sum(map(len, payloads(cluster, "served").values())), WITHIN_S, lambda count: count == 10)

    assert run.http.patch(run.path, json={"state": "finished"}).is_success
    assert run.http.delete(run.path).status_code == 204
    kept = {keys.deleted("served").encode(), keys.incarnation("served").encode()}
    eventually(
        lambda: (
            {key for node_keys in cluster.keys().values() for key in node_keys} - before - kept - {keys.RUNS.encode()}
        ),
        WITHIN_S,
        lambda left: not left,
    )


def missing(cluster: ValkeyCluster, run: RunClient, acknowledged: list[str]) -> set[str]:
    """Return acknowledged groups that are not in the index, or have no payload on any node."""
    held = cluster.owner(keys.group_ids(run.run)).client.hkeys(keys.group_ids(run.run))
    named = {key.split("}:")[1].rpartition(":")[0] for each in payloads(cluster, run.run).values() for key in each}
    return {name for name in acknowledged if name.encode() not in held or name not in named}


def of_payloads_only(cluster: ValkeyCluster, run: str) -> Valkey:
    """Return a primary that holds payloads of a run, and neither its control keys nor the list of runs."""
    others = (cluster.owner(keys.counts(run)), cluster.owner(keys.RUNS))
    return next(node for node in cluster.primaries() if node not in others)


@pytest.mark.parametrize("part", ["control", "payloads"])
def test_a_failover_of_a_primary_loses_nothing(
    part: str, cluster: ValkeyCluster, server: ServeProcess, connect: Callable[[str, str], RunClient]
) -> None:
    """Its replica takes over under load; appends, batches and acks go on, and every group is stored once."""
    run = connect(server.url, f"failover-{part}")
    assert run.put(batch={"groups_per_batch": 4}, strategy={"options": {"max_staleness": 9}}).status_code == 201
    epoch = run.attach()
    appender = Appender(connect(server.url, run.run))
    appender.start()
    eventually(lambda: len(appender.acknowledged) > 10, WITHIN_S)
    run.ready_batch(0, epoch)
    old = cluster.owner(keys.counts(run.run)) if part == "control" else of_payloads_only(cluster, run.run)
    old.kill()
    eventually(lambda: len(cluster.primaries()), WITHIN_S, lambda count: count == 3)
    old.start()  # without it no replica confirms what the new primary writes
    eventually(lambda: run.ack(0, epoch).status_code, WITHIN_S, lambda status: status == 200)
    eventually(lambda: run.publish(1, epoch).status_code, WITHIN_S, lambda status: status == 200)
    acknowledged = len(appender.acknowledged)
    eventually(lambda: len(appender.acknowledged) > acknowledged + 10, WITHIN_S)
    eventually(lambda: old.client.role()[0], WITHIN_S, lambda role: role == b"slave")
    eventually(lambda: old.client.role()[3], WITHIN_S, lambda state: state == b"connected")
    run.ready_batch(1, epoch)
    appender.stop()

    print(f"{part}: {appender.longest_s:.1f} s without an acknowledgement")
    assert appender.longest_s < BLACKOUT_S * patience() and any("cluster" in reason for reason in appender.reasons)
    assert not missing(cluster, run, appender.acknowledged)
    stored = run.state()["groups"]["stored"]
    assert stored == cluster.owner(keys.index(run.run)).client.xlen(keys.index(run.run))
    assert stored == cluster.owner(keys.group_ids(run.run)).client.hlen(keys.group_ids(run.run))
    eventually(lambda: readiness(server)[0], WITHIN_S, lambda status: status == 200)


def redirections(node: Valkey) -> int:
    """Return how often a node has answered that a key is elsewhere, or partly."""
    errors = node.client.info("errorstats")
    return sum(errors.get(f"errorstat_{name}", {}).get("count", 0) for name in ("ASK", "TRYAGAIN", "MOVED"))


@pytest.mark.parametrize("part", ["control", "payloads"])
def test_a_slot_moves_to_another_node_under_load(
    part: str, cluster: ValkeyCluster, server: ServeProcess, connect: Callable[[str, str], RunClient]
) -> None:
    """Appends follow it or wait, and nothing is lost."""
    run = connect(server.url, f"reshard-{part}")
    assert run.put(batch={"groups_per_batch": 20}).status_code == 201
    appender = Appender(connect(server.url, run.run))
    appender.start()
    eventually(lambda: len(appender.acknowledged) > 20, WITHIN_S)
    key = keys.counts(run.run) if part == "control" else keys.written(run.run, keys.bucket_of("g3"))
    source = cluster.owner(key)
    target = next(node for node in cluster.primaries() if node is not source)
    redirected = redirections(source)
    cluster.begin_move(key, target)
    eventually(lambda: redirections(source) > redirected, WITHIN_S)  # the load has met a slot that is on its way
    cluster.end_move(key, source, target)
    acknowledged = len(appender.acknowledged)
    eventually(lambda: len(appender.acknowledged) > acknowledged + 70, WITHIN_S)
    appender.stop()
    assert cluster.owner(key) is target
    assert not missing(cluster, run, appender.acknowledged)
    run.ready_batch(0, run.attach())


def test_a_node_without_acknowledged_payloads_is_noticed(
    cluster: ValkeyCluster, server: ServeProcess, connect: Callable[[str, str], RunClient]
) -> None:
    """Bucket and node are named, nothing more is stored in it, and the run goes on when its payloads are back."""
    run = connect(server.url, "older")
    assert run.put(batch={"groups_per_batch": 200}).status_code == 201
    names = [f"g{number}" for number in range(150)]
    assert all(answer["status"] == "stored" for answer in run.append(*map(group, names)))
    bucket = keys.bucket_of("g0")
    written = keys.written("older", bucket)
    node = cluster.owner(written)
    count = int(node.client.get(written) or 0)
    node.client.set(written, count - 1)
    again = next(f"x{number}" for number in range(1000) if keys.bucket_of(f"x{number}") == bucket)
    refused = run.post("groups", groups=[group(again)])
    assert refused.json()["type"].endswith("data-lost"), refused.text
    assert f"bucket {bucket} on node 127.0.0.1:{node.port} has had {count - 1} payloads, but {count}" in refused.text
    eventually(lambda: readiness(server)[0], WITHIN_S, lambda status: status == 503)
    assert int(node.client.get(written) or 0) == count - 1
    assert not any(":x" in key for key in payloads(cluster, "older")[node.port])
    node.client.set(written, count)
    eventually(lambda: run.post("groups", groups=[group(again)]).status_code, WITHIN_S, lambda status: status == 200)
    eventually(lambda: readiness(server)[0], WITHIN_S, lambda status: status == 200)
    node.client.set(written, count - 1)
    run.post("groups", groups=[group(next(f"y{n}" for n in range(1000) if keys.bucket_of(f"y{n}") == bucket))])
    accepted = run.post("accept-loss", entries=0, groups=2)
    assert accepted.status_code == 200, accepted.text
    eventually(lambda: run.post("groups", groups=[group("last")]).status_code, WITHIN_S, lambda status: status == 200)


def test_any_server_takes_appends_and_columns(
    cluster: ValkeyCluster,
    server: ServeProcess,
    tmp_path: Path,
    connect: Callable[[str, str], RunClient],
) -> None:
    """A second server learns of groups that others stored; late columns lie beside their payloads."""
    run = connect(server.url, "shared")
    assert run.put(batch={"groups_per_batch": 8}).status_code == 201
    second = ServeProcess(tmp_path / "data", "--redis-url", cluster.url, "--wait-replicas", "1").start()
    try:
        other = connect(second.url, "shared")
        eventually(lambda: other.get("").status_code, WITHIN_S, lambda status: status == 200)
        run.append(*(group(f"g{number}") for number in range(4)))
        eventually(lambda: other.state()["groups"]["stored"], WITHIN_S, lambda count: count == 4)
        other.http.follow_redirects = True
        assert {answer["status"] for answer in other.append(*(group(f"g{n}") for n in range(3, 8)))} <= {
            "stored",
            "duplicate",
        }
        columns = {"columns": {"ref_logprobs": [[-0.1] * 3] * 2}}
        for _ in range(2):
            assert run.http.put(f"{run.path}/groups/g5/columns", json=columns).is_success
        body = run.ready_batch(0, run.attach()).content
        assert b"ref_logprobs" in body
        assert sum(key.endswith(":ref_logprobs") for each in payloads(cluster, "shared").values() for key in each) == 1
    finally:
        second.end()


def test_a_run_is_handed_over_between_two_servers(
    cluster: ValkeyCluster, tmp_path: Path, connect: Callable[[str, str], RunClient]
) -> None:
    """Appends go on through both servers meanwhile; the next step is served by either, and nothing is lost."""
    servers = [SoonSteady(tmp_path / name, "--redis-url", cluster.url, "--wait-replicas", "1") for name in "ab"]
    with contextlib.ExitStack() as stack:
        for starting in servers:
            stack.callback(starting.end)
            starting.start()
        first, second = servers
        announced = cluster.owner(keys.SERVERS).client
        holders = frozenset(
            text(holder)
            for holder in eventually(lambda: announced.hkeys(keys.SERVERS), WITHIN_S, lambda entries: len(entries) == 2)
        )
        wanted = (name for name in map("handed-{}".format, range(100)) if _leads(wanted_leader(name, holders), second))
        run = connect(first.url, next(wanted))
        assert run.put(batch={"groups_per_batch": 4}, strategy={"options": {"max_staleness": 9}}).status_code == 201
        epoch = run.attach()
        appenders = [Appender(connect(server.url, run.run)) for server in servers]
        for appender in appenders:
            appender.start()
        run.ready_batch(0, epoch)
        leaders = f"{first.url}/readyz"
        eventually(
            lambda: httpx.get(leaders, timeout=WITHIN_S).json()["leaders"][run.run],
            3
            * WITHIN_S,  # one that is offered just after a failover of its node stays, and is offered again in a minute
            lambda leader: leader == second.url,
        )
        for server in (second, first):
            assert connect(server.url, run.run).ready_batch(0, epoch).is_success
        for call in (lambda: run.ack(0, epoch), lambda: run.publish(1, epoch)):
            eventually(call, WITHIN_S, lambda answer: answer.is_success)
        run.ready_batch(1, epoch)
        for appender in appenders:
            before = len(appender.acknowledged)
            eventually(lambda: len(appender.acknowledged) > before, WITHIN_S)  # noqa: B023 - it is called at once
            appender.stop()
        print(f"handover: {max(appender.longest_s for appender in appenders):.2f} s without an acknowledgement")
        assert max(appender.longest_s for appender in appenders) < BLACKOUT_S / 2 * patience()
        for appender in appenders:
            assert not missing(cluster, run, appender.acknowledged)


def _leads(holder: str | None, server: ServeProcess) -> bool:
    return str(holder).partition("@")[2] == server.url


def test_a_lost_node_without_a_successor_is_waited_for_with_the_reason(
    cluster: ValkeyCluster, server: ServeProcess, connect: Callable[[str, str], RunClient]
) -> None:
    """503 names the slots and the node, and `/readyz` too. The lead of runs on other nodes is kept."""
    run = connect(server.url, "uncovered")
    assert run.put(batch={"groups_per_batch": 4}).status_code == 201
    run.append(*(group(f"g{number}") for number in range(20)))
    primary = of_payloads_only(cluster, "uncovered")
    there = next(name for name in map("there-{}".format, range(100)) if cluster.owner(keys.counts(name)) is primary)
    assert connect(server.url, there).put(batch={"groups_per_batch": 4}).status_code == 201
    with without(cluster, primary):
        why = f"of 127.0.0.1:{primary.port}, which is down and has no successor yet"
        eventually(lambda: readiness(server), WITHIN_S, lambda seen: seen[0] == 503 and why in seen[1])
        refused = run.post("groups", groups=[group(f"x{number}") for number in range(20)])
        assert refused.status_code == 503, refused.text
        until_s = time.monotonic() + LEASE_S + 1.0
        while time.monotonic() < until_s:
            run.attach()
            assert cluster.owner(keys.lead(run.run)).client.pttl(keys.lead(run.run)) > 0
    eventually(lambda: readiness(server)[0], WITHIN_S, lambda status: status == 200)
    more = [group(f"x{number}") for number in range(20)]
    eventually(lambda: run.post("groups", groups=more).status_code, WITHIN_S, lambda status: status == 200)


@contextlib.contextmanager
def without(cluster: ValkeyCluster, primary: Valkey) -> Iterator[None]:
    """Kill a primary and its replica; start both again at the end."""
    replica = next(n for n in cluster.nodes if n.client.role()[0] == b"slave" and n.client.role()[2] == primary.port)
    replica.kill()
    primary.kill()
    try:
        yield
    finally:
        primary.start()
        replica.start()


def test_a_dead_node_keeps_no_other_run_from_being_checked(
    cluster: ValkeyCluster, server: ServeProcess, connect: Callable[[str, str], RunClient]
) -> None:
    """Runs of other nodes tick, are checked, followed and discovered; each round then raises the outage."""
    names = [f"checked-{number}" for number in range(60)]
    dead = of_payloads_only(cluster, names[0])
    gone = next(name for name in names if cluster.owner(keys.counts(name)) is dead)
    living, new, *_ = (name for name in names if cluster.owner(keys.counts(name)) is not dead)
    stored = next(name for name in names if cluster.owner(keys.written(living, keys.bucket_of(name))) is not dead)
    for name in (gone, living):
        assert connect(server.url, name).put(batch={"groups_per_batch": 1}).status_code == 201

    async def check(service: Service) -> None:
        runs = service.runs = {name: service.runs[name] for name in (gone, living)}  # the one on the dead node first
        ends, ticked = {name: run.journal.ends for name, run in runs.items()}, []
        with without(cluster, dead):
            async with asyncio.timeout(WITHIN_S):
                while not service.store.connection.trouble:  # noqa: ASYNC110 - another task finds it out
                    await asyncio.sleep(0.02)
                append = functools.partial(connect(server.url, living).post, "groups", groups=[group(stored)])
                await asyncio.to_thread(
                    eventually, append, WITHIN_S, lambda answer: answer.is_success
                )  # it may notice now
                while not (news := await service.store.streams.wait_for_entries(ends, WITHIN_S)):
                    pass
                assert news == [living]

            async def tick(name: str) -> None:
                await service.store.counters.read(name)
                ticked.append(name)

            for name, run in runs.items():
                run.tick = functools.partial(tick, name)  # type: ignore[method-assign]
                run.journal.lose(DataLost("to be checked", name="run", value=name))
            create = functools.partial(connect(server.url, new).put, batch={"groups_per_batch": 1})
            await asyncio.to_thread(eventually, create, WITHIN_S, lambda answer: answer.is_success)
            for job in (service._tick, service._watch):
                with pytest.raises(ServiceUnavailable, match="has no successor yet"):
                    await job()
            assert ticked == [living] and new in service.runs
            assert (bool(runs[gone].journal.lost), runs[living].journal.lost) == (True, None)

    async def main() -> None:
        store = await Store.open(cluster.url, WritePolicy(replicas=1))
        service = Service(store, url="http://here", embedded=False, balance=False)
        try:
            await service.start()
            await check(service)
        finally:
            await store.close()

    asyncio.run(main())
    eventually(lambda: readiness(server)[0], WITHIN_S, lambda status: status == 200)


def test_what_would_not_be_safe_is_refused_with_the_reason(
    cluster: ValkeyCluster, server: ServeProcess, tmp_path: Path, connect: Callable[[str, str], RunClient]
) -> None:
    """Spill and a restore to a cluster; a backup of a run in a cluster goes on elsewhere, on one server."""
    run = connect(server.url, "copied")
    spill = {"limits": {"max_bytes_in_memory": 1 << 30}, "spill": {"url": f"file://{tmp_path}"}}

    def answered(call: Callable[[], httpx.Response]) -> httpx.Response:
        """Call until nodes that other tests killed serve again."""
        return eventually(call, WITHIN_S, lambda answer: answer.status_code != 503)

    refused = answered(lambda: run.put(batch={"groups_per_batch": 4}, **spill))
    assert refused.status_code == 422 and "spill cannot be used with a Redis Cluster" in refused.text
    assert answered(lambda: run.put(batch={"groups_per_batch": 4})).status_code in (200, 201)
    groups = [group(f"g{number}") for number in range(6)]
    assert answered(lambda: run.post("groups", groups=groups)).is_success
    file = tmp_path / "copied.backup"
    main(["backup", "copied", "--to", str(file), "--redis-url", cluster.url])
    with pytest.raises(SystemExit):
        main(["restore", "--from", str(file), "--redis-url", cluster.url])
    with Valkey(tmp_path / "single") as single:
        main(["restore", "--from", str(file), "--redis-url", single.url])
        serve = ServeProcess(tmp_path / "data", "--redis-url", single.url).start()
        try:
            restored = connect(serve.url, "copied")
            assert restored.append(group("g1"))[0]["status"] == "duplicate"
            epoch = restored.attach()
            restored.ready_batch(0, epoch)
            assert restored.ack(0, epoch).is_success and restored.publish(1, epoch).is_success
            assert restored.post("checkpoints", epoch=epoch, step=1).is_success
            eventually(lambda: len(list(single.client.scan_iter("rb:b:*"))), WITHIN_S, lambda count: count == 2)
        finally:
            serve.end()
