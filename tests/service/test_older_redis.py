"""A Redis that comes back older than what was acknowledged: it is noticed before anything is written to it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from replaybuf.cli.main import main
from replaybuf.errors import DataLost, ServiceUnavailable
from replaybuf.service.run.served_run import Run
from replaybuf.store import Lease, Store, keys
from replaybuf.wire.config import BatchSpec, RunConfig
from tests.conftest import RunClient, ServeProcess, group
from tests.forked import run_forked
from tests.service.test_deletion import wait_until_gone
from tests.store.test_store import to_append
from tests.valkeys import Valkey
from tests.waiting import eventually

Connect = Callable[[str, str], RunClient]
WITHIN_S = 20.0


class Forwarder:
    """A port that clients keep while the server behind it changes, as a virtual IP does."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listening.getsockname()[1]}"
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def switch(self, target: Path) -> None:
        """Close all connections; new ones reach `target`."""
        self.target = target
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the port and all connections."""
        self._listening.close()
        self.switch(self.target)
        for connection in self._open:
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            try:
                server.connect(str(self.target))
            except OSError:  # the server is down
                client.close()
                server.close()
                continue
            self._open += [client, server]
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(65536):
                sink.sendall(chunk)
        for connection in (source, sink):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


UNDECIDED = (b":lead", b":lost", keys.SERVERS.encode())
"""Ends of keys that hold no data of a run."""


def dump(client: redis.Redis) -> dict[bytes, Any]:
    """Return what Redis holds of all runs, but for leases and the ends that it lacks."""
    return {key: client.dump(key) for key in client.scan_iter("rb:*") if not key.endswith(UNDECIDED)}


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    """A Valkey that no server owns."""
    with Valkey(tmp_path / "valkey") as server:
        yield server


@pytest.fixture
def forwarder(valkey: Valkey) -> Iterator[Forwarder]:
    """A port that leads to the Valkey."""
    port = Forwarder(valkey.socket_path)
    yield port
    port.close()


@pytest.fixture
def serving(forwarder: Forwarder, tmp_path: Path) -> Iterator[ServeProcess]:
    """A server on the port."""
    server = ServeProcess(tmp_path / "server", "--redis-url", forwarder.url, "--no-balance").start()
    yield server
    server.end()


def copy_to(older: Valkey, valkey: Valkey) -> None:
    """End a server, and give it what the other one has now."""
    older.kill()
    shutil.rmtree(older.folder)
    shutil.copytree(valkey.folder, older.folder)


def store_five(run: RunClient) -> None:
    """Store five groups; every answer is `stored`. After its first replica a primary takes no writes for a second."""
    five = [group(f"late-{n}") for n in range(5)]
    response = eventually(lambda: run.post("groups", groups=five), 20.0, lambda answer: answer.status_code != 503)
    assert [result["status"] for result in response.json()["results"]] == ["stored"] * 5


def lose_five_groups(run: RunClient, valkey: Valkey, forwarder: Forwarder, older: Valkey, how: str) -> None:
    """Acknowledge five groups that the server behind the port then does not have."""
    if how == "lagging replica promoted":
        older.start()
        older.replicate(valkey)
        older.client.replicaof("NO", "ONE")  # the link breaks, and nobody notices
        store_five(run)
        forwarder.switch(older.socket_path)
    else:
        shutil.copytree(valkey.folder, older.folder, dirs_exist_ok=True)
        store_five(run)
        if how == "older file":
            older.start()
            forwarder.switch(older.socket_path)
        else:
            valkey.kill()
            shutil.rmtree(valkey.folder)
            shutil.copytree(older.folder, valkey.folder)
            valkey.start()


@pytest.mark.parametrize("how", ["older file", "older file, same address", "lagging replica promoted"])
def test_groups_that_an_older_redis_lacks_are_data_lost_before_anything_is_written(
    how: str, valkey: Valkey, forwarder: Forwarder, serving: ServeProcess, tmp_path: Path, connect: Connect
) -> None:
    """Every write that comes at once is refused, and Redis stays as it came back; with its data it goes on."""
    run = connect(serving.url, "r")
    run.put(batch={"groups_per_batch": 4})
    epoch = run.attach()
    run.append(*(group(f"g{n}") for n in range(6)))
    with Valkey(tmp_path / "older") as older:
        older.kill()
        shutil.rmtree(older.folder)
        lose_five_groups(run, valkey, forwarder, older, how)
        now = valkey if how == "older file, same address" else older
        before = dump(now.client)
        # Producers that repeat at once would get the numbers of the lost groups.
        answer = eventually(lambda: run.post("groups", **group("new")), WITHIN_S, lambda a: a.status_code != 503)
        assert (answer.status_code, answer.json()["type"]) == (500, "urn:replaybuf:problem:data-lost"), answer.text
        assert "missing: groups 7 to 11" in answer.json()["detail"]
        calls: list[Callable[[], httpx.Response]] = [
            lambda: run.post("groups", **group("again")),
            lambda: run.post("tickets", producer="p", count=1),
            lambda: run.batch(0, epoch),
            lambda: run.post("attach", resume_step=0, dp_world_size=1),
            lambda: run.post("checkpoints", epoch=epoch, step=0),
            lambda: run.http.patch(run.path, json={"state": "paused"}),
            lambda: run.http.get(run.path),
        ]
        assert [call().status_code for call in calls] == [500] * len(calls)
        eventually(lambda: httpx.get(f"{serving.url}/readyz").status_code == 503, WITHIN_S)
        assert dump(now.client) == before
        if how != "older file, same address":
            forwarder.switch(valkey.socket_path)
            eventually(lambda: run.post("groups", **group("new")).status_code == 200, WITHIN_S)
            assert run.state()["groups"]["stored"] == 12


def test_ledger_entries_that_an_older_redis_lacks_stop_appends_too(
    valkey: Valkey, forwarder: Forwarder, serving: ServeProcess, tmp_path: Path, connect: Connect
) -> None:
    """No group is lost, but an ack: a group that is stored now would be lost when Redis is restored."""
    run = connect(serving.url, "r")
    run.put(batch={"groups_per_batch": 2})
    epoch = run.attach()
    run.append(*(group(f"g{n}") for n in range(4)))
    assert run.batch(0, epoch).status_code == 200
    with Valkey(tmp_path / "older") as older:
        copy_to(older, valkey)
        assert run.ack(0, epoch).status_code == 200
        older.start()
        forwarder.switch(older.socket_path)
        answer = eventually(lambda: run.post("groups", **group("new")), WITHIN_S, lambda a: a.status_code != 503)
        assert (answer.status_code, answer.json()["type"]) == (500, "urn:replaybuf:problem:data-lost"), answer.text
        assert "missing: ledger entries" in answer.json()["detail"]
        assert not older.client.hexists("rb:{r}:gid", "new")


def test_a_record_that_an_older_redis_lacks_is_data_lost(
    valkey: Valkey, forwarder: Forwarder, serving: ServeProcess, tmp_path: Path, connect: Connect
) -> None:
    """It was a fault of the service until the next comparison of the ends."""
    run = connect(serving.url, "r")
    run.put(batch={"groups_per_batch": 2})
    epoch = run.attach()
    run.append(*(group(f"g{n}") for n in range(2)))
    with Valkey(tmp_path / "older") as older:
        copy_to(older, valkey)
        assert run.batch(0, epoch).status_code == 200
        older.start()
        forwarder.switch(older.socket_path)
        record = f"{run.path}/batches/0/record"
        answer = eventually(lambda: run.http.get(record), WITHIN_S, lambda answer: answer.status_code != 503)
        assert (answer.status_code, answer.json()["type"]) == (500, "urn:replaybuf:problem:data-lost"), answer.text


def test_another_history_of_the_same_length_is_data_lost(
    valkey: Valkey, forwarder: Forwarder, serving: ServeProcess, tmp_path: Path, connect: Connect
) -> None:
    """Another server went on from an older copy: the numbers agree, the groups do not."""
    run = connect(serving.url, "r")
    run.put(batch={"groups_per_batch": 8})
    with Valkey(tmp_path / "older") as older:
        copy_to(older, valkey)
        store_five(run)
        older.start()
        other = ServeProcess(tmp_path / "other", "--redis-url", older.url).start()
        try:
            eventually(lambda: "leading" in other.log() or "lead taken" in other.log(), WITHIN_S)
            connect(other.url, "r").append(*(group(f"other-{n}") for n in range(6)))
        finally:
            other.end()
        forwarder.switch(older.socket_path)
        eventually(lambda: httpx.get(f"{serving.url}/readyz").status_code == 503, WITHIN_S)
        answer = eventually(lambda: run.http.get(run.path), WITHIN_S, lambda a: a.status_code == 500)
        assert "group 5 as it was acknowledged" in answer.json()["detail"]


@pytest.mark.parametrize("who", ["leader", "follower", "restarted server", "direct writer"])
def test_the_last_entry_tells_two_histories_of_one_length_apart(
    who: str, valkey: Valkey, forwarder: Forwarder, serving: ServeProcess, tmp_path: Path, connect: Connect
) -> None:
    """A replica without the last entry was promoted, and another entry took its number. Each notices it by itself."""
    run = connect(serving.url, "r")
    run.put(batch={"groups_per_batch": 8})
    with (
        Valkey(tmp_path / "older") as older,
        asyncio.Runner() as runner,
        contextlib.ExitStack() as ending,
    ):
        copy_to(older, valkey)
        url = serving.url
        if who == "follower":
            standby = ServeProcess(tmp_path / "standby", "--redis-url", forwarder.url, "--no-balance").start()
            ending.callback(standby.end)
            url = standby.url
        if who == "direct writer":
            serving.kill()
            writer = runner.run(Store.open(forwarder.url))
            ending.callback(lambda: runner.run(writer.close()))
            write_last(runner, writer, "here")
        else:
            assert run.http.patch(run.path, json={"state": "paused"}).status_code == 200
            eventually(lambda: connect(url, "r").state()["state"] == "paused", WITHIN_S)
            serving.kill() if who != "leader" else None
        older.start()
        other = ServeProcess(tmp_path / "other", "--redis-url", older.url).start()
        ending.callback(other.end)
        there = connect(other.url, "r")
        eventually(lambda: "lead taken" in other.log(), WITHIN_S)  # before, it hands calls to the holder of the lease
        if who == "direct writer":
            there.append(group("there"))
        else:
            assert there.http.patch(there.path, json={"state": "paused"}).status_code == 200
        other.stop()
        assert length(valkey) == length(older)
        before = dump(older.client)
        forwarder.switch(older.socket_path)
        if who == "direct writer":
            with pytest.raises(DataLost, match="group 1 as it was acknowledged"):
                eventually(lambda: write_last(runner, writer, "new"), WITHIN_S)
        else:
            if who == "restarted server":
                serving.start()
                url = serving.url
            seen = connect(url, "r")
            answer = eventually(lambda: seen.http.get(seen.path), WITHIN_S, lambda reply: reply.status_code == 500)
            assert "ledger entry 2 or group 0 as it was acknowledged" in answer.json()["detail"]
        assert dump(older.client) == before


def write_last(runner: asyncio.Runner, writer: Store, group_id: str) -> bool:
    """Append a group as a direct writer; False while its Redis cannot be reached."""
    try:
        runner.run(writer.groups.append("r", [to_append(group_id)], {"": 0}, 0.0))
    except ServiceUnavailable:
        return False
    return True


def length(valkey: Valkey) -> list[Any]:
    """Return the numbers of the newest entries of both streams."""
    newest: list[Any] = [valkey.client.xrevrange(f"rb:{{r}}:{name}", count=1) for name in ("led", "idx")]
    return [[number for number, _ in entries] for entries in newest]


@pytest.mark.parametrize("ending", ["alive", "killed"])
def test_a_standby_that_knows_less_than_the_leader_writes_nothing_either(
    ending: str, valkey: Valkey, forwarder: Forwarder, serving: ServeProcess, tmp_path: Path, connect: Connect
) -> None:
    """It has all of the older Redis and would take the lead. It also remembers the loss after the leader is gone."""
    run = connect(serving.url, "r")
    run.put(batch={"groups_per_batch": 4})
    run.append(*(group(f"g{n}") for n in range(6)))
    standby = ServeProcess(tmp_path / "standby", "--redis-url", forwarder.url, "--no-balance").start()
    with Valkey(tmp_path / "older") as older:
        try:
            behind = connect(standby.url, "r")
            eventually(lambda: behind.state()["groups"]["stored"] == 6, WITHIN_S)
            older.kill()
            shutil.rmtree(older.folder)
            standby.signal(signal.SIGSTOP)
            lose_five_groups(run, valkey, forwarder, older, "older file")
            before = dump(older.client)
            eventually(lambda: run.post("groups", **group("new")).status_code == 500, WITHIN_S)
            if ending == "killed":
                serving.kill()
            standby.signal(signal.SIGCONT)
            answer = eventually(lambda: behind.post("groups", **group("new")), WITHIN_S, lambda a: a.status_code != 503)
            assert (answer.status_code, answer.json()["type"]) == (500, "urn:replaybuf:problem:data-lost"), answer.text
            assert "missing: groups 7 to 11" in answer.json()["detail"]
            eventually(lambda: behind.http.get(behind.path).status_code == 500, WITHIN_S)  # its own answer, no leader's
            older.client.delete("rb:{r}:lost")  # as if its time were over: the standby shows the ends again
            assert behind.post("groups", **group("new")).status_code == 500
            eventually(lambda: httpx.get(f"{standby.url}/readyz").status_code == 503, WITHIN_S)
            assert dump(older.client) == before
            forwarder.switch(valkey.socket_path)
            leader = behind if ending == "killed" else run
            eventually(lambda: leader.post("groups", **group("new")).status_code == 200, WITHIN_S)
            # The other server may lead by now, and what it stored is shown here a moment later.
            eventually(lambda: leader.state()["groups"]["stored"] == 12, WITHIN_S)
        finally:
            standby.end()


# ---------------------------------------------------------------------- while the service was down


def cut(server: ServeProcess, copy: Path) -> None:
    """Put an older copy of the append-only files of the private Valkey in place."""
    shutil.rmtree(server.data_dir / "appendonlydir")
    shutil.copytree(copy, server.data_dir / "appendonlydir")


@pytest.mark.parametrize("ending", ["stopped", "killed"])
def test_a_file_that_was_cut_while_the_service_was_down_is_data_lost(
    ending: str, own_service: ServeProcess, tmp_path: Path, connect: Connect
) -> None:
    """The answer names what is missing and both ways out; each of them works."""
    run, other = (connect(own_service.url, name) for name in ("r", "other"))
    for run_client in (run, other):
        run_client.put(batch={"groups_per_batch": 4})
        run_client.append(*(group(f"g{n}") for n in range(6)))
    own_service.stop()
    shutil.copytree(own_service.data_dir / "appendonlydir", tmp_path / "before")
    own_service.start()
    store_five(connect(own_service.url, "r"))
    if ending == "killed":
        own_service.kill()
        with contextlib.closing(redis.Redis(unix_socket_path=own_service.valkey_socket)) as client:
            client.shutdown(nosave=True)
    own_service.stop()
    shutil.copytree(own_service.data_dir / "appendonlydir", tmp_path / "whole")
    cut(own_service, tmp_path / "before")

    own_service.start()
    run, other = (connect(own_service.url, name) for name in ("r", "other"))
    assert list(httpx.get(f"{own_service.url}/readyz").json()["unreadable"]) == ["r"]
    for answer in (run.http.get(run.path), run.post("groups", **group("new")), run.put(batch={"groups_per_batch": 4})):
        assert (answer.status_code, answer.json()["type"]) == (500, "urn:replaybuf:problem:data-lost"), answer.text
        assert "index at group 6; missing: groups 7 to 11" in answer.json()["detail"]
        assert "replaybuf runs accept-loss r" in answer.json()["detail"]
    own_service.stop()

    cut(own_service, tmp_path / "whole")
    own_service.start()
    assert connect(own_service.url, "r").state()["groups"]["stored"] == 11
    own_service.stop()

    cut(own_service, tmp_path / "before")
    own_service.start()
    run, other = (connect(own_service.url, name) for name in ("r", "other"))
    assert other.append(group("new"))[0]["status"] == "stored"
    lost = run.http.get(run.path).json()
    assert run.post("accept-loss", entries=lost["entries"], groups=lost["groups"]).status_code == 200
    own_service.stop()
    own_service.start()
    assert connect(own_service.url, "r").state()["groups"]["stored"] == 6


def test_a_run_that_an_emptied_redis_does_not_list_is_data_lost_after_a_restart(
    valkey: Valkey, serving: ServeProcess, connect: Connect
) -> None:
    """Creating it again would hide the loss."""
    connect(serving.url, "r").put(batch={"groups_per_batch": 4})
    serving.stop()
    valkey.client.flushall()
    serving.start()
    run = connect(serving.url, "r")
    assert list(httpx.get(f"{serving.url}/readyz").json()["unreadable"]) == ["r"]
    for answer in (run.put(batch={"groups_per_batch": 4}), run.http.get(run.path)):
        assert (answer.status_code, answer.json()["type"]) == (500, "urn:replaybuf:problem:data-lost"), answer.text
    assert not [key for key in valkey.client.scan_iter("rb:{r}:*") if not key.endswith(b":lead")]


@pytest.mark.parametrize("mark", ["deleted", "deleting", "restoring"])
@pytest.mark.parametrize("restarted", [False, True])
def test_an_older_redis_from_the_deletion_of_a_run_that_was_restored_since_is_data_lost(
    mark: str,
    restarted: bool,
    valkey: Valkey,
    forwarder: Forwarder,
    serving: ServeProcess,
    tmp_path: Path,
    connect: Connect,
) -> None:
    """Its mark is of the run before: nothing is forgotten or deleted, and the newer Redis is used when it is back."""
    run, backup = connect(serving.url, "r"), str(tmp_path / "r.backup")
    run.put(batch={"groups_per_batch": 2})
    run.append(group("g0"))
    main(["backup", "r", "--to", backup, "--redis-url", valkey.url])
    with Valkey(tmp_path / "older") as older:
        copy_to(older, valkey)
        assert run.http.patch(run.path, json={"state": "finished"}).status_code == 200
        assert run.http.delete(run.path).status_code == 204
        wait_until_gone(valkey.client, run)
        if mark == "deleted":
            copy_to(older, valkey)
        main(["restore", "--from", backup, "--redis-url", valkey.url])
        eventually(lambda: run.http.get(run.path).status_code == 200, WITHIN_S)
        store_five(run)
        older.start()
        if mark != "deleted":  # as between the two writes of a deletion, or of a restore
            older.client.srem(keys.RUNS, "r")
            older.client.sadd(keys.DELETING, "r")
            older.client.set(keys.deleted("r"), f"{mark}:1")
            older.client.set(keys.incarnation("r"), 1 if mark == "restoring" else 0)
            older.client.delete(keys.lead("r"))
        before = dump(older.client)
        serving.stop() if restarted else None
        forwarder.switch(older.socket_path)
        serving.start() if restarted else None
        run = connect(serving.url, "r")
        answer = eventually(lambda: run.http.get(run.path), WITHIN_S, lambda reply: reply.status_code in (410, 500))
        assert (answer.status_code, answer.json()["type"]) == (500, "urn:replaybuf:problem:data-lost"), answer.text
        reads = count_lists(older)  # of runs and of marks
        eventually(lambda: count_lists(older) >= reads + 6, WITHIN_S)
        assert run.http.get(run.path).status_code == 500
        assert dump(older.client) == before
        forwarder.switch(valkey.socket_path)
        eventually(lambda: run.http.get(run.path).status_code == 200, WITHIN_S)
        assert run.state()["groups"]["stored"] == 6


def count_lists(valkey: Valkey) -> int:
    """Return how often the lists of runs and of deleted runs were read."""
    calls: int = valkey.client.info("commandstats").get("cmdstat_smembers", {}).get("calls", 0)
    return calls


def test_a_primary_that_was_demoted_and_promoted_again_waits_before_somebody_leads(tmp_path: Path) -> None:
    """As after its first promotion: living servers get the time to show what they know. Its process was never ended."""

    async def lead(url: str, holder: str) -> Lease:
        store = await Store.open(url)
        try:
            return await store.runs.take_lease("r", holder, 0.001)
        finally:
            await store.close()

    async def create(url: str) -> None:
        store = await Store.open(url)
        try:
            token = (await store.runs.take_lease("r", "first", 0.001)).token
            (await Run.create("r", store, str(token), RunConfig(batch=BatchSpec(groups_per_batch=1)))).close()
        finally:
            await store.close()

    def led_by(url: str, holder: str) -> bool:
        return asyncio.run(lead(url, holder)).token is not None

    with Valkey(tmp_path / "one") as first, Valkey(tmp_path / "two") as second:
        asyncio.run(create(first.url))
        eventually(lambda: led_by(first.url, "second"), WITHIN_S)
        second.replicate(first)
        second.client.replicaof("NO", "ONE")
        first.replicate(second)
        first.client.replicaof("NO", "ONE")
        eventually(lambda: not first.client.exists("rb:{r}:lead"), WITHIN_S)
        promoted = asyncio.run(lead(first.url, "third"))
        assert promoted.token is None and 0.0 < promoted.left_s <= 2.0
        eventually(lambda: led_by(first.url, "third"), WITHIN_S)


def test_an_operator_lets_a_run_go_on_without_what_redis_lost(
    valkey: Valkey, forwarder: Forwarder, serving: ServeProcess, tmp_path: Path, connect: Connect
) -> None:
    """Only what was shown is accepted; then every trainer is fenced, and numbers of lost groups are used again."""
    run = connect(serving.url, "r")
    run.put(batch={"groups_per_batch": 2})
    old = run.attach()
    assert run.post("accept-loss", entries=0, groups=0).status_code == 409, "nothing is lost"
    run.append(*(group(f"g{n}") for n in range(6)))
    standby = ServeProcess(tmp_path / "standby", "--redis-url", forwarder.url, "--no-balance")
    with Valkey(tmp_path / "older") as older, contextlib.ExitStack() as ending:
        standby.start()
        ending.callback(standby.end)
        eventually(lambda: connect(standby.url, "r").state()["groups"]["stored"] == 6, WITHIN_S)
        copy_to(older, valkey)
        assert run.batch(0, old).status_code == 200
        lost = run.attach()  # the older copy does not know this epoch
        store_five(run)
        older.start()
        forwarder.switch(older.socket_path)
        problem = eventually(lambda: run.http.get(run.path), WITHIN_S, lambda reply: reply.status_code == 500).json()
        assert (problem["entries"], problem["groups"]) == (2, 5)
        before = dump(older.client)
        refused = run.post("accept-loss", entries=1, groups=5)
        assert (refused.status_code, refused.json()["bound"]) == (409, [2, 5])
        assert dump(older.client) == before
        accepted = run.post("accept-loss", entries=problem["entries"], groups=problem["groups"])
        assert accepted.json() == {"run": "r", "entries": 2, "groups": 5, "last_entry": 2, "last_group": 6}
        for server in (serving, standby):
            reader = connect(server.url, "r")
            eventually(functools.partial(reader.http.get, reader.path), WITHIN_S, is_read_again)
        attached = eventually(functools.partial(run.post, "attach"), WITHIN_S, is_done)  # either server may lead
        new = attached.json()["epoch"]
        assert new > lost > old
        assert [run.batch(0, epoch).json()["type"].rpartition(":")[2] for epoch in (old, lost)] == ["fenced"] * 2
        store_five(run)
        assert run.batch(0, new).status_code == 200 and run.state()["groups"]["stored"] == 11
        records = run.get("ledger").json()["records"]
        assert [(record["entries"], record["groups"]) for record in records if record["type"] == "LOSS"] == [(2, 5)]


def is_read_again(reply: httpx.Response) -> bool:
    return reply.status_code == 200 and bool(reply.json()["groups"]["stored"] == 6)


def is_done(reply: httpx.Response) -> bool:
    return reply.status_code == 200


@pytest.mark.parametrize("restarted", [False, True])
def test_the_command_says_what_is_lost_before_it_accepts(
    restarted: bool, valkey: Valkey, forwarder: Forwarder, serving: ServeProcess, tmp_path: Path, connect: Connect
) -> None:
    """Also where a server has started since, and cannot read the run."""
    run = connect(serving.url, "r")
    run.put(batch={"groups_per_batch": 2})
    command = ("runs", "accept-loss", "r", "--url")
    nothing = run_forked("replaybuf", (*command, serving.url))
    assert nothing.returncode and "Redis lacks nothing of run r" in " ".join(nothing.stderr.split())
    with Valkey(tmp_path / "older") as older:
        copy_to(older, valkey)
        store_five(run)
        older.start()
        forwarder.switch(older.socket_path)
        eventually(lambda: run.http.get(run.path).status_code == 500, WITHIN_S)
        if restarted:
            serving.kill()
            serving.start()
        asked = run_forked("replaybuf", (*command, serving.url))
        assert asked.returncode and "missing: groups 1 to 5" in " ".join(asked.stdout.split())
        done = run_forked("replaybuf", (*command, serving.url, "--yes", "--json"))
        assert json.loads(done.stdout)["groups"] == 5, done.stderr
        again = connect(serving.url, "r")
        eventually(lambda: again.post("tickets", producer="p", count=1), WITHIN_S, is_done)  # somebody leads again
        store_five(again)
        assert again.state()["groups"]["stored"] == 5


def test_an_emptied_redis_leaves_nothing_and_the_name_is_free(
    valkey: Valkey, forwarder: Forwarder, serving: ServeProcess, tmp_path: Path, connect: Connect
) -> None:
    run = connect(serving.url, "r")
    run.put(batch={"groups_per_batch": 2})
    store_five(run)
    with Valkey(tmp_path / "empty") as empty:
        forwarder.switch(empty.socket_path)
        lost = eventually(lambda: run.http.get(run.path), WITHIN_S, lambda reply: reply.status_code == 500).json()
        assert run.post("accept-loss", entries=lost["entries"], groups=lost["groups"]).status_code == 200
        assert run.http.get(run.path).status_code == 404
        created = {"batch": {"groups_per_batch": 2}}
        eventually(lambda: run.http.put(run.path, json=created), WITHIN_S, lambda reply: reply.status_code == 201)
        store_five(run)
