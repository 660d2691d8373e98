"""A service whose Redis fails over by Sentinel: calls wait with the reason, and nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from replaybuf.errors import Invalid, UnsupportedServer
from replaybuf.store import ServerReport, Store, WritePolicy, keys
from replaybuf.store.redis.durability import STRICT
from replaybuf.store.redis.topology import open_reader
from tests.appender import Appender
from tests.conftest import RunClient, ServeProcess, group
from tests.forked import run_forked
from tests.sentinels import Watched
from tests.waiting import eventually, patience

BLACKOUT_S = 10.0
"""Less than the timeout of a command, which a suspended primary costs where its connections are not cut.

A failover with `down-after-milliseconds 1000` takes 2 to 5 s.
"""
WITHIN_S = 30.0


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A primary, two replicas, three sentinels; each test leaves them as they were, with another primary."""
    with Watched(tmp_path_factory.mktemp("watched")) as servers:
        yield servers


@pytest.fixture(scope="module")
def server(watched: Watched, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """A service that waits for one replica."""
    serve = ServeProcess(tmp_path_factory.mktemp("serve") / "data", "--redis-url", watched.url, "--wait-replicas", "1")
    yield serve.start()
    serve.end()


def readiness(server: ServeProcess) -> tuple[int, str]:
    reply = httpx.get(f"{server.url}/readyz", timeout=WITHIN_S)
    return reply.status_code, str(reply.json()["waiting_for"])


@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_run_goes_on_after_a_failover_and_loses_nothing(
    fault: str, watched: Watched, server: ServeProcess, connect: Callable[[str, str], RunClient]
) -> None:
    """Appends, batches and acks go on within a bounded time; the old primary comes back as a replica."""
    run, old = connect(server.url, f"failover-{fault}"), watched.primary()
    assert run.put(batch={"groups_per_batch": 4}, strategy={"options": {"max_staleness": 9}}).status_code == 201
    epoch = run.attach()
    appender = Appender(connect(server.url, run.run))
    appender.start()
    run.ready_batch(0, epoch)
    old.signal(signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    begun_s = time.monotonic()
    eventually(lambda: run.ack(0, epoch).status_code, WITHIN_S, lambda status: status == 200)
    eventually(lambda: run.publish(1, epoch).status_code, WITHIN_S, lambda status: status == 200)
    run.ready_batch(1, epoch)
    trained_s = time.monotonic() - begun_s
    acknowledged = len(appender.acknowledged)
    eventually(lambda: len(appender.acknowledged) > acknowledged + 10, WITHIN_S)

    new = watched.primary()
    assert new is not old
    if fault == "kill":
        old.kill()
        old.start()
    else:
        old.signal(signal.SIGCONT)
    acknowledged = len(appender.acknowledged)
    eventually(lambda: old.client.role()[0], WITHIN_S, lambda role: role == b"slave")
    eventually(lambda: old.client.role()[3], WITHIN_S, lambda state: state == b"connected")
    eventually(lambda: len(appender.acknowledged) > acknowledged + 10, WITHIN_S)
    appender.stop()

    print(f"{fault}: {appender.longest_s:.1f} s without an acknowledgement, batch after {trained_s:.1f} s")
    assert max(appender.longest_s, trained_s) < BLACKOUT_S * patience()
    ids = keys.group_ids(run.run)
    assert {name.encode() for name in appender.acknowledged} - set(new.client.hkeys(ids)) == set()
    # An append that was cut off may still be stored, and readiness is read once a second.
    eventually(lambda: run.state()["groups"]["stored"] == new.client.hlen(ids), WITHIN_S)
    eventually(lambda: readiness(server)[0], WITHIN_S, lambda status: status == 200)


def test_without_a_quorum_calls_wait_with_the_reason(
    watched: Watched, server: ServeProcess, connect: Callable[[str, str], RunClient]
) -> None:
    """503 names it and `/readyz` too; with the sentinels back, the run goes on."""
    run, old = connect(server.url, "no-quorum"), watched.primary()
    assert run.put(batch={"groups_per_batch": 4}).status_code == 201
    for sentinel in watched.sentinels[:2]:
        sentinel.kill()
    assert run.append(group("a"))[0]["status"] == "stored", "a primary without sentinels is used as before"
    old.kill()
    why = "no failover is possible"
    eventually(lambda: readiness(server), WITHIN_S, lambda seen: seen[0] == 503 and why in seen[1])
    refused = run.post("groups", groups=[group("b")])
    assert refused.status_code == 503 and why in refused.json()["detail"]
    for sentinel in watched.sentinels[:2]:
        sentinel.start()
    eventually(lambda: run.post("groups", groups=[group("b")]).status_code, WITHIN_S, lambda status: status == 200)
    old.start()
    eventually(lambda: readiness(server)[0], WITHIN_S, lambda status: status == 200)


def report(url: str, policy: WritePolicy) -> ServerReport:
    """Open the store as every command does; return what it says of the server."""

    async def main() -> ServerReport:
        store = await Store.open(url, policy)
        try:
            return await store.connection.report()
        finally:
            await store.close()

    return asyncio.run(main())


def test_an_unknown_name_is_refused_at_start_with_the_known_ones(watched: Watched) -> None:
    """And an address that is not a sentinel."""
    unknown = watched.url.replace("/policy", "/polcy")
    with pytest.raises(Invalid, match="does not know the name 'polcy'; it knows policy"):
        report(unknown, STRICT)
    with pytest.raises(Invalid, match="not sentinels"):
        report(f"redis+sentinel://127.0.0.1:{watched.primary().port}/policy", STRICT)
    doctor = ("doctor", "--json", "--redis-url", unknown, "--port", "0")
    checks = run_forked("replaybuf", doctor)
    assert checks.returncode == 1 and "does not know the name 'polcy'" in checks.stdout


def test_strict_needs_a_replica_where_one_may_be_promoted(watched: Watched) -> None:
    weak = report(watched.url, STRICT)
    assert weak.durability == "relaxed" and "serve with --wait-replicas 1" in weak.reasons[0]
    assert report(watched.url, WritePolicy(replicas=1)).summary == "strict (appendfsync always and WAIT 1)"


def test_a_replica_that_loses_data_is_refused_under_strict(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    """Sentinel may promote it. One that does not answer cannot be asked: a warning names it."""
    primary = watched.primary()
    replica = next(server for server in watched.servers if server is not primary)
    address = f"127.0.0.1:{replica.port}"
    eventually(lambda: primary.client.info("replication")["connected_slaves"], WITHIN_S, lambda number: number == 2)
    replica.client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(UnsupportedServer, match=f"{address}: maxmemory-policy is 'allkeys-lru': set noeviction"):
            report(watched.url, WritePolicy(replicas=1))
        assert report(watched.url, WritePolicy("relaxed")).durability == "relaxed"
        replica.signal(signal.SIGSTOP)
        assert report(watched.url, WritePolicy(replicas=1)).durability == "strict"
        assert f"replica {address} cannot be checked" in caplog.text
    finally:
        replica.signal(signal.SIGCONT)
        replica.client.config_set("maxmemory-policy", "noeviction")


def test_a_direct_reader_reads_from_the_primary(watched: Watched) -> None:
    with open_reader(watched.url, socket_timeout=WITHIN_S, socket_connect_timeout=WITHIN_S) as reader:
        assert reader.info("server")["process_id"] == watched.primary().pid
