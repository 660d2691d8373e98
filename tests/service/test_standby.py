"""Two servers on one Redis: one leads, the other follows, answers reads, and takes over."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import redis

from replaybuf.service.run.lease_timer import LEASE_S
from replaybuf.store import EmbeddedServer
from tests.conftest import LastingServe, RunClient, ServeProcess, group, lasting
from tests.valkeys import Valkey
from tests.waiting import eventually

Connect = Callable[[str, str], RunClient]
SLACK_S = 30.0
"""How much later than the lease a takeover may be seen on a frozen machine; measured it is below 0.5 s."""


@contextlib.contextmanager
def start_valkey(folder: Path) -> Iterator[EmbeddedServer]:
    """Run a Valkey that no server owns."""
    embedded = EmbeddedServer(folder / "valkey")
    asyncio.run(embedded.start())
    try:
        yield embedded
    finally:
        asyncio.run(embedded.stop())


@contextlib.contextmanager
def start_pair(
    folder: Path, url: str, kind: type[ServeProcess] = ServeProcess
) -> Iterator[tuple[ServeProcess, ServeProcess]]:
    """Run two servers on one Redis."""
    servers = [kind(folder / name, "--redis-url", url, "--no-balance").start() for name in ("first", "second")]
    try:
        yield servers[0], servers[1]
    finally:
        for server in servers:
            server.end()


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A private Valkey of the test."""
    with start_valkey(tmp_path) as embedded:
        yield embedded


@pytest.fixture
def pair(valkey: EmbeddedServer, tmp_path: Path) -> Iterator[tuple[ServeProcess, ServeProcess]]:
    """Two private servers of the test, to be stopped and killed."""
    with start_pair(tmp_path, valkey.url) as servers:
        yield servers


@pytest.fixture(scope="module")
def shared_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServeProcess, ServeProcess]]:
    """Two servers for tests that stop neither; each test creates its own run on the first, its leader."""
    folder = tmp_path_factory.mktemp("pair")
    with start_valkey(folder) as embedded, start_pair(folder, embedded.url, LastingServe) as servers:
        yield servers


@contextlib.contextmanager
def frozen(server: ServeProcess) -> Iterator[None]:
    """Let a server stand still, as a suspended machine does."""
    server.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.signal(signal.SIGCONT)


def running(first: RunClient) -> int:
    """Create a run that looks one step ahead, train two steps of it; return the epoch."""
    first.put(batch={"groups_per_batch": 1}, strategy={"options": {"max_staleness": 3}})
    first.append(*(group(f"g{n}") for n in range(6)))
    epoch = first.attach()
    first.train(epoch, range(2))
    return epoch


def followed(first: RunClient, second: RunClient) -> None:
    """Wait until the follower knows what the leader knows."""
    eventually(lambda: lasting(second.state()) == lasting(first.state()), within_s=SLACK_S)


def test_a_follower_answers_reads_as_the_leader_does(
    shared_pair: tuple[ServeProcess, ServeProcess], connect: Connect
) -> None:
    """State, groups, records, ledger, policy, and bodies of assembled batches, also after a rewind to other ranks."""
    first, second = (connect(server.url, "reads") for server in shared_pair)
    epoch = running(first)
    first.batch(2, epoch)
    followed(first, second)
    for call in ("groups", "groups/g0", "batches/1/record", "ledger", "policy", "dead-letters"):
        assert second.get(call).json() == first.get(call).json()
    assert second.batch(2, epoch).content == first.batch(2, epoch).content
    epoch = first.attach(resume_step=1, dp_world_size=2)
    bodies = [first.batch(1, epoch, dp_rank=rank).content for rank in range(2)]
    followed(first, second)
    assert [second.batch(1, epoch, dp_rank=rank).content for rank in range(2)] == bodies


def test_a_follower_hands_what_must_be_decided_to_the_leader(
    shared_pair: tuple[ServeProcess, ServeProcess], connect: Connect
) -> None:
    """Whatever decides, a batch that is not assembled yet among it: the answer is the leader's, errors too."""
    first, second = (connect(server.url, "writes") for server in shared_pair)
    epoch = running(first)
    followed(first, second)
    assert second.append(group("new"), group("g0")) == [
        {"group_id": "new", "status": "stored"},
        {"group_id": "g0", "status": "duplicate"},
    ]
    assert second.post("tickets", producer="p", count=1).status_code == 200
    second.train(epoch, range(2, 4))
    assert second.post("checkpoints", epoch=epoch, step=3).status_code == 200
    assert second.http.patch(second.path, json={"state": "paused"}).json()["state"] == "paused"
    assert second.post("attach", resume_step=3).json()["epoch"] == epoch + 1
    assert second.batch(4, epoch + 2).status_code == second.batch(4, epoch).status_code == 409
    refused = second.post("groups", **(group("bad") | {"rollouts": []}))
    assert refused.json()["results"] == first.post("groups", **(group("bad") | {"rollouts": []})).json()["results"]
    assert (first.state()["step"], first.state()["groups"]["stored"]) == (3, 7)
    assert httpx.get(f"{shared_pair[1].url}/readyz").json()["leaders"]["writes"] == shared_pair[0].url


def test_a_call_that_was_handed_on_once_is_answered_with_the_address_of_the_leader(
    shared_pair: tuple[ServeProcess, ServeProcess], connect: Connect
) -> None:
    """Two servers that take each other for the leader do not hand a call to and fro."""
    first, second = (connect(server.url, "once") for server in shared_pair)
    epoch = running(first)
    followed(first, second)
    again = {"x-replaybuf-forwarded": "1"}
    answer = second.http.post(f"{second.path}/checkpoints", json={"epoch": epoch, "step": 1}, headers=again)
    assert (answer.status_code, answer.json()["type"]) == (503, "urn:replaybuf:problem:not-leader")
    assert answer.json()["value"] == shared_pair[0].url
    assert "retry-after" in answer.headers


def test_a_follower_refuses_a_body_that_no_call_takes(
    shared_pair: tuple[ServeProcess, ServeProcess], connect: Connect
) -> None:
    """At once, as the leader does: while a body is handed on, nobody reads that the leader has refused it."""
    first, second = (connect(server.url, "oversized") for server in shared_pair)
    running(first)
    followed(first, second)
    for run in (first, second):
        url = httpx.URL(run.http.base_url)
        with socket.create_connection((url.host, url.port), 30) as connection:
            head = f"POST {run.path}/groups HTTP/1.1\r\nhost: {url.host}\r\ncontent-type: application/json\r\n"
            connection.sendall(f"{head}content-length: {4 << 30}\r\n\r\n".encode())
            assert connection.recv(1 << 16).split(b" ")[1] == b"413"


def test_a_follower_compares_configurations(shared_pair: tuple[ServeProcess, ServeProcess], connect: Connect) -> None:
    """The same body again is 200 from any server; another one is 409 and names the fields."""
    first, second = (connect(server.url, "config") for server in shared_pair)
    assert first.put(batch={"groups_per_batch": 1}).status_code == 201
    assert second.put(batch={"groups_per_batch": 1}).status_code == 200
    answer = second.put(batch={"groups_per_batch": 2}, seed=4)
    assert answer.status_code == 409
    assert answer.json()["value"] == ["batch.groups_per_batch", "seed"]


def test_a_follower_takes_over_from_a_killed_leader(pair: tuple[ServeProcess, ServeProcess], connect: Connect) -> None:
    """It has the same state and bytes, the trainer's epoch and the tickets, when the lease has ended."""
    first, second = (connect(server.url, "r") for server in pair)
    first.put(batch={"groups_per_batch": 1}, strategy={"options": {"max_staleness": 3}})
    ticket = first.post("tickets", producer="p", count=1).json()["tickets"][0]["ticket"]
    epoch = running(first)
    body = first.batch(2, epoch).content
    before = first.state()
    pair[0].kill()
    assert second.batch(2, epoch).content == body  # also while nobody leads
    eventually(lambda: second.ack(2, epoch).status_code == 200, within_s=LEASE_S + SLACK_S)
    assert second.state()["tickets"] == before["tickets"]
    assert second.append(group(None, ticket=ticket))[0]["status"] == "stored"
    assert second.append(group("g0"))[0]["status"] == "duplicate"


def test_a_leader_that_stops_releases_its_leases(pair: tuple[ServeProcess, ServeProcess], connect: Connect) -> None:
    """SIGTERM gives the lease back: the next asking of the follower gets it."""
    first, second = (connect(server.url, "r") for server in pair)
    running(first)
    assert pair[0].stop() == 0
    eventually(lambda: second.post("tickets", producer="p", count=1).status_code == 200, within_s=LEASE_S + SLACK_S)


def test_a_leader_that_was_stopped_for_longer_than_its_lease_cannot_write(
    pair: tuple[ServeProcess, ServeProcess], connect: Connect
) -> None:
    """What waited in its socket is refused when it goes on, or decided by the new leader, whom it follows then."""
    first, second = (connect(server.url, "r") for server in pair)
    epoch = running(first)
    pair[0].signal(signal.SIGSTOP)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        late = [
            threads.submit(first.post, "groups", **group("late")),
            threads.submit(connect(pair[0].url, "r").ack, 2, epoch),
            threads.submit(connect(pair[0].url, "r").batch, 2, epoch),
        ]
        eventually(lambda: second.batch(2, epoch).status_code == 200, within_s=LEASE_S + SLACK_S)
        second.train(epoch, range(2, 4))
        pair[0].signal(signal.SIGCONT)
        answers = [answer.result() for answer in late]
    assert {answer.status_code for answer in answers} <= {200, 503}, [answer.text for answer in answers]
    leaders = f"{pair[0].url}/readyz"
    eventually(lambda: httpx.get(leaders).json()["leaders"].get("r") == pair[1].url, within_s=SLACK_S)
    assert second.state()["groups"]["stored"] == 6 + (answers[0].status_code == 200)
    followed(second, first)


def test_an_emptied_redis_is_data_lost_until_its_data_is_back(
    pair: tuple[ServeProcess, ServeProcess], valkey: EmbeddedServer, connect: Connect
) -> None:
    """Nothing is written to it, every call says so, readiness too; with the data back both go on."""
    first, second = (connect(server.url, "r") for server in pair)
    epoch = running(first)
    first.batch(2, epoch)
    followed(first, second)
    before = first.state()
    with redis.Redis(unix_socket_path=str(valkey.socket_path)) as client:
        client.swapdb(0, 1)  # the data lies aside
        answer = first.post("groups", **group("new"))
        assert (answer.status_code, answer.json()["type"]) == (500, "urn:replaybuf:problem:data-lost")
        for server, run in zip(pair, (first, second), strict=True):
            eventually(lambda url=server.url: httpx.get(f"{url}/readyz").status_code == 503, within_s=SLACK_S)  # type: ignore[misc]
            assert "was emptied" in httpx.get(f"{server.url}/readyz").json()["waiting_for"]
            for refused in (run.ack(2, epoch), run.put(batch={"groups_per_batch": 1}), run.http.get(run.path)):
                assert (refused.status_code, refused.json()["name"]) == (500, "redis")
        left = {key.decode() for key in client.scan_iter()}
        assert not any(":idx" in key or ":led" in key or ":gid" in key for key in left), left
        client.flushdb()
        client.swapdb(0, 1)
    eventually(lambda: 200 in {run.ack(2, epoch).status_code for run in (first, second)}, within_s=SLACK_S)
    for run in (first, second):
        eventually(lambda run=run: run.http.get(run.path).status_code == 200, within_s=SLACK_S)  # type: ignore[misc]
        eventually(lambda run=run: run.state()["step"] == 3, within_s=SLACK_S)  # type: ignore[misc]
        assert run.state()["groups"] == before["groups"]


def test_an_empty_replacement_of_redis_is_data_lost(tmp_path: Path, connect: Connect) -> None:
    """Another Redis on the same address, without data and functions: nothing is written, the loss is reported."""
    with Valkey(tmp_path / "valkey") as redis_server:
        server = ServeProcess(tmp_path / "server", "--redis-url", redis_server.url).start()
        try:
            run = connect(server.url, "r")
            epoch = running(run)
            redis_server.kill()
            shutil.rmtree(redis_server.folder)
            redis_server.start()
            eventually(lambda: run.post("groups", **group("new")).status_code == 500, within_s=SLACK_S)
            for refused in (run.ack(2, epoch), run.post("groups", **group("new")), run.http.get(run.path)):
                assert (refused.status_code, refused.json()["name"]) == (500, "redis"), refused.text
            assert httpx.get(f"{server.url}/readyz").status_code == 503
            assert httpx.get(f"{server.url}/healthz").status_code == 200
            assert not redis_server.client.keys("rb:*led*") and not redis_server.client.keys("rb:*idx*")
        finally:
            server.end()


def test_a_cursor_goes_on_at_the_next_leader(pair: tuple[ServeProcess, ServeProcess], connect: Connect) -> None:
    """What was done before kill -9 is not repeated, what was not done comes again, and bytes are kept for it."""
    first, second = (connect(server.url, "r") for server in pair)
    epoch = running(first)
    page = first.get("cursors/c", limit=2).json()
    assert first.post("cursors/c", position=page["position"]).status_code == 200
    unfinished = first.get("cursors/c", limit=2).json()
    assert second.get("cursors/c", limit=2).json() == unfinished  # the leader's answer
    pair[0].kill()
    eventually(lambda: second.get("cursors/c").status_code == 200, within_s=LEASE_S + SLACK_S)
    assert second.get("cursors/c", limit=2).json() == unfinished
    second.train(epoch, range(2, 4))
    assert second.post("checkpoints", epoch=epoch, step=4).status_code == 200
    states = [second.get(f"groups/g{n}").json()["state"] for n in range(4)]
    assert states == ["retired", "retired", "in_batches", "in_batches"]
    groups = second.get("cursors/c", limit=9).json()["groups"]
    assert [entry["group_id"] for entry in groups] == ["g2", "g3", "g4", "g5"]


def test_a_leader_that_comes_back_reads_its_cursors_again(
    pair: tuple[ServeProcess, ServeProcess], connect: Connect
) -> None:
    """It had an older position in memory while another server led the run."""
    first, second = (connect(server.url, "r") for server in pair)
    running(first)
    page = first.get("cursors/c", limit=1).json()
    assert first.post("cursors/c", position=page["position"]).status_code == 200
    with frozen(pair[0]):
        eventually(lambda: second.get("cursors/c").status_code == 200, within_s=LEASE_S + SLACK_S)
        page = second.get("cursors/c", limit=3).json()
        assert second.post("cursors/c", position=page["position"]).status_code == 200
        second.get("cursors/new")
    assert pair[1].stop() == 0
    eventually(lambda: first.get("cursors/c").status_code == 200, within_s=LEASE_S + SLACK_S)
    assert [entry["group_id"] for entry in first.get("cursors/c").json()["groups"]] == ["g4", "g5"]
    assert [cursor["name"] for cursor in first.get("cursors").json()["cursors"]] == ["c", "new"]


def test_a_wait_for_a_short_batch_begins_again_at_the_next_leader(
    pair: tuple[ServeProcess, ServeProcess], connect: Connect
) -> None:
    """The time-out counts from the first request to the new leader; the short batch is the same from both servers."""
    first, second = (connect(server.url, "r") for server in pair)
    batch = {"groups_per_batch": 4, "seq_len": 64}
    assert first.put(batch=batch | {"timeout_s": 3600.0}).status_code == 201
    epoch = first.attach()
    first.append(group("a"), group("b"))
    assert first.batch(0, epoch).json()["timeout_in_s"] <= 3600
    pair[0].kill()
    eventually(lambda: second.batch(0, epoch).status_code == 202, within_s=LEASE_S + SLACK_S)
    waits = second.batch(0, epoch).json()
    assert waits["reason"] == "too_few_groups" and 3000 < waits["timeout_in_s"] <= 3600
    assert second.http.patch(second.path, json={"batch": {"timeout_s": 0.2}}).status_code == 200
    body = second.batch(0, epoch, wait_ms=30_000)
    assert body.status_code == 200, body.text
    assert second.get("batches/0/record").json()["short"] == "timeout"
    again = connect(pair[0].start().url, "r")
    assert again.batch(0, epoch).content == body.content


def test_the_next_leader_waits_for_the_same_slot(pair: tuple[ServeProcess, ServeProcess], connect: Connect) -> None:
    """Exact slots follow from the tickets in Redis: nothing overtakes the slow prompt at the takeover."""
    first, second = (connect(server.url, "r") for server in pair)
    strategy = {"name": "one-step-off-policy", "options": {"exact_slots": True}}
    first.put(batch={"groups_per_batch": 2}, strategy=strategy)
    epoch = first.attach()
    slow, *others = (entry["ticket"] for entry in first.post("tickets", producer="p", count=4).json()["tickets"])
    first.append(*(group(None, ticket=ticket) for ticket in others))
    pair[0].kill()
    waits = eventually(lambda: second.batch(0, epoch), LEASE_S + SLACK_S, lambda answer: answer.status_code != 503)
    assert (waits.status_code, waits.json()["have"]["groups"]) == (202, 1)
    assert second.append(group(None, ticket=slow))[0]["status"] == "stored"
    second.train(epoch, range(2))
    trained = [second.get(f"batches/{step}/record").json()["groups"] for step in range(2)]
    assert [[entry["prompt_index"] for entry in groups] for groups in trained] == [[0, 1], [2, 3]]
