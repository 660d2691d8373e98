"""What survives kill -9: of the service, of its Valkey, of both."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from replaybuf.wire.batch import read_batch
from tests.conftest import RunClient, ServeProcess, Starter, group, lasting
from tests.forked import run_forked
from tests.waiting import eventually

Connect = Callable[[str, str], RunClient]
RECOVERED_WITHIN_S = 15.0


def valkey_of(data_dir: Path) -> psutil.Process:
    """Find the embedded Valkey of a data folder."""
    for process in psutil.process_iter(["name", "cwd"]):
        if "valkey" in process.info["name"] and process.info["cwd"] == str(data_dir):
            return process
    raise AssertionError(f"no Valkey runs on {data_dir}")


def same_state(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Compare states but for what a restart may change: how long ago trainer and producers called."""
    return lasting(before) | {"waiting": None} == lasting(after) | {"waiting": None}


def test_a_killed_service_starts_again_with_the_same_state_and_bytes(
    own_service: ServeProcess, connect: Connect
) -> None:
    """kill -9 of the service: its Valkey is adopted, nothing is lost, batches are the same bytes."""
    run = connect(own_service.url, "r")
    run.put(batch={"groups_per_batch": 1}, strategy={"options": {"max_staleness": 3}})
    epoch = run.attach()
    tickets = run.post("tickets", producer="p", count=2).json()["tickets"]
    run.append(*(group(f"g{n}") for n in range(5)), group(None, ticket=tickets[0]["ticket"]))
    run.train(epoch, range(2))
    body = run.batch(2, epoch).content
    run.post("groups", **group("refused", version=9))
    before = run.state()
    own_service.kill()
    own_service.start()
    again = connect(own_service.url, "r")
    assert same_state(before, again.state())
    assert again.batch(2, epoch).content == body
    assert again.append(group("g0"))[0]["status"] == "duplicate"
    assert again.ack(2, epoch).status_code == 200


def test_partial_groups_are_counted_once_and_a_killed_service_still_knows_them(
    own_service: ServeProcess, connect: Connect
) -> None:
    """Two of three stored groups have fewer rollouts than `group_size`; the list of groups shows each size."""
    run = connect(own_service.url, "r")
    batch = {"groups_per_batch": 2, "tokens_per_batch": None, "seq_len": 64}
    assert run.put(batch=batch, group_size=4, min_group_size=2).status_code == 201
    run.append(*(group(f"g{n}", rollouts=n) for n in (1, 2, 3, 4)), group("g2", rollouts=2))

    def counted(of: RunClient) -> tuple[int, dict[str, int], str]:
        sizes = {entry["group_id"]: entry["group_size"] for entry in of.get("groups").json()["groups"]}
        lines = of.http.get("/metrics").text.splitlines()
        metric = next(line for line in lines if line.startswith("replaybuf_groups_partial_total{"))
        return of.state()["groups"]["partial"], sizes, metric

    expected = (2, {"g2": 2, "g3": 3, "g4": 4}, 'replaybuf_groups_partial_total{run="r"} 2.0')
    assert counted(run) == expected
    run.train(run.attach(), range(1))
    own_service.kill()
    own_service.start()
    assert counted(connect(own_service.url, "r")) == expected


def test_a_history_with_rewinds_is_rebuilt_as_it_was(own_service: ServeProcess, connect: Connect) -> None:
    """The fold of both streams after a restart equals the state before it."""
    run = connect(own_service.url, "r")
    run.put(batch={"groups_per_batch": 1}, strategy={"options": {"max_staleness": 2}})
    run.append(*(group(f"g{n}") for n in range(6)))
    epoch = run.attach()
    run.train(epoch, range(3))
    run.append(group("lost", version=3))
    epoch = run.attach(resume_step=1, on_resume="resample")
    run.train(epoch, range(1, 2))
    run.append(group("new", version=2))
    run.post("checkpoints", epoch=epoch, step=2)
    before = run.state()
    ledger = run.get("ledger").json()
    own_service.kill()
    own_service.start()
    again = connect(own_service.url, "r")
    assert same_state(before, again.state())
    assert again.get("ledger").json() == ledger


def test_a_service_stopped_with_sigterm_leaves_no_process_and_starts_clean(
    own_service: ServeProcess, connect: Connect
) -> None:
    """Exit code 0, and its Valkey is gone with it."""
    run = connect(own_service.url, "r")
    run.put(batch={"groups_per_batch": 1})
    run.append(group("a"))
    valkey = valkey_of(own_service.data_dir)
    assert own_service.stop() == 0
    assert not valkey.is_running()
    own_service.start()
    assert connect(own_service.url, "r").state()["groups"]["stored"] == 1


def test_a_killed_valkey_restarts_without_loss(own_service: ServeProcess, connect: Connect) -> None:
    """kill -9 of the embedded Valkey: what was answered stored is there when it is back."""
    run = connect(own_service.url, "r")
    run.put(batch={"groups_per_batch": 2})
    epoch = run.attach()
    for number in range(20):
        assert run.append(group(f"g{number}"))[0]["status"] == "stored"
    valkey = valkey_of(own_service.data_dir)
    valkey.send_signal(signal.SIGKILL)
    psutil.wait_procs([valkey], timeout=10)
    wait_until_stored(run, "after")
    assert run.state()["groups"]["stored"] == 21
    assert read_batch(run.batch(0, epoch).content).meta.group_ids == ["g0", "g1"]


def wait_until_stored(run: RunClient, name: str) -> None:
    """Append until the answer is not 503."""

    def stored() -> bool:
        response = run.http.post(f"{run.path}/groups", json=group(name))
        if response.status_code == 200:
            return True
        assert response.status_code == 503, response.text
        assert "retry-after" in response.headers
        return False

    eventually(stored, RECOVERED_WITHIN_S)


def test_two_services_on_one_data_folder_are_refused(own_service: ServeProcess) -> None:
    """The second one says who holds the folder and exits with 1."""
    second = run_forked("replaybuf", ["serve", "--port", "0", "--data-dir", str(own_service.data_dir)])
    assert second.returncode == 1
    assert f"process {own_service.pid}" in second.stderr


def test_two_services_with_one_redis_do_not_share_a_data_folder(
    own_service: ServeProcess, tmp_path: Path, started: Starter
) -> None:
    """Each would write over the acknowledged ends of the other, and a loss could go unnoticed."""
    redis_url, folder = f"unix://{own_service.valkey_socket}", tmp_path / "shared"
    folder.mkdir()
    first = started(ServeProcess(folder, "--redis-url", redis_url))
    options = ["--redis-url", redis_url, "--data-dir", str(folder)]
    second = run_forked("replaybuf", ["serve", "--port", "0", *options])
    assert second.returncode == 1
    assert f"process {first.pid}" in second.stderr and "--data-dir" in second.stderr
