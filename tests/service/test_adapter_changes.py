"""Adapters that PATCH adds, pauses and removes on a living run."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import redis

from replaybuf.kernel.decide.config import decide_patch
from replaybuf.service.run.lease_timer import LEASE_S
from replaybuf.service.run.served_run import Run
from replaybuf.store import EmbeddedServer, Store
from replaybuf.wire.config import AdapterSpec, BatchSpec, RunConfig
from replaybuf.wire.config_patch import ConfigPatch
from tests.conftest import RunClient, ServeProcess, group, lasting
from tests.service.test_adapters import add, conserved, groups_by_adapter, put, served
from tests.store.test_store import to_append, with_store
from tests.waiting import eventually

Connect = Callable[[str, str], RunClient]
PAUSED, CONTINUED = {"paused": True}, {"paused": False}
_names = itertools.count(1)


def change(run: RunClient, **adapters: Any) -> httpx.Response:
    """Change adapters of the run."""
    return run.http.patch(run.path, json={"adapters": adapters})


def tickets(run: RunClient, adapter: str, count: int = 1) -> dict[str, Any]:
    """Ask for tickets of an adapter."""
    response = run.post("tickets", producer="p", count=count, adapter=adapter)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_an_added_adapter_shares_the_next_batch(run: RunClient) -> None:
    """It has its own prompts and versions from 0; the batch that was assembled before stays."""
    put(run)
    epoch = run.attach()
    add(run, "code", range(2))
    assert groups_by_adapter(served(run, 0, epoch)) == [("code", 1)]
    assert run.append(group("early", adapter="poem"))[0]["reason"] == "unknown_adapter"
    changed = change(run, poem={"groups_per_batch": 1, "prompts": 1})
    assert changed.json()["config"]["adapters"]["poem"]["prompts"] == 1
    assert [ticket["prompt_index"] for ticket in tickets(run, "poem", 3)["tickets"]] == [0]
    assert tickets(run, "poem")["waiting"]["reason"] == "finished", "its supply is 1 prompt"
    add(run, "poem", range(1))
    assert run.ack(0, epoch).status_code == 200
    assert groups_by_adapter(served(run, 1, epoch)) == [("poem", 1), ("code", 1)]
    assert run.state()["adapters"]["poem"]["progress"]["step"] == 1
    conserved(run)


def test_a_paused_adapter_has_no_share_and_no_tickets_until_it_continues(run: RunClient) -> None:
    """Groups under way are stored and wait; its place in its own step stays."""
    put(run)
    epoch = run.attach()
    add(run, "math", range(6))
    assert groups_by_adapter(served(run, 0, epoch)) == [("math", 3)]
    assert change(run, math=PAUSED).status_code == 200
    assert tickets(run, "math")["waiting"]["reason"] == "paused"
    assert run.state()["adapters"]["math"]["waiting"]["reason"] == "paused"
    add(run, "math", range(6, 7))
    add(run, "code", range(1))
    assert run.ack(0, epoch).status_code == 200
    assert groups_by_adapter(served(run, 1, epoch)) == [("code", 1)]
    assert change(run, code=PAUSED).status_code == 200
    assert run.ack(1, epoch).status_code == 200
    assert run.batch(2, epoch).json()["reason"] == "paused"
    assert change(run, math=CONTINUED, code=CONTINUED).status_code == 200
    assert groups_by_adapter(served(run, 2, epoch)) == [("math", 1)]
    assert run.state()["adapters"]["math"]["progress"] == {"step": 1, "groups": 0, "groups_per_batch": 4}
    conserved(run)


def test_a_removed_adapter_frees_what_only_it_used_and_its_batch_can_be_acked(
    own_service: ServeProcess, connect: Connect
) -> None:
    """After kill -9 and a rewind too: the batch comes again with the same bytes; nothing else of the adapter does."""
    run = connect(own_service.url, "r")
    put(run, strategy={"name": "one-step-off-policy", "options": {"max_staleness": 3}})
    epoch = run.attach()
    ticket = tickets(run, "code")["tickets"][0]
    add(run, "code", range(3))
    add(run, "math", range(3))
    before = run.batch(0, epoch)
    assert groups_by_adapter(served(run, 0, epoch)) == [("code", 1), ("math", 2)]
    assert change(run, code=None).status_code == 200
    own_service.kill()
    own_service.start()
    run = connect(own_service.url, "r")
    state = run.state()
    assert state["adapters"]["code"]["groups"]["evicted"] == {"adapter_removed": 2}
    assert (state["adapters"]["code"]["groups"]["live"], state["tickets"]["out"]) == (0, 0)
    assert state["adapters"]["code"]["waiting"]["reason"] == "finished"
    assert tickets(run, "code")["waiting"]["reason"] == "finished"
    for late in (group("late", adapter="code"), group("late", adapter="code", ticket=ticket["ticket"])):
        assert run.append(late)[0]["reason"] == "unknown_adapter"
    assert run.batch(0, epoch).content == before.content
    assert run.ack(0, epoch).status_code == 200
    add(run, "math", range(3, 6))
    assert groups_by_adapter(served(run, 1, epoch)) == [("math", 2)]
    assert run.ack(1, epoch).status_code == 200
    epoch = run.attach(resume_step=0)
    assert run.batch(0, epoch).content == before.content
    for step in range(2):
        assert run.ack(step, epoch).status_code == 200
    conserved(run)
    assert run.post("checkpoints", epoch=epoch, step=2).status_code == 200
    with redis.Redis(unix_socket_path=own_service.valkey_socket) as client:
        eventually(lambda: not list(client.scan_iter("rb:p:{r:code-*")), within_s=20.0)
    assert run.state()["adapters"]["math"]["groups"]["live"] == 2
    conserved(run)


def test_a_name_that_is_added_again_continues_where_it_was(run: RunClient) -> None:
    """Its step and its prompts: no prompt gets a second group."""
    put(run)
    epoch = run.attach()
    add(run, "code", range(1))
    assert tickets(run, "code")["tickets"][0]["prompt_index"] == 0
    assert groups_by_adapter(served(run, 0, epoch)) == [("code", 1)]
    assert change(run, code=None).status_code == 200
    assert change(run, code=None).status_code == 200, "a repetition changes nothing"
    assert change(run, code={"groups_per_batch": 1}).status_code == 200
    assert tickets(run, "code")["tickets"][0]["prompt_index"] == 1
    assert run.state()["adapters"]["code"]["progress"]["step"] == 1
    assert run.append(group("code-0", adapter="code"))[0]["status"] == "duplicate"
    conserved(run)


@pytest.mark.parametrize(
    ("adapters", "status", "name"),
    [
        ({"poem": None}, 422, "adapters.poem"),
        ({"poem": {}}, 422, "adapters.poem.groups_per_batch"),
        ({"a/b": {"groups_per_batch": 1}}, 422, "adapters"),
        ({"code": None, "math": None}, 409, "adapters"),
        ({"math": {"groups_per_batch": 5}}, 409, "adapters.math.groups_per_batch"),
        ({"math": {"prompts": 5, "paused": True}}, 409, "adapters.math.prompts"),
        ({f"a{n}": {"groups_per_batch": 1} for n in range(255)}, 422, "adapters"),
    ],
)
def test_a_change_that_is_not_possible_changes_nothing(
    run: RunClient, adapters: dict[str, Any], status: int, name: str
) -> None:
    put(run)
    before = run.state()
    answer = change(run, **adapters)
    assert (answer.status_code, answer.json()["name"]) == (status, name), answer.text
    assert lasting(run.state()) == lasting(before)


def test_a_run_without_adapters_gets_none_and_a_new_run_has_no_removed_ones(run: RunClient) -> None:
    removed = run.put(batch={"tokens_per_batch": 30}, adapters={"a": {"groups_per_batch": 1, "removed": True}})
    assert (removed.status_code, removed.json()["name"]) == (422, "adapters.a.removed")
    run.put(batch={"tokens_per_batch": 30})
    answer = change(run, code={"groups_per_batch": 1})
    assert (answer.status_code, answer.json()["name"]) == (409, "adapters"), answer.text


def test_the_next_leader_completes_a_removal(server: EmbeddedServer) -> None:
    """The leader died between its record and the eviction: the groups go, and the tickets end."""
    name = f"removal-{next(_names)}"

    async def work(store: Store) -> None:
        token = str((await store.runs.take_lease(name, "here", LEASE_S)).token)
        specs = {adapter: AdapterSpec(groups_per_batch=2) for adapter in ("code", "math")}
        run = await Run.create(name, store, token, RunConfig(batch=BatchSpec(), adapters=specs))
        appended = [to_append(group_id, adapter=adapter) for group_id, adapter in (("c", "code"), ("m", "math"))]
        await store.groups.append(name, appended, {"code": 0, "math": 0}, 0.0, run.state.entries)
        for adapter in specs:
            await run.tickets.issue("p", 1, adapter, 0.0)
        async with run.journal.decision():
            record = decide_patch(run.state, ConfigPatch(adapters={"code": None}), 0.0)
            assert record
            await run.journal.append(record)
        follower = await Run.load(name, store)
        assert follower
        lease = await store.runs.take_lease(name, "there", LEASE_S, force=True)
        await follower.lead(str(lease.token))
        groups = {adapter: follower.state.pool.counts_of(adapter) for adapter in specs}
        assert (groups["code"].evicted["adapter_removed"], groups["math"].evicted.total()) == (1, 0)
        assert (follower.book.out_of("code"), follower.book.out_of("math")) == (0, 1)
        await follower.tick()
        book = await store.tickets.read_one(name)
        assert [ticket.partition("/")[0] for ticket, _ in book.tickets] == ["math"]

    with_store(server, work)
