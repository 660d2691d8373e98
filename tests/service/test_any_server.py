"""Any server of a Redis stores groups, by the same rules as the leader of their run: two real servers."""

from __future__ import annotations

import concurrent.futures
import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from replaybuf import Client
from replaybuf.errors import NoRoom, NotLeader
from replaybuf.store import EmbeddedServer
from replaybuf.wire.contract import Ticket, WaitingAnswer
from tests.builders import group
from tests.conftest import LastingServe, ServeProcess
from tests.ticket_producer import numbered_group
from tests.waiting import eventually

WITHIN_S = 30.0
CONFIG: dict[str, Any] = {"batch": {"groups_per_batch": 4, "tokens_per_batch": None, "seq_len": 64}}
LIVE_TOKENS = 2_000
APPENDED_AT_ONCE = 8


class Sides:
    """A run, by its leader and by the server that follows."""

    def __init__(self, servers: list[ServeProcess], run: str, config: dict[str, Any]) -> None:
        self.run = run
        with Client(servers[0].url, run) as client:
            client.put_run(config)
        leaders = httpx.get(f"{servers[0].url}/readyz").json()["leaders"]
        self.urls = sorted((server.url for server in servers), key=lambda url: url != leaders[run])
        self.leader, self.follower = (Client(url, run) for url in self.urls)

    def close(self) -> None:
        """Close both clients."""
        self.leader.close()
        self.follower.close()

    def answers(self, url: str, call: str) -> dict[str, float]:
        """Return how often a server gave each status to a call of the run."""
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        marks = ("replaybuf_requests_total{", f'call="{call}"', f'run="{self.run}"')
        counted = [line for line in lines if all(mark in line for mark in marks)]
        return {line.partition('status="')[2][:3]: float(line.rsplit(" ", 1)[1]) for line in counted}

    def appends_at(self, url: str) -> float:
        """Return how many appends to the run a server was asked for."""
        return sum(self.answers(url, "POST /v1/runs/{run}/groups").values())


def wait_until_known(sides: Sides) -> None:
    """Append through the follower until the leader is not asked: each server learns of the other first."""
    numbers = iter(range(1_000))

    def stored_there() -> bool:
        before = sides.appends_at(sides.urls[0])
        sides.follower.append([group(group_id=f"g{next(numbers)}")])
        return sides.appends_at(sides.urls[0]) == before

    eventually(stored_there, WITHIN_S)


@pytest.fixture(scope="module")
def pair(server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServeProcess]]:
    """Two servers that know each other."""
    folder: Path = tmp_path_factory.mktemp("servers")
    with ExitStack() as stack:
        servers: list[ServeProcess] = []
        for name in ("first", "second"):
            started = LastingServe(folder / name, "--redis-url", server.url)
            stack.callback(started.end)
            servers.append(started.start())
        sides = Sides(servers, "known", CONFIG)
        wait_until_known(sides)
        sides.close()
        yield servers


@pytest.fixture
def sides(pair: list[ServeProcess], request: pytest.FixtureRequest) -> Iterator[Sides]:
    """A new run; its configuration may be the parameter of the test."""
    run = request.node.name.partition("[")[0].removeprefix("test_")[:60]
    both = Sides(pair, run, getattr(request, "param", CONFIG))
    yield both
    both.close()


def test_a_follower_stores_what_the_leader_trains_on(sides: Sides) -> None:
    """The leader gets no append, and its batch has the groups; their tickets are done, also for the follower."""
    epoch = sides.leader.attach().epoch
    asked = sides.appends_at(sides.urls[0])
    taken = sides.leader.take_tickets("producer", 4)
    results = sides.follower.append([numbered_group(ticket, 0) for ticket in taken.tickets])
    assert [result.status for result in results] == ["stored"] * 4
    repeated = sides.leader.append([numbered_group(taken.tickets[0], 0)])
    assert repeated[0].status == "duplicate"
    assert isinstance(sides.leader.fetch_batch(0, epoch, wait_ms=5_000), bytes)
    assert eventually(lambda: sides.leader.get_run().tickets.out == 0, WITHIN_S)
    assert sides.appends_at(sides.urls[0]) == asked + 1


def test_a_follower_knows_what_the_leader_has_just_decided(sides: Sides) -> None:
    """A ticket, a version, a rewind and the end of a run, each used at the other server at once."""
    epoch = sides.leader.attach().epoch
    for _ in range(4):
        (ticket,) = sides.leader.take_tickets("producer", 1).tickets
        assert sides.follower.append([numbered_group(ticket, 0)])[0].status == "stored"
    assert isinstance(sides.leader.fetch_batch(0, epoch, wait_ms=5_000), bytes)
    sides.leader.ack(0, epoch)
    sides.leader.publish_policy(1, epoch)
    assert sides.follower.append([group(group_id="newer", policy_version=1)])[0].status == "stored"
    sides.leader.attach(resume_step=0, on_resume="resample")
    (lost,) = sides.follower.append([group(group_id="of a lost version", policy_version=1)])
    assert (lost.status, lost.reason) == ("rejected", "version_above_published")
    assert eventually(lambda: sides.leader.get_run().groups.evicted == {"lost_lineage": 1}, WITHIN_S)


def test_a_follower_rejects_what_the_leader_would(sides: Sides) -> None:
    """And the leader counts it."""
    invented = Ticket(ticket="t9-9-9-9", prompt_index=9, attempt=1, expires_in_s=9)
    (unknown,) = sides.follower.append([numbered_group(invented, 0)])
    (early,) = sides.follower.append([group(group_id="early", policy_version=7)])
    assert [unknown.reason, early.reason] == ["unknown_ticket", "version_above_published"]
    counted = {"unknown_ticket": 1, "version_above_published": 1}
    for side in (sides.follower, sides.leader):
        eventually(side.get_run, WITHIN_S, lambda seen: seen.groups.rejected == counted)


@pytest.mark.parametrize("sides", [CONFIG | {"limits": {"max_tokens_live": LIVE_TOKENS}}], indirect=True)
def test_limits_hold_across_servers_up_to_what_enters_at_once(sides: Sides) -> None:
    """Two servers fill a run at the same time: it stays below the limit and what each of them takes in at once."""
    tokens = group(group_id="size").tokens

    def fill(side: Client, name: str) -> int:
        for number in itertools.count():
            try:
                side.append([group(group_id=f"{name}-{number}-{n}") for n in range(APPENDED_AT_ONCE)])
            except NoRoom:
                return number
            except NotLeader:  # a starved leader lets its lease end
                continue
        return 0

    sides.leader.attach()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        filled = [pool.submit(fill, *side) for side in ((sides.leader, "l"), (sides.follower, "f"))]
        assert all(task.result() for task in filled)
    # Each knows what it stored itself, so the one that stored the last group knows all.
    eventually(lambda: sides.leader.get_run().groups.stored == sides.follower.get_run().groups.stored, WITHIN_S)
    live = sides.leader.get_run().tokens.live
    assert LIVE_TOKENS - APPENDED_AT_ONCE * tokens < live <= LIVE_TOKENS + 2 * APPENDED_AT_ONCE * tokens


def test_groups_of_a_run_that_spills_go_to_the_leader(pair: list[ServeProcess], tmp_path: Path) -> None:
    """It alone knows how many bytes are in memory, and moves frames."""
    spill = {"spill": {"url": f"file://{tmp_path}/spill"}, "limits": {"max_bytes_in_memory": 1 << 30}}
    (tmp_path / "spill").mkdir()
    sides = Sides(pair, "spills", CONFIG | spill)
    assert sides.follower.append([group(group_id="a")])[0].status == "stored"
    assert sides.appends_at(sides.urls[0]) == 1
    sides.close()


def test_groups_for_a_leader_that_stands_alone_go_to_it(server: EmbeddedServer, tmp_path: Path) -> None:
    """It does not announce itself: nobody knows whether it checks groups by the same rules."""
    with ExitStack() as stack:
        servers = []
        for number, options in enumerate((["--no-balance"], [])):
            started = ServeProcess(tmp_path / f"server{number}", "--redis-url", server.url, *options)
            stack.callback(started.end)
            servers.append(started.start())
        sides = Sides(servers, "alone", CONFIG)
        stack.callback(sides.close)
        if sides.urls[0] == servers[0].url:
            for number in range(3):
                sides.follower.append([group(group_id=f"g{number}")])
            assert sides.appends_at(sides.urls[0]) == 3


def test_a_follower_builds_the_batch_that_the_leader_records(sides: Sides) -> None:
    """A trainer that asks the follower waits there; both servers have the same bytes, and the leader sent none."""
    epoch = sides.leader.attach().epoch
    waiting = sides.follower.fetch_batch(0, epoch, wait_ms=50)
    assert isinstance(waiting, WaitingAnswer)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(sides.follower.fetch_batch, 0, epoch, wait_ms=20_000)
        sides.leader.append([group(group_id=f"g{number}") for number in range(4)])
        body = fetching.result()
    assert body == sides.leader.fetch_batch(0, epoch)
    answers = sides.answers(sides.urls[0], "GET /v1/runs/{run}/batches/{step}")
    assert answers == {"202": 1, "304": 1, "200": 1}
