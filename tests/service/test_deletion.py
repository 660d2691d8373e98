"""Deletion of finished runs: keys go, the name answers 410 for a day, a crash or another server changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from replaybuf import Client
from replaybuf.errors import Conflict
from replaybuf.store import keys
from tests.conftest import RunClient, ServeProcess, group
from tests.service.test_standby import start_pair, start_valkey
from tests.waiting import eventually

Connect = Callable[[str, str], RunClient]


@pytest.fixture(scope="module")
def valkey(service: ServeProcess) -> Iterator[redis.Redis]:
    """A client of the Valkey of the shared service."""
    with redis.Redis(unix_socket_path=service.valkey_socket) as client:
        yield client


def finished(run: RunClient, groups: int = 3) -> None:
    """Create a run with groups in several states, tickets, an evaluation and a checkpoint, and finish it."""
    run.put(batch={"groups_per_batch": 1}, tickets={"prompts": 100})
    for ticket in run.post("tickets", producer="p", count=2).json()["tickets"]:
        run.append(group(None, ticket=ticket["ticket"]))
    run.append(*(group(f"g{n}") for n in range(groups)))
    run.post("tickets", producer="p", count=1)
    epoch = run.attach()
    run.train(epoch, range(2))
    run.post("checkpoints", epoch=epoch, step=1)
    evaluation = {"name": "x", "version": 0, "versions": [0], "reward_mean": 0.5, "rollouts": 4}
    assert run.post("evaluations", **evaluation).status_code == 200
    finish(run)


def finish(run: RunClient) -> None:
    """Finish a run."""
    assert run.http.patch(run.path, json={"state": "finished"}).status_code == 200


def keys_of(valkey: redis.Redis, run: RunClient) -> set[bytes]:
    """List the keys and payloads of a run."""
    return {*valkey.scan_iter(f"rb:{{{run.run}}}:*", 1000), *valkey.scan_iter(f"rb:p:{{{run.run}:*", 1000)}


def wait_until_gone(valkey: redis.Redis, run: RunClient) -> None:
    """Wait until only the mark of the deleted run is left, with its lifetime, and the number of deletions."""
    mark, incarnation = keys.deleted(run.run).encode(), keys.incarnation(run.run).encode()
    eventually(lambda: keys_of(valkey, run) == {mark, incarnation} and valkey.ttl(mark) > 0, within_s=20.0)
    assert 86_000 < valkey.ttl(mark) <= 86_400
    assert not valkey.sismember("rb:runs", run.run) and not valkey.sismember("rb:deleting", run.run)


@pytest.mark.parametrize("state", ["running", "paused"])
def test_only_a_finished_run_can_be_deleted(run: RunClient, state: str) -> None:
    run.put(batch={"groups_per_batch": 1})
    run.http.patch(run.path, json={"state": state})
    refused = run.http.delete(run.path)
    assert (refused.status_code, refused.json()["value"], refused.json()["bound"]) == (409, state, "finished")
    assert 'PATCH {"state": "finished"}' in refused.json()["detail"]
    assert run.state()["state"] == state


def test_an_unknown_run_cannot_be_deleted(run: RunClient) -> None:
    assert run.http.delete(run.path).status_code == 404


def test_every_key_and_payload_of_a_deleted_run_goes(run: RunClient, valkey: redis.Redis, connect: Connect) -> None:
    """The keys of another run with a longer name stay."""
    finished(run)
    other = connect(str(run.http.base_url), f"{run.run}-other")
    finished(other)
    # Freed payloads and tickets of stored groups go by themselves.
    kept = {key for key in keys_of(valkey, other) if not key.startswith(b"rb:p:") and not key.endswith(b":tickets")}
    assert len(keys_of(valkey, run)) > 10
    answer = run.http.delete(run.path)
    assert (answer.status_code, answer.content) == (204, b"")
    wait_until_gone(valkey, run)
    assert keys_of(valkey, other) >= kept
    assert other.state()["state"] == "finished"
    assert f'run="{run.run}"' not in run.http.get("/metrics").text


def test_a_deleted_run_answers_410_on_every_call(run: RunClient, valkey: redis.Redis) -> None:
    """While its keys are deleted and after that; a name that was deleted cannot be used again at once."""
    finished(run)
    assert run.http.delete(run.path).status_code == 204
    for _ in range(2):
        for answer in (
            run.http.get(run.path),
            run.put(batch={"groups_per_batch": 1}),
            run.http.put(f"{run.path}?if_absent=true", json={"batch": {}}),
            run.http.patch(run.path, json={"state": "running"}),
            run.http.delete(run.path),
            run.post("tickets", producer="p"),
            run.post("groups", groups=[group("a")]),
            run.post("attach"),
            run.batch(0, 1),
            run.get("ledger"),
        ):
            assert (answer.status_code, answer.json()["type"]) == (410, "urn:replaybuf:problem:gone"), answer.text
            assert run.run in answer.json()["detail"] and "another name" in answer.json()["detail"]
        wait_until_gone(valkey, run)
    assert run.run not in {entry["run"] for entry in run.http.get("/v1/runs").json()["runs"]}
    assert run.run not in run.http.get("/readyz").json()["runs"]


def test_the_name_is_free_a_day_later(run: RunClient, valkey: redis.Redis) -> None:
    """The new run has nothing of the old one."""
    finished(run)
    run.http.delete(run.path)
    wait_until_gone(valkey, run)
    valkey.pexpire(f"rb:{{{run.run}}}:deleted", 1)
    eventually(lambda: run.put(batch={"groups_per_batch": 1}).status_code == 201, within_s=5.0)
    assert (run.state()["groups"]["stored"], run.state()["tickets"]["issued"]) == (0, 0)
    assert run.append(group("g0")) == [{"group_id": "g0", "status": "stored"}]
    assert run.get("evaluations").json() == {"evaluations": []}


def test_a_waiting_client_is_woken_when_the_run_is_deleted(run: RunClient) -> None:
    finished(run)
    answers = []
    waiter = threading.Thread(target=lambda: answers.append(run.get("policy", after=99, wait_ms=25_000).status_code))
    waiter.start()
    assert run.http.delete(run.path).status_code == 204
    waiter.join(20.0)
    assert not waiter.is_alive() and answers[0] in (200, 410)


def test_the_client_may_repeat_a_deletion(run: RunClient, service: ServeProcess) -> None:
    run.put(batch={"groups_per_batch": 1})
    with Client(service.url, run.run) as client:
        with pytest.raises(Conflict, match="only a finished run can be deleted"):
            client.delete_run()
        client.patch_run({"state": "finished"})
        client.delete_run()
        client.delete_run()


def test_a_deletion_that_a_crash_interrupted_is_finished_after_the_restart(
    own_service: ServeProcess, connect: Connect
) -> None:
    """The crash comes after the mark, before the first key is deleted."""
    run = connect(own_service.url, "main")
    finished(run, groups=600)
    with redis.Redis(unix_socket_path=own_service.valkey_socket) as valkey:
        own_service.kill()
        before = keys_of(valkey, run)
        valkey.sadd("rb:deleting", "main")
        valkey.set("rb:{main}:deleted", "deleting")
        assert len(before) > 600
        own_service.start()
        run = connect(own_service.url, "main")
        assert run.http.get(run.path).status_code == 410
        wait_until_gone(valkey, run)


def test_a_deletion_that_was_never_recorded_is_not_done(own_service: ServeProcess, connect: Connect) -> None:
    """The crash comes before the mark: the run is still there, and can be deleted."""
    run = connect(own_service.url, "main")
    finished(run)
    with redis.Redis(unix_socket_path=own_service.valkey_socket) as valkey:
        own_service.kill()
        valkey.sadd("rb:deleting", "main")
        own_service.start()
        run = connect(own_service.url, "main")
        assert run.state()["state"] == "finished"
        eventually(lambda: run.http.delete(run.path).status_code == 204, within_s=10.0)
        wait_until_gone(valkey, run)


def test_followers_drop_a_deleted_run_and_no_server_takes_its_lease_again(tmp_path: Path, connect: Connect) -> None:
    """A follower that leads after the deletion would leave a fencing token behind, and report lost data."""
    with start_valkey(tmp_path) as embedded, start_pair(tmp_path, embedded.url) as (first, second):
        run, follower = connect(first.url, "main"), connect(second.url, "main")
        finished(run)
        eventually(lambda: follower.state()["state"] == "finished", within_s=5.0)
        assert run.http.delete(run.path).status_code == 204
        eventually(lambda: follower.http.get(follower.path).status_code == 410, within_s=10.0)
        with redis.Redis(unix_socket_path=str(embedded.socket_path)) as valkey:
            wait_until_gone(valkey, run)
            first.kill()
            second.stop()
            assert keys_of(valkey, run) == {b"rb:{main}:deleted", b"rb:{main}:incarnation"}
        assert "emptied" not in second.log()
