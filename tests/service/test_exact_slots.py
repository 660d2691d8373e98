"""Exact slots over HTTP: batches follow the tickets through kills, rewinds, changes and lost producers."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from replaybuf.service.run.append.group_check import Incoming
from replaybuf.service.run.served_run import Run
from replaybuf.store import EmbeddedServer, Store
from replaybuf.wire.batch import read_batch
from replaybuf.wire.config import BatchSpec, StrategySpec
from replaybuf.wire.contract import AttachRequest, WaitingAnswer
from replaybuf.wire.group import group_from_json
from tests.builders import arriving, rollout, wire_group
from tests.conftest import ClockedServe, RunClient, group
from tests.led_run import on_a_run
from tests.service.test_heartbeats import SOON_S, pass_time
from tests.service.test_resume import conserved
from tests.waiting import eventually

THREE = {"groups_per_batch": 3, "tokens_per_batch": None, "seq_len": 64}
PRODUCER = """
import json, sys, urllib.request

def call(method, path, body):
    request = urllib.request.Request(sys.argv[1] + path, json.dumps(body).encode(), method=method)
    request.add_header("content-type", "application/json")
    return json.load(urllib.request.urlopen(request, timeout=30))

call("PUT", "/producers/dies", {})
tickets = call("POST", "/tickets", {"producer": "dies", "count": int(sys.argv[2])})["tickets"]
print(*(ticket["ticket"] for ticket in tickets), flush=True)
sys.stdin.read()
"""
"""A producer that sends one heartbeat, takes tickets, and generates until it is killed."""
_names = itertools.count()


def exact(**options: Any) -> dict[str, Any]:
    """Return the strategy with exact slots."""
    return {"name": "one-step-off-policy", "options": {"exact_slots": True, **options}}


def take(run: RunClient, count: int, adapter: str = "") -> dict[int, str]:
    """Take tickets; return their texts by prompt index."""
    answer = run.post("tickets", producer="p", count=count, adapter=adapter).json()
    return {ticket["prompt_index"]: ticket["ticket"] for ticket in answer["tickets"]}


def deliver(run: RunClient, *tickets: str, version: int = 0, **fields: Any) -> None:
    """Append the groups of tickets, one after another."""
    for ticket in tickets:
        (result,) = run.append(group(None, version, ticket=ticket, **fields))
        assert result["status"] == "stored", result


def indexes(run: RunClient, step: int) -> list[int]:
    """Return the prompt indexes of a recorded batch, in training order."""
    return [entry["prompt_index"] for entry in run.get(f"batches/{step}/record").json()["groups"]]


def start(run: RunClient, count: int, **config: Any) -> tuple[int, dict[int, str]]:
    """Create a run of three slots per batch, attach, take tickets."""
    created = run.put(**{"batch": THREE, "strategy": exact()} | config)
    assert created.status_code == 201, created.text
    return run.attach(), take(run, count) if count else {}


def test_a_batch_waits_for_its_slot_and_says_which(run: RunClient) -> None:
    """Five of six groups are there; the second prompt is slow."""
    epoch, tickets = start(run, 6)
    deliver(run, *(tickets[index] for index in (5, 4, 2, 3, 0)))
    waits = run.batch(0, epoch).json()
    assert (waits["reason"], waits["blocked_on"]) == ("too_few_groups", "producers")
    assert (waits["have"]["groups"], waits["need"]["groups"]) == (2, 3)
    assert waits["detail"] == "slots of this batch that wait for a ticket: 1; the first is prompt_index 1"
    eventually(lambda: run.state()["waiting"]["detail"] == waits["detail"], 30.0)
    deliver(run, tickets[1])
    run.train(epoch, range(2))
    assert [indexes(run, step) for step in range(2)] == [[0, 1, 2], [3, 4, 5]]


@pytest.fixture
def live(clocked: ClockedServe) -> Iterator[RunClient]:
    """A new run of a service with a test clock."""
    client = RunClient(clocked.url, f"slots-{next(_names)}")
    yield client
    client.http.close()


def test_the_slot_of_a_killed_producer_is_filled_by_the_next_one(clocked: ClockedServe, live: RunClient) -> None:
    """A producer process has prompt 0 and is killed with SIGKILL; nothing overtakes it."""
    epoch, _ = start(live, 0)
    with subprocess.Popen(
        [sys.executable, "-c", PRODUCER, clocked.url + live.path, "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as producer:
        assert producer.stdout is not None
        assert producer.stdout.readline().split() == ["t0-0-1-1"]
        tickets = take(live, 5)
        deliver(live, *tickets.values())
        assert live.batch(0, epoch).json()["have"]["groups"] == 2
        producer.kill()
        producer.wait(SOON_S)
    pass_time(clocked, live, "dies")
    eventually(lambda: live.state()["tickets"]["out"] == 0, SOON_S)
    assert live.batch(0, epoch).json()["have"]["groups"] == 2
    again = take(live, 1)
    assert list(again) == [0]
    deliver(live, again[0])
    live.train(epoch, range(2))
    assert [indexes(live, step) for step in range(2)] == [[0, 1, 2], [3, 4, 5]]


def test_a_resampled_history_binds_the_same_groups_again(run: RunClient) -> None:
    """Groups of lost versions are gone; the others take their slots once more."""
    epoch, tickets = start(run, 9, strategy=exact(max_staleness=3))
    deliver(run, *reversed(tickets.values()))
    bodies = run.train(epoch, range(3))
    names = [read_batch(body).meta.group_ids for body in bodies]
    epoch = run.attach(resume_step=1, on_resume="resample")
    again = [read_batch(body).meta.group_ids for body in run.train(epoch, range(1, 3))]
    assert again == names[1:]
    assert conserved(run) == {"live": 0, "in_batches": 9, "retired": 0, "evicted": 0}


def test_slots_can_be_switched_on_while_the_run_lives(run: RunClient) -> None:
    """From the next batch on. Without a number of groups the change is refused, and so is taking the number away."""
    epoch, tickets = start(run, 6, strategy={"name": "one-step-off-policy"})
    deliver(run, *(tickets[index] for index in (5, 4, 3, 2)))
    assert run.batch(0, epoch).status_code == 200
    changed = run.http.patch(run.path, json={"strategy": exact()})
    assert changed.status_code == 200, changed.text
    assert indexes(run, 0) == [5, 4, 3]
    deliver(run, tickets[1])
    assert run.ack(0, epoch).status_code == 200
    assert run.publish(1, epoch).status_code == 200
    assert "prompt_index 0" in run.batch(1, epoch).json()["detail"]
    deliver(run, tickets[0])
    run.train(epoch, range(1, 2))
    assert indexes(run, 1) == [0, 1, 2]
    refused = run.http.patch(run.path, json={"batch": {"groups_per_batch": None, "tokens_per_batch": 100}})
    assert (refused.status_code, refused.json()["name"]) == (422, "batch.groups_per_batch")
    other = RunClient(str(run.http.base_url), f"{run.run}-refused")
    answer = other.put(batch={"tokens_per_batch": 100, "seq_len": 64}, strategy=exact())
    assert (answer.status_code, answer.json()["name"]) == (422, "batch.groups_per_batch")
    other.http.close()


def test_each_adapter_has_slots_of_its_own(run: RunClient) -> None:
    """A slow prompt of `code` holds up batches of `code` only."""
    adapters = {"code": {"groups_per_batch": 2}, "math": {"groups_per_batch": 2}}
    run.put(batch={"tokens_per_batch": 4000, "seq_len": 64}, adapters=adapters, strategy=exact())
    epoch = run.attach()
    code, math = take(run, 3, "code"), take(run, 3, "math")
    deliver(run, code[1], code[2], adapter="code")
    waits = run.batch(0, epoch).json()
    deliver(run, math[1], math[0], adapter="math")
    assert run.batch(0, epoch).status_code == 200
    assert "prompt_index 0" in waits["detail"] and waits["adapter"] == "code"
    assert [entry["group_id"] for entry in run.get("batches/0/record").json()["groups"]] == ["math/p0", "math/p1"]
    assert run.ack(0, epoch).status_code == 200
    assert run.post("policy", epoch=epoch, version=1, adapter="math").status_code == 200
    deliver(run, code[0], adapter="code")
    assert run.batch(1, epoch).status_code == 200
    assert [entry["group_id"] for entry in run.get("batches/1/record").json()["groups"]] == ["code/p0", "code/p1"]


def test_a_book_whose_last_write_failed_is_read_again_before_a_batch(server: EmbeddedServer) -> None:
    """The answer of Redis is lost while tickets are issued: memory forgets them, Redis has them, the batch waits."""

    async def work(store: Store, run: Run) -> None:
        await run.trainer_calls.attach(AttachRequest(dp_world_size=1))
        issued = (await run.tickets.issue("p", 4, "", 0.0)).tickets
        wires = [wire_group(rollout(), group_id=None, ticket=ticket.ticket) for ticket in issued[1:]]
        await run.appends.append(arriving(Incoming(group_from_json(wire)) for wire in wires))
        run.book.restore([], {}, 0.0)
        run.side_state.uncertain = True
        waits = await run.batches.part(0, 1, 0, 0.0)
        assert isinstance(waits, WaitingAnswer) and "prompt_index 0" in str(waits.detail)
        assert waits.have.groups == 2
        assert not run.side_state.uncertain

    on_a_run(server, work, batch=BatchSpec(groups_per_batch=3), strategy=StrategySpec(**exact()))
