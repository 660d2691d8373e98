"""Short batches: the tail of a finite prompt supply, and the time-out of a trainer that waits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from replaybuf.wire.batch import read_batch
from tests.conftest import ClockedServe, RunClient, group
from tests.service.test_resume import conserved

TWO = {"groups_per_batch": 2, "tokens_per_batch": None, "seq_len": 64}
DEEP = {"name": "one-step-off-policy", "options": {"max_staleness": 3}}
TIMEOUT_S = 30.0
_names = itertools.count()


def take(run: RunClient, adapter: str = "") -> list[str]:
    """Take all tickets that are left."""
    return [
        ticket["ticket"] for ticket in run.post("tickets", producer="p", count=50, adapter=adapter).json()["tickets"]
    ]


def deliver(run: RunClient, *tickets: str, **fields: Any) -> None:
    """Append the groups of tickets."""
    results = run.append(*(group(None, ticket=ticket, **fields) for ticket in tickets))
    assert {result["status"] for result in results} == {"stored"}, results


def finite(run: RunClient, prompts: int = 3, **config: Any) -> int:
    """Create a run of two groups per batch with so many prompts, attach, and store the groups of all."""
    created = run.put(**{"batch": TWO, "tickets": {"prompts": prompts}, "strategy": DEEP} | config)
    assert created.status_code == 201, created.text
    epoch = run.attach()
    deliver(run, *take(run))
    return epoch


def record(run: RunClient, step: int) -> dict[str, Any]:
    """Return the record of a batch."""
    fields: dict[str, Any] = run.get(f"batches/{step}/record").json()
    return fields


# ---------------------------------------------------------------------- tail


def test_the_last_groups_of_a_finite_supply_make_a_short_batch(run: RunClient) -> None:
    """Three prompts, two groups per batch: the third group was left untrained for ever."""
    epoch = finite(run)
    run.train(epoch, range(1))
    assert run.batch(1, epoch).status_code == 200
    assert (record(run, 1)["short"], record(run, 1)["fill"]) == ("tail", 0.5)
    assert len(record(run, 1)["groups"]) == 1 and "short" not in record(run, 0)
    ahead = run.batch(2, epoch)
    assert (ahead.status_code, ahead.json()["reason"], ahead.json()["blocked_on"]) == (202, "awaiting_ack", "trainer")
    assert run.ack(1, epoch).status_code == 200
    assert run.batch(2, epoch).status_code == 410
    assert run.state()["state"] == "finished"
    assert conserved(run) == {"live": 0, "in_batches": 3, "retired": 0, "evicted": 0}


def test_a_dropped_tail_is_evicted_and_counted(run: RunClient) -> None:
    epoch = finite(run, batch=TWO | {"tail": "drop"})
    run.train(epoch, range(1))
    assert run.batch(1, epoch).status_code == 410
    assert conserved(run) == {"live": 0, "in_batches": 2, "retired": 0, "evicted": 1}
    assert run.state()["groups"]["evicted"] == {"tail": 1}


def test_a_tail_gives_every_rank_the_same_number_of_micro_batches(run: RunClient) -> None:
    """Two rollouts of one row each for four ranks: two ranks get an empty micro-batch."""
    run.put(batch=TWO | {"seq_len": 8}, tickets={"prompts": 1}, strategy=DEEP)
    epoch = run.attach(dp_world_size=4)
    deliver(run, *take(run))
    bodies = [read_batch(run.batch(0, epoch, dp_rank=rank).content) for rank in range(4)]
    assert [len(body.micro_batches) for body in bodies] == [1, 1, 1, 1]
    assert sorted(body.meta.rollouts for body in bodies) == [0, 0, 1, 1]
    assert record(run, 0)["filler_micro_batches"] == 2


@pytest.mark.parametrize("tail", ["train", "drop"])
@pytest.mark.parametrize("on_resume", ["redeliver", "resample"])
def test_a_rewind_to_before_the_tail_resumes_the_run(run: RunClient, tail: str, on_resume: str) -> None:
    epoch = finite(run, batch=TWO | {"tail": tail}, prompts=5)
    steps = 3 if tail == "train" else 2
    bodies = run.train(epoch, range(steps))
    assert run.batch(steps, epoch).status_code == 410
    before = conserved(run)
    epoch = run.attach(resume_step=1, on_resume=on_resume)
    assert run.state()["state"] == "running"
    again = run.train(epoch, range(1, steps))
    assert (again == bodies[1:]) == (on_resume == "redeliver")
    assert [len(record(run, step)["groups"]) for step in range(steps)] == [2, 2, 1][:steps]
    assert run.batch(steps, epoch).status_code == 410
    assert conserved(run) == before


def test_each_adapter_has_its_own_tail(run: RunClient) -> None:
    """The last group of `code` completes its step, while `math` goes on with its own batches."""
    adapters = {"code": {"groups_per_batch": 2, "prompts": 3}, "math": {"groups_per_batch": 2, "prompts": 4}}
    batch = {"tokens_per_batch": 4000, "seq_len": 64}
    assert run.put(batch=batch, adapters=adapters, strategy=DEEP).status_code == 201
    epoch = run.attach()
    deliver(run, *take(run, "code"), adapter="code")
    math = take(run, "math")
    for step, version in enumerate((1, 2)):
        assert run.batch(step, epoch).status_code == 200
        assert run.ack(step, epoch).status_code == 200
        assert run.post("policy", epoch=epoch, version=version, adapter="code").status_code == 200
    assert "short" not in record(run, 0) and record(run, 1)["short"] == "tail"
    assert record(run, 1)["adapters"] == {"code": {"step": 1, "version": 1, "groups": 1, "completed": True}}
    deliver(run, *math[:3], adapter="math")
    assert run.batch(2, epoch).status_code == 200
    assert "short" not in record(run, 2)
    run.ack(2, epoch)
    run.post("policy", epoch=epoch, version=1, adapter="math")
    assert run.batch(3, epoch).json()["reason"] == "too_few_groups"
    deliver(run, math[3], adapter="math")
    assert run.batch(3, epoch).status_code == 200
    run.ack(3, epoch)
    run.post("policy", epoch=epoch, version=2, adapter="math")
    assert run.batch(4, epoch).status_code == 410
    assert conserved(run)["live"] == 0


# ---------------------------------------------------------------------- time-out


@pytest.fixture
def timed(clocked: ClockedServe) -> Iterator[RunClient]:
    """A new run of a service with a test clock."""
    client = RunClient(clocked.url, f"timed-{next(_names)}")
    yield client
    client.http.close()


def waiting_for(run: RunClient, *groups: str, **batch: Any) -> int:
    """Create a run with a time-out and these groups; attach."""
    created = run.put(batch=TWO | {"groups_per_batch": 4, "timeout_s": TIMEOUT_S} | batch, strategy=DEEP)
    assert created.status_code == 201, created.text
    if groups:
        run.append(*(group(name) for name in groups))
    return run.attach()


def test_a_batch_is_short_after_the_trainer_has_waited_for_the_time_out(
    clocked: ClockedServe, timed: RunClient
) -> None:
    epoch = waiting_for(timed, "a")
    clocked.put_forward(2 * TIMEOUT_S)  # nobody has asked: this does not count
    waits = timed.batch(0, epoch).json()
    assert waits["reason"] == "too_few_groups" and 0 < waits["timeout_in_s"] <= TIMEOUT_S
    clocked.put_forward(TIMEOUT_S - 10)
    assert 0 < timed.batch(0, epoch).json()["timeout_in_s"] <= 10
    clocked.put_forward(10)
    assert timed.batch(0, epoch).status_code == 200
    assert (record(timed, 0)["short"], record(timed, 0)["fill"]) == ("timeout", 0.25)
    timed.ack(0, epoch)
    assert timed.batch(1, epoch).status_code == 202


@pytest.mark.parametrize("timeout_s", [0.3, 1e-3, 1e-9])
def test_a_request_that_waits_is_answered_at_the_time_out(run: RunClient, timeout_s: float) -> None:
    """No group comes meanwhile; a very short time ends while the answer is made, or while a timer is a little early."""
    epoch = waiting_for(run, "a", timeout_s=timeout_s)
    answer = run.batch(0, epoch, wait_ms=30_000)
    assert answer.status_code == 200
    assert record(run, 0)["short"] == "timeout"


def test_adapters_share_a_batch_of_the_time_out_without_ending_their_steps(
    clocked: ClockedServe, timed: RunClient
) -> None:
    adapters = {"code": {"groups_per_batch": 4}, "math": {"groups_per_batch": 4}}
    batch = {"tokens_per_batch": 4000, "seq_len": 64, "timeout_s": TIMEOUT_S, "min_groups": 2}
    assert timed.put(batch=batch, adapters=adapters, strategy=DEEP).status_code == 201
    epoch = timed.attach()
    timed.append(group("a", adapter="code"), group("b", adapter="math"))
    assert timed.batch(0, epoch).status_code == 202
    clocked.put_forward(TIMEOUT_S)
    assert timed.batch(0, epoch).status_code == 200
    assert (record(timed, 0)["short"], record(timed, 0)["fill"]) == ("timeout", 0.25)
    assert not any(part["completed"] for part in record(timed, 0)["adapters"].values())
    assert timed.state()["adapters"]["code"]["progress"] == {"step": 0, "groups": 1, "groups_per_batch": 4}


# ---------------------------------------------------------------------- partial groups


def test_a_group_that_lost_rollouts_is_stored_with_advantages_over_the_others(run: RunClient) -> None:
    """Of four rollouts at least two must be there; the mean of the rewards 0, 1, 0 is 1/3."""
    batch = {"groups_per_batch": 2, "tokens_per_batch": None, "seq_len": 64}
    assert run.put(batch=batch, group_size=4, min_group_size=2, advantage="dr-grpo").status_code == 201
    answers = run.append(*(group(f"g{n}", rollouts=n) for n in (1, 3, 4, 5)))
    assert [answer["status"] for answer in answers] == ["rejected", "stored", "stored", "rejected"]
    assert answers[0]["reason"] == "wrong_group_size"
    run.batch(0, run.attach())
    assert record(run, 0)["rollouts"] == 7
    advantages = [rollout["advantage"] for rollout in run.get("groups/g3").json()["rollouts"]]
    assert advantages == pytest.approx([-1 / 3, 2 / 3, -1 / 3])
