"""Many threads that use a service, or are trainers, for the first time at the same moment.

The first use of a msgspec struct by two threads ends a process with a segmentation fault; `prepared` guards each.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import RunClient, ServeProcess, group

THREADS = 8
TIMEOUT_S = 200.0
TRAINERS = """
import sys, threading
from pathlib import Path

from replaybuf import Client
from replaybuf.wire.config import Cost
from replaybuf_trainer.feeds.service import ServiceFeed
from replaybuf_trainer.options import TrainOptions

url, threads = sys.argv[1], int(sys.argv[2])
sys.setswitchinterval(1e-6)
start = threading.Barrier(threads)
trained = []
def train(number):
    with Client(url, f"trainer-{number}") as client:
        feed = ServiceFeed(TrainOptions(url=url, run=f"trainer-{number}", model=Path()), client)
        start.wait(60)
        facts = feed.facts()
        feed.attach(0, Cost(linear=1.0, quadratic=0.0))
        with feed.batches() as batches:
            batch = next(batches)
            feed.ack()
            feed.publish(1, None)
            feed.confirm()
            feed.save(1)
            trained.append((number, facts.group_size, batch.meta.step))
        feed.settle(1)
workers = [threading.Thread(target=train, args=(number,)) for number in range(threads)]
for worker in workers: worker.start()
for worker in workers: worker.join()
assert sorted(trained) == [(number, 2, 0) for number in range(threads)], trained
"""
"""Trains a step of each run, in one process with a thread per trainer."""


@pytest.fixture
def eager(tmp_path: Path) -> Iterator[ServeProcess]:
    """A service whose threads take turns as often as Python can."""
    server = ServeProcess(tmp_path / "data")
    server.module = "tests.eager_threads"
    yield server.start()
    server.end()


@contextlib.contextmanager
def created(url: str, name: str) -> Iterator[RunClient]:
    client = RunClient(url, name)
    with client.http:
        response = client.put(group_size=2, batch={"tokens_per_batch": 64, "groups_per_batch": 2})
        assert response.status_code == 201, response.text
        yield client


def test_a_service_answers_the_first_calls_of_many_threads(eager: ServeProcess) -> None:
    """Each with a run of its own; all of them make the same call at the same moment."""
    together = threading.Barrier(THREADS)

    def use(number: int) -> str:
        with created(eager.url, f"first-{number}") as client:
            return calls(client)

    def calls(client: RunClient) -> str:
        together.wait(TIMEOUT_S)
        epoch = client.attach()
        together.wait(TIMEOUT_S)
        assert client.post("tickets", producer="p", count=2).status_code == 200
        together.wait(TIMEOUT_S)
        results = client.append(*(group(f"g{place}", tokens=5) for place in range(4)))
        together.wait(TIMEOUT_S)
        assert client.batch(0, epoch).status_code == 200
        together.wait(TIMEOUT_S)
        assert client.get("groups/g0").status_code == 200
        together.wait(TIMEOUT_S)
        assert client.get("batches/0/record").status_code == 200
        together.wait(TIMEOUT_S)
        columns = {"columns": {"ref_logprobs": [[-0.5] * 3] * 2}}
        assert client.http.put(f"{client.path}/groups/g3/columns", json=columns).status_code == 200
        return str([result["status"] for result in results])

    with ThreadPoolExecutor(THREADS) as threads:
        assert set(threads.map(use, range(THREADS))) == {str(["stored"] * 4)}
    assert eager.stop() == 0


def test_many_trainers_make_their_first_calls_in_one_process(service: ServeProcess) -> None:
    for number in range(THREADS):
        with created(service.url, f"trainer-{number}") as client:
            client.append(*(group(f"g{place}", tokens=5) for place in range(2)))
    done = subprocess.run(
        [sys.executable, "-c", TRAINERS, service.url, str(THREADS)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
