"""`serve --workers N`: several processes behind one address, each of which takes every call."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from replaybuf import Client
from replaybuf.errors import ReplaybufError
from replaybuf.wire.group import Group
from tests.builders import group
from tests.conftest import ServeProcess
from tests.forked import run_forked
from tests.waiting import eventually

WORKERS = 3
WITHIN_S = 30.0


@contextlib.contextmanager
def started(folder: Path) -> Iterator[ServeProcess]:
    """Start three workers of one address; end them."""
    server = ServeProcess(folder / "data", "--workers", str(WORKERS), python=sys.executable)
    server.environment = {"PYTHONUNBUFFERED": "1"}  # an interpreter of its own: workers repeat its command line
    try:
        yield server.start()
    finally:
        server.end()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """Three workers that tests share; the last one of them ends them."""
    with started(tmp_path_factory.mktemp("workers")) as server:
        yield server


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[ServeProcess]:
    """Three workers of a process that the test kills."""
    with started(tmp_path) as server:
        yield server


def workers_of(server: ServeProcess) -> list[psutil.Process]:
    """List the worker processes."""
    children = psutil.Process(server.pid).children()
    return [child for child in children if "serve" in child.cmdline() and child.is_running()]


def own_addresses(server: ServeProcess) -> dict[str, int]:
    """Return the process id of each worker by its own address."""
    shared = int(server.url.rsplit(":", 1)[1])
    pids: dict[str, int] = {}
    for worker in workers_of(server):
        ports = {
            connection.laddr.port
            for connection in worker.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        pids |= {f"http://127.0.0.1:{port}": worker.pid for port in ports - {shared}}
    return pids


def leader_of(server: ServeProcess, run: str) -> str | None:
    """Return the address of the worker that leads a run."""
    leaders: dict[str, str | None] = httpx.get(f"{server.url}/readyz").json()["leaders"]
    return leaders.get(run)


def train(url: str, run: str, until: int) -> None:
    """Go on from the newest step: append a group and train a step of it, each call on a connection of its own."""
    with Client(url, run) as client:
        attached = client.attach(dp_world_size=1)
        if attached.published_version < attached.step:  # an earlier call was cut between ack and publish
            client.publish_policy(attached.step, attached.epoch)
    for step in range(attached.step, until):
        with Client(url, run) as producer:
            producer.append([group(group_id=f"g{step}", policy_version=step)])
        with Client(url, run) as client:
            assert isinstance(client.fetch_batch(step, attached.epoch, wait_ms=20_000), bytes)
        with Client(url, run) as client:
            client.ack(step, attached.epoch)
            client.publish_policy(step + 1, attached.epoch)


def append_once(url: str, run: str, new_group: Group) -> None:
    """Append a group on a connection of its own."""
    with Client(url, run) as client:
        client.append([new_group])


def test_every_worker_takes_every_call(served: ServeProcess) -> None:
    """A run is led by one; the others hand calls on, also those that wait, and calls of many at once."""
    with Client(served.url, "many") as client:
        client.put_run({"batch": {"tokens_per_batch": None, "groups_per_batch": 1, "seq_len": 64}})
    addresses = own_addresses(served)
    assert len(addresses) == WORKERS
    for turn, address in enumerate([*addresses, served.url]):
        train(address, "many", 2 * turn + 2)
    with Client(served.url, "many") as client, ThreadPoolExecutor(16) as threads:
        sent = [group(group_id=f"many{n}", policy_version=8) for n in range(64)]
        list(threads.map(functools.partial(append_once, served.url, "many"), sent))
        eventually(lambda: client.get_run().groups.stored, WITHIN_S, lambda stored: stored == 8 + 64)


def test_a_killed_worker_costs_nothing_and_starts_again(served: ServeProcess) -> None:
    with Client(served.url, "r") as client:
        client.put_run({"batch": {"tokens_per_batch": None, "groups_per_batch": 1, "seq_len": 64}})
    train(served.url, "r", 2)
    before = own_addresses(served)
    os.kill(before[str(eventually(lambda: leader_of(served, "r"), WITHIN_S))], signal.SIGKILL)

    def goes_on() -> bool:
        try:
            train(served.url, "r", 4)
        except (ReplaybufError, httpx.HTTPError):
            return False
        return True

    eventually(goes_on, WITHIN_S)
    eventually(lambda: len(own_addresses(served)), WITHIN_S, lambda count: count == WORKERS)
    with Client(served.url, "r") as client:
        eventually(
            lambda: (client.get_run().step, client.get_run().groups.stored), WITHIN_S, lambda seen: seen == (4, 4)
        )


def test_workers_end_with_the_process_that_started_them(killed: ServeProcess) -> None:
    """Also if it is killed: a worker that stayed would hold the port."""
    workers = workers_of(killed)
    killed.kill()
    assert not psutil.wait_procs(workers, timeout=WITHIN_S)[1]


def test_a_signal_ends_all_of_them_in_order(served: ServeProcess) -> None:
    workers = workers_of(served)
    assert served.stop() == 0
    assert not [worker for worker in workers if worker.is_running()]


def test_ports_beyond_the_last_one_are_refused() -> None:
    done = run_forked("replaybuf", ["serve", "--workers", "3", "--port", "65533"])
    assert done.returncode == 1
    assert "the last worker needs port 65536" in done.stderr
