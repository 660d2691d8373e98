"""A real service whose connections to a real Valkey break in every way: it says so, waits, and goes on by itself."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from replaybuf.store import EmbeddedServer
from replaybuf.wire.batch import read_batch
from tests.conftest import RunClient, ServeProcess, group
from tests.faults import FaultyProxy
from tests.impatient import COMMAND_TIMEOUT_S
from tests.waiting import eventually, patience

ANSWERED_WITHIN_S = 2 * COMMAND_TIMEOUT_S + 1
"""A call waits for a lock while another one's command runs into the timeout, then for its own."""
RECOVERED_WITHIN_S = 15.0
BUSY_SHARE = 0.4
"""Share of a core that a service may use while it waits for Redis; it is near 0.03 on an idle machine."""
GROWTH_BYTES = 32 << 20
_names = itertools.count()


class Impatient(ServeProcess):
    """A server that waits 1 s for Redis instead of 10."""

    module = "tests.impatient"


@dataclasses.dataclass
class World:
    """A service, the proxy to its Redis, and the Valkey behind it."""

    server: ServeProcess
    proxy: FaultyProxy
    valkey: psutil.Process

    def trouble(self, fault: str) -> None:
        if fault == "stopped":
            self.valkey.send_signal(signal.SIGSTOP)
        else:
            getattr(self.proxy, fault)()

    def wait_until_ready(self) -> None:
        eventually(lambda: httpx.get(f"{self.server.url}/readyz").status_code == 200, RECOVERED_WITHIN_S)

    def heal(self) -> None:
        self.valkey.send_signal(signal.SIGCONT)
        self.proxy.heal()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One world for the module."""
    folder = tmp_path_factory.mktemp("faults")
    embedded = EmbeddedServer(folder / "valkey")
    asyncio.run(embedded.start())
    (valkey,) = (p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(embedded.data_dir))
    with FaultyProxy(embedded.socket_path).running() as proxy:
        server = Impatient(folder / "data", "--redis-url", proxy.url)
        try:
            yield World(server.start(), proxy, valkey)
        finally:
            server.end()
    asyncio.run(embedded.stop())


@pytest.fixture
def world(shared: World) -> Iterator[World]:
    """The world, healed after the test and ready for the next one."""
    yield shared
    shared.heal()
    shared.wait_until_ready()


@pytest.fixture
def run(world: World) -> Iterator[RunClient]:
    """A run of the test's own, with room for many groups, attached, its first batch served."""
    client = RunClient(world.server.url, f"faults-{next(_names)}")
    batch, strategy = {"groups_per_batch": 2, "tokens_per_batch": None}, {"options": {"max_staleness": 9}}
    until_answered(lambda: client.put(batch=batch, strategy=strategy))
    yield client
    client.http.close()


def until_answered(call: Callable[[], httpx.Response]) -> httpx.Response:
    """Repeat a call as a client does until the answer is not 503; each try is bounded."""

    def answered(answer: httpx.Response) -> bool:
        if answer.status_code == 503:
            assert int(answer.headers["retry-after"]) >= 1
        return answer.status_code != 503

    return eventually(call, RECOVERED_WITHIN_S, answered)


def ledger_of(run: RunClient) -> list[dict[str, Any]]:
    """Read the whole ledger."""
    records: list[dict[str, Any]] = run.get("ledger", limit=1000).json()["records"]
    return records


def calls_of(run: RunClient, epoch: int) -> list[Callable[[], httpx.Response]]:
    """List a call of each kind, as producers and trainers make them."""
    return [
        lambda: run.post("groups", **group("during")),
        lambda: run.post("tickets", producer="p", count=1),
        lambda: run.ack(0, epoch),
        lambda: run.post("groups", **group("meanwhile")),
        lambda: run.post("attach", dp_world_size=1, resume_step=0),
        lambda: run.batch(1, epoch),
    ]


@pytest.mark.parametrize("fault", ["refuse", "swallow", "lose_replies", "stopped"])
def test_calls_end_in_time_while_redis_is_unavailable_and_nothing_is_lost_or_doubled(
    world: World, run: RunClient, fault: str
) -> None:
    """503 with Retry-After, `/readyz` names what is waited for, no busy loop, the same bytes afterwards."""
    epoch = until_answered(lambda: run.post("attach", dp_world_size=1)).json()["epoch"]
    stored = until_answered(lambda: run.post("groups", groups=[group(f"g{n}") for n in range(4)]))
    assert {result["status"] for result in stored.json()["results"]} <= {"stored", "duplicate"}
    body = until_answered(lambda: run.batch(0, epoch)).content
    process = psutil.Process(world.server.pid)
    used_bytes, used_s, started_s = process.memory_info().rss, sum(process.cpu_times()[:2]), time.monotonic()
    world.trouble(fault)
    with ThreadPoolExecutor(6) as threads:
        asked_s = time.monotonic()
        answers = [future.result() for future in [threads.submit(call) for call in calls_of(run, epoch)]]
        assert time.monotonic() - asked_s < ANSWERED_WITHIN_S * patience()
    assert [answer.status_code for answer in answers] == [503] * len(answers), [answer.text for answer in answers]
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)
    eventually(lambda: httpx.get(f"{world.server.url}/readyz").status_code == 503, ANSWERED_WITHIN_S)
    until_s = time.monotonic() + COMMAND_TIMEOUT_S
    while time.monotonic() < until_s:  # it stays so while the service asks again and again
        ready = httpx.get(f"{world.server.url}/readyz")
        assert ready.status_code == 503 and "Redis at redis://127.0.0.1" in ready.json()["waiting_for"]
        assert httpx.get(f"{world.server.url}/healthz").status_code == 200
        assert run.post("groups", **group("during")).status_code == 503
    share = (sum(process.cpu_times()[:2]) - used_s) / (time.monotonic() - started_s)
    assert share < BUSY_SHARE
    assert process.memory_info().rss - used_bytes < GROWTH_BYTES

    world.heal()
    for name in ("during", "meanwhile", "g0"):
        answer = until_answered(lambda name=name: run.post("groups", **group(name)))  # type: ignore[misc]
        assert answer.json()["results"][0]["status"] in ("stored", "duplicate")
    world.wait_until_ready()
    epoch = until_answered(lambda: run.post("attach", dp_world_size=1)).json()["epoch"]
    assert until_answered(lambda: run.batch(0, epoch)).content == body
    assert until_answered(lambda: run.ack(0, epoch)).status_code == 200
    assert sorted(entry["group_id"] for entry in run.get("groups").json()["groups"]) == sorted(
        ["g0", "g1", "g2", "g3", "during", "meanwhile"]
    )
    assert [record["entry"] for record in ledger_of(run)] == list(range(1, len(ledger_of(run)) + 1))
    assert sum(record["type"] == "ACK" for record in ledger_of(run)) == 1


@pytest.mark.parametrize("fate", ["unsent", "lost", "cut"])
@pytest.mark.parametrize("mark", [b"rb_publish", b"rb_append", b"rb_tickets", b"$3\r\nGET\r\n", b"rb_hold"])
def test_a_broken_reply_to_any_command_only_delays(world: World, run: RunClient, mark: bytes, fate: str) -> None:
    """Each call is repeated until it is answered: every group once, every index once, dense ledger, whole batches."""
    tickets = [until_answered(lambda: run.post("tickets", producer="p", count=1)).json()["tickets"][0]]
    world.proxy.break_once(mark, fate)
    tickets += until_answered(lambda: run.post("tickets", producer="p", count=1)).json()["tickets"]
    if fate == "unsent":  # what was not written did not happen: no index is skipped
        assert [ticket["prompt_index"] for ticket in tickets] == [0, 1]
    for ticket in tickets:
        answer = until_answered(lambda t=ticket: run.post("groups", **group(None, ticket=t["ticket"])))  # type: ignore[misc]
        assert answer.json()["results"][0]["status"] in ("stored", "duplicate")
    more = [group(f"g{n}", tokens=6 + n) for n in range(2)]
    assert until_answered(lambda: run.post("groups", groups=more)).status_code == 200
    epoch = until_answered(lambda: run.post("attach", dp_world_size=1)).json()["epoch"]
    held: list[str] = []
    for step in range(2):
        response = until_answered(lambda step=step: run.batch(step, epoch))  # type: ignore[misc]
        assert response.status_code == 200, response.text
        batch = read_batch(response.content)
        held += batch.meta.group_ids
        assert until_answered(lambda step=step: run.ack(step, epoch)).status_code == 200  # type: ignore[misc]
    assert world.proxy.happened(30)
    world.wait_until_ready()  # it may have happened to a command of the background
    assert sorted(held) == sorted([*(f"p{ticket['prompt_index']}" for ticket in tickets), "g0", "g1"])
    state = run.state()
    assert (state["groups"]["stored"], state["groups"]["dead_lettered"], state["tickets"]["failed"]) == (4, 0, 0)
    assert [record["entry"] for record in ledger_of(run)] == list(range(1, len(ledger_of(run)) + 1))
    assert [record["step"] for record in ledger_of(run) if record["type"] in ("BATCH", "ACK")] == [0, 0, 1, 1]
    for name, tokens in (("g0", 6), ("g1", 7)):
        assert len(run.get(f"groups/{name}").json()["rollouts"][0]["completion_ids"]) == tokens - 2


def test_the_service_reconnects_after_repeated_disconnects(world: World, run: RunClient) -> None:
    """Twenty cuts under load: each group is stored once, and no connection is left behind."""
    for number in range(20):
        world.proxy.drop()
        answer = until_answered(lambda number=number: run.post("groups", **group(f"g{number}")))  # type: ignore[misc]
        assert answer.json()["results"][0]["status"] in ("stored", "duplicate")
    assert run.state()["groups"]["stored"] == 20
    process = psutil.Process(world.server.pid)
    to_redis = [c for c in process.net_connections("tcp") if c.raddr and c.raddr.port == world.proxy.port]
    assert len(to_redis) < 20
