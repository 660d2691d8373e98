"""Four real servers on one Redis share their runs, while a producer and a trainer of one run go on."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import redis

from replaybuf import Client
from replaybuf.errors import ServiceUnavailable
from replaybuf.kernel.decide.rendezvous import wanted_leader
from replaybuf.store import EmbeddedServer, keys
from tests.conftest import ServeProcess
from tests.ticket_producer import numbered_group
from tests.waiting import eventually

RUNS = [f"shared-{number}" for number in range(16)]
TRAINED = RUNS[0]
WITHIN_S = 60.0
RETRY_S = 60.0
PAUSE_S = 0.2
"""Time of a step: servers that are busy with this run alone would show little."""
CONFIG = {"batch": {"groups_per_batch": 2, "tokens_per_batch": None, "seq_len": 64}}


class SoonSteady(ServeProcess):
    """A server that hands runs over soon and often."""

    module = "tests.soon_steady"


class Fleet:
    """Servers on one Valkey, and what each should lead."""

    def __init__(self, folder: Path, valkey: EmbeddedServer, stack: ExitStack) -> None:
        self._folder, self._valkey, self._stack = folder, valkey, stack
        self.servers: list[ServeProcess] = []

    def add(self) -> None:
        """Start a server."""
        folder = self._folder / f"server{len(self.servers)}"
        server = SoonSteady(folder, "--redis-url", self._valkey.url)
        self._stack.callback(server.end)
        self.servers.append(server.start())

    def kill(self, url: str) -> str:
        """Kill the server at an address; return it."""
        server = next(candidate for candidate in self.servers if candidate.url == url)
        server.kill()
        self.servers.remove(server)
        return url

    def leaders(self) -> dict[str, str | None]:
        """Return who leads each run, as the last server says."""
        leaders: dict[str, str | None] = httpx.get(f"{self.servers[-1].url}/readyz", timeout=WITHIN_S).json()["leaders"]
        return leaders

    def shown_leaders(self) -> dict[str, str | None]:
        """Return who leads each run, as the console of the first server shows."""
        rows = httpx.get(f"{self.servers[0].url}/v1/overview", timeout=WITHIN_S).json()["runs"]
        return {row["run"]: row["leader"] for row in rows}

    def wanted(self) -> dict[str, str]:
        """Return who should lead each run; nobody = not just the servers that live are announced."""
        with redis.Redis(unix_socket_path=str(self._valkey.socket_path)) as client:
            holders = frozenset(holder.decode() for holder in client.hkeys(keys.SERVERS))
        if {holder.partition("@")[2] for holder in holders} != {server.url for server in self.servers}:
            return {}  # a killed one is announced for a while, a starved one is not
        return {run: str(wanted_leader(run, holders)).partition("@")[2] for run in RUNS}

    def settle(self) -> Counter[str | None]:
        """Wait until each run is led by the server that should lead it; return how many each leads."""
        leaders = eventually(self.leaders, WITHIN_S, lambda seen: seen == self.wanted())
        return Counter(leaders.values())


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    valkey = EmbeddedServer(tmp_path / "valkey")
    asyncio.run(valkey.start())
    with ExitStack() as stack:
        stack.callback(lambda: asyncio.run(valkey.stop()))
        yield Fleet(tmp_path, valkey, stack)


class Work:
    """A producer and a trainer of one run, which know some servers. `stored`: ids of groups; `acked`: trained steps."""

    def __init__(self, servers: list[ServeProcess]) -> None:
        self._urls = ",".join(server.url for server in servers)
        self.stopping = threading.Event()
        self.stored: set[str] = set()
        self.acked: list[int] = []
        self.tasks: list[Future[None]] = []

    def check(self) -> None:
        """Raise what ended producer or trainer."""
        for task in self.tasks:
            if task.done():
                task.result()

    def produce(self) -> None:
        """Append the group of each ticket until told to stop."""
        with Client(self._urls, TRAINED, retry_for_s=RETRY_S) as client:
            while not self.stopping.is_set():
                try:
                    taken = client.take_tickets("producer", 2, wait_ms=200)
                except ServiceUnavailable:  # its server was killed: the tickets may be issued, and expire
                    continue
                groups = [numbered_group(ticket, taken.published_version) for ticket in taken.tickets]
                for result in client.append(groups) if groups else ():
                    if result.status in ("stored", "duplicate"):
                        self.stored.add(str(result.group_id))

    def train(self) -> None:
        """Train step after step until told to stop."""
        with Client(self._urls, TRAINED, retry_for_s=RETRY_S) as client:
            epoch, step = client.attach(dp_world_size=1).epoch, 0
            while not self.stopping.is_set():
                self.stopping.wait(PAUSE_S)
                if isinstance(client.fetch_batch(step, epoch, wait_ms=500), bytes):
                    client.ack(step, epoch)
                    self.acked.append(step)
                    step += 1
                    client.publish_policy(step, epoch)


def steps_follow(work: Work) -> None:
    """Wait until two more steps are trained."""
    before = len(work.acked)
    eventually(lambda: len(work.acked) >= before + 2 or any(task.done() for task in work.tasks), WITHIN_S)
    work.check()


def check_history(fleet: Fleet, work: Work) -> None:
    """Check that no group was lost, and that no group and no step was trained twice."""
    with Client(fleet.servers[-1].url, TRAINED, retry_for_s=RETRY_S) as client:
        whole = len(work.acked), len(work.stored)  # a follower may be some milliseconds behind
        eventually(client.get_run, WITHIN_S, lambda seen: (seen.step, seen.groups.stored) == whole)
        groups = [group.prompt_index for step in work.acked for group in client.get_record(step).groups]
    assert work.acked == list(range(len(work.acked)))
    assert len(groups) == len(set(groups)) == 2 * len(work.acked)


def test_servers_share_their_runs_as_they_come_and_go(fleet: Fleet) -> None:
    """Each leads its share; one that joins gets its own, and the runs of a killed one are led again."""
    for _ in range(3):
        fleet.add()
    for number, run in enumerate(RUNS):
        with Client(fleet.servers[number % 3].url, run) as client:
            client.put_run(CONFIG)
    work = Work(fleet.servers)
    with ThreadPoolExecutor(2) as threads:
        work.tasks = [threads.submit(work.produce), threads.submit(work.train)]
        try:
            fleet.settle()
            steps_follow(work)
            fleet.add()
            while not fleet.settle()[fleet.servers[-1].url]:
                fleet.add()  # by chance it is the first choice of no run
            eventually(lambda: fleet.shown_leaders() == fleet.leaders(), WITHIN_S)
            steps_follow(work)
            killed = fleet.kill(str(fleet.leaders()[TRAINED]))
            steps_follow(work)
            assert killed not in fleet.settle()
            steps_follow(work)
        finally:
            work.stopping.set()
    work.check()
    check_history(fleet, work)
