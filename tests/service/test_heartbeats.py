"""Heartbeats of producers: who is gone loses its tickets early, everybody else keeps them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import ClockedServe, RunClient, ServeProcess, group
from tests.service.test_tickets import give_back
from tests.waiting import eventually

SOON_S = 60.0
"""For an event that takes less than a second on a machine that is not busy."""
_names = count()


@pytest.fixture
def live(clocked: ClockedServe) -> Iterator[RunClient]:
    """A new run of a service with a test clock."""
    client = RunClient(clocked.url, f"beats-{next(_names)}")
    yield client
    client.http.close()


def heartbeat(run: RunClient, producer: str, **report: Any) -> httpx.Response:
    """Send a heartbeat."""
    return run.http.put(f"{run.path}/producers/{producer}", json=report)


def take(run: RunClient, producer: str, count: int) -> list[str]:
    """Take tickets; return their texts."""
    answer = run.post("tickets", producer=producer, count=count).json()
    return [ticket["ticket"] for ticket in answer["tickets"]]


def producers(run: RunClient) -> dict[str, dict[str, Any]]:
    """List the producers by name."""
    return {producer["name"]: producer for producer in run.get("producers").json()["producers"]}


def pass_time(clocked: ClockedServe, run: RunClient, until_gone: str) -> None:
    """Let time pass a second at a time, until a producer is gone; the others send heartbeats meanwhile."""

    def gone() -> bool:
        clocked.put_forward(1.0)
        for name, producer in producers(run).items():
            if producer["heartbeats"] and name != until_gone:
                heartbeat(run, name)
        return bool(producers(run)[until_gone]["gone"])

    eventually(gone, SOON_S)


def test_a_heartbeat_is_answered_with_version_and_state(run: RunClient) -> None:
    """An unknown producer becomes known; nothing is written."""
    run.put(batch={"groups_per_batch": 2})
    answer = heartbeat(run, "a/b@c", in_flight=3, slots=8, engines=2, held_back_by="engine_away")
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"published_version": 0, "state": "running", "heartbeat_s": 15.0}
    (listed,) = run.get("producers").json()["producers"]
    assert listed.pop("last_seen_s") < SOON_S
    assert listed == {
        "name": "a/b@c",
        "tickets_out": 0,
        "groups_per_min": 0.0,
        "faults": 0,
        "heartbeats": True,
        "gone": False,
        "in_flight": 3,
        "slots": 8,
        "engines": 2,
        "held_back_by": "engine_away",
        "failure": None,
    }
    run.http.patch(run.path, json={"state": "paused"})
    assert heartbeat(run, "a/b@c").json()["state"] == "paused"


@pytest.mark.parametrize(
    ("producer", "body", "status"),
    [
        ("p" * 257, {}, 422),
        ("a%07b", {}, 422),
        ("p", {"in_fligth": 1}, 400),
        ("p", {"engines": ["http://one"]}, 400),
        ("p", {"engines": True}, 400),
        ("p", {"engines": 1.5}, 400),
        ("p", {"engines": 10**400}, 422),
        ("p", {"held_back_by": ["engine_away"]}, 400),
        ("p", [], 400),
        ("p", {"failure": {"reason": "r", "traceback": "a\x1b[31m"}}, 422),
        ("p", {"failure": {"reason": "r", "traceback": "a\u202eb"}}, 422),
        ("p", {"failure": {"reason": "r", "traceback": "", "prompt_idx": 1}}, 400),
        ("p", {"failure": {"reason": "r"}}, 400),
        ("p", {"failure": "it broke"}, 400),
    ],
)
def test_an_invalid_heartbeat_is_rejected(run: RunClient, producer: str, body: Any, status: int) -> None:
    """One clear answer, and nobody becomes known by it. The bounds of all fields are in test_bounds.py."""
    run.put(batch={"groups_per_batch": 2})
    answer = run.http.put(f"{run.path}/producers/{producer}", json=body)
    assert answer.status_code == status, answer.text
    assert run.get("producers").json()["producers"] == []


def test_a_producer_that_is_gone_loses_its_tickets_before_they_expire(clocked: ClockedServe, live: RunClient) -> None:
    """After 15 s instead of 600 s; the others keep theirs, also one that never sends heartbeats."""
    live.put(batch={"groups_per_batch": 6})
    for name in ("dies", "lives"):
        heartbeat(live, name)
    held = {name: take(live, name, 3) for name in ("dies", "lives", "silent")}
    assert {name: producer["tickets_out"] for name, producer in producers(live).items()} == dict.fromkeys(held, 3)
    pass_time(clocked, live, "dies")
    eventually(lambda: live.state()["tickets"]["out"] == 6, SOON_S)
    assert live.state()["tickets"] == {"issued": 9, "out": 6, "expired": 3, "returned": 0, "failed": 0}
    listed = producers(live)
    assert (listed["dies"]["faults"], listed["dies"]["tickets_out"]) == (3, 0)
    assert (listed["lives"]["faults"], listed["silent"]["faults"]) == (0, 0)
    assert live.state()["producers"]["gone"] == 1
    again = live.post("tickets", producer="lives", count=3).json()["tickets"]
    assert [(ticket["prompt_index"], ticket["attempt"]) for ticket in again] == [(0, 1), (1, 1), (2, 1)]
    assert live.append(group(None, ticket=held["lives"][0]), group(None, ticket=held["silent"][0]))
    assert producers(live)["lives"]["groups_per_min"] == 1.0


def test_a_late_group_of_a_gone_producer_is_stored_if_it_is_the_first(clocked: ClockedServe, live: RunClient) -> None:
    """Only its network was away: its finished work counts, and it is back."""
    live.put(batch={"groups_per_batch": 2})
    heartbeat(live, "cut-off")
    first, second = take(live, "cut-off", 2)
    pass_time(clocked, live, "cut-off")
    eventually(lambda: live.state()["tickets"]["out"] == 0, SOON_S)
    (again,) = take(live, "other", 1)
    assert live.append(group(None, ticket=again))[0]["status"] == "stored"
    assert live.append(group(None, ticket=first))[0]["status"] == "duplicate"
    assert live.append(group(None, ticket=second))[0]["status"] == "stored"
    heartbeat(live, "cut-off")
    assert producers(live)["cut-off"]["gone"] is False
    assert live.state()["tickets"]["failed"] == 0
    assert give_back(live, first, "shutdown") == 404


def test_a_prompt_that_ends_each_of_its_producers_fails_in_the_end(clocked: ClockedServe, live: RunClient) -> None:
    """Losses of connection are forgiven `max_attempts` times; then they count as failed attempts."""
    live.put(batch={"groups_per_batch": 1}, tickets={"max_attempts": 2})
    prompts = []
    for number in range(5):
        heartbeat(live, f"p{number}")
        prompts += [int(text.split("-")[1]) for text in take(live, f"p{number}", 1)]
        pass_time(clocked, live, f"p{number}")
        eventually(lambda: live.state()["tickets"]["out"] == 0, SOON_S)
    assert prompts == [0, 0, 0, 0, 1]
    (failed,) = live.get("failed-prompts").json()["failed_prompts"]
    assert (failed["prompt_index"], failed["reason"]) == (0, "producer_gone")


def test_a_restarted_service_takes_back_the_tickets_of_a_producer_that_died_meanwhile(tmp_path: Path) -> None:
    """It counts from its own start, and it knows from Redis who sent heartbeats."""
    own = ClockedServe(tmp_path / "data", tmp_path / "clock").start()
    run = RunClient(own.url, "restarted")
    try:
        run.put(batch={"groups_per_batch": 4})
        for name in ("dies@1", "lives"):
            heartbeat(run, name)
        for name in ("dies@1", "lives", "silent"):
            assert len(take(run, name, 2)) == 2
        own.kill()
        own.put_forward(100.0)
        own.start()
        run.http.base_url = own.url
        assert run.state()["tickets"]["out"] == 6
        assert {name: producer["tickets_out"] for name, producer in producers(run).items()} == {"dies@1": 2, "lives": 2}
        pass_time(own, run, "dies@1")
        eventually(lambda: run.state()["tickets"]["out"] == 4, SOON_S)
        again = run.post("tickets", producer="lives", count=2).json()["tickets"]
        assert [ticket["prompt_index"] for ticket in again] == [0, 1]
        assert run.state()["tickets"] == {"issued": 8, "out": 6, "expired": 2, "returned": 0, "failed": 0}
    finally:
        run.http.close()
        own.end()


def test_an_answer_to_wait_names_who_is_missing(clocked: ClockedServe, live: RunClient) -> None:
    """The producers that are gone for a batch; the trainer for tickets and for an ack."""
    live.put(batch={"groups_per_batch": 1}, strategy={"name": "on-policy"})
    epoch = live.attach()
    heartbeat(live, "dies")
    take(live, "dies", 1)
    assert "missing" not in live.batch(0, epoch).json()
    pass_time(clocked, live, "dies")
    waits = live.batch(0, epoch).json()
    assert waits["blocked_on"] == "producers"
    (missing,) = waits["missing"]
    assert missing["name"] == "dies" and missing["last_seen_s"] >= 15.0
    live.append(group("a"))
    assert live.batch(0, epoch).status_code == 200
    assert live.append(*(group(f"more-{n}") for n in range(4)))
    clocked.put_forward(500.0)
    waits = live.post("tickets", producer="p").json()["waiting"]
    assert (waits["reason"], waits["blocked_on"]) == ("rate_limited", "trainer")
    assert waits["missing"][0]["name"] == "trainer" and waits["missing"][0]["last_seen_s"] >= 500.0
    waits = live.batch(1, epoch).json()
    assert (waits["reason"], waits["missing"][0]["name"]) == ("awaiting_ack", "trainer")


def test_a_heartbeat_needs_an_existing_run(service: ServeProcess) -> None:
    """404 names the run."""
    run = RunClient(service.url, "no-such-run")
    assert heartbeat(run, "p").status_code == 404
    assert run.get("producers").status_code == 404
    run.http.close()


def fail(run: RunClient, producer: str, text: str, prompt_index: int | None = None) -> None:
    """Report a failure."""
    failure = {"reason": "reward_raised", "traceback": text, "prompt_index": prompt_index}
    heartbeat(run, producer, failure=failure).raise_for_status()


def test_the_newest_failure_of_a_producer_is_listed_until_a_newer_one(run: RunClient) -> None:
    """As long as a traceback may be, with its lines; a heartbeat without one changes nothing."""
    run.put(batch={"groups_per_batch": 2})
    fail(run, "p", "older")
    text = f"Traceback\n\tValueError: {'x' * 4073}"
    assert len(text) == 4096
    fail(run, "p", text, 7)
    heartbeat(run, "p")
    failure = producers(run)["p"]["failure"]
    assert failure.pop("age_s") < SOON_S
    assert failure == {"reason": "reward_raised", "prompt_index": 7, "traceback": text, "lasts": True}


def test_the_newest_twenty_failures_are_kept(run: RunClient) -> None:
    """One per producer; those of others that report again stay."""
    run.put(batch={"groups_per_batch": 2})
    for number in range(21):
        fail(run, f"p{number}", f"failure {number}")
        fail(run, "p0", "again")
    names = {name for name, producer in producers(run).items() if producer["failure"]}
    assert names == {"p0", *(f"p{number}" for number in range(2, 21))}


def test_who_waits_for_producers_learns_how_they_fail_until_they_store_a_group(run: RunClient) -> None:
    """The trainer and whoever looks at the run; one line, of the newest failure."""
    run.put(batch={"groups_per_batch": 1})
    epoch = run.attach()
    assert "detail" not in run.batch(0, epoch).json()
    fail(run, "other", "first line\nKeyError: 1")
    (ticket,) = take(run, "p", 1)
    fail(run, "p", "Traceback\n  File x\nValueError: boom", 7)
    for waits in (run.batch(0, epoch).json(), run.state()["waiting"], run.get("flow").json()["row"]["waiting"]):
        assert waits["blocked_on"] == "producers"
        assert "producer p fails, 0 s ago: reward_raised at prompt 7: ValueError: boom" in waits["detail"]
        assert "1 other" in waits["detail"] and "File x" not in waits["detail"]
    run.append(group(None, ticket=ticket))
    eventually(lambda: not producers(run)["p"]["failure"]["lasts"], SOON_S)
    run.train(epoch, range(1))
    waits = run.batch(1, epoch).json()
    assert "producer other fails" in waits["detail"] and "boom" not in waits["detail"]


def test_a_producer_that_ended_with_a_failure_is_the_cause_until_another_stores_groups(
    clocked: ClockedServe, live: RunClient
) -> None:
    """Its last words stay in the list."""
    live.put(batch={"groups_per_batch": 1})
    epoch = live.attach()
    fail(live, "dies", "MemoryError")
    pass_time(clocked, live, "dies")
    assert "producer dies fails" in live.batch(0, epoch).json()["detail"]
    (ticket,) = take(live, "lives", 1)
    live.append(group(None, ticket=ticket))
    eventually(lambda: producers(live)["lives"]["groups_per_min"], SOON_S)
    live.train(epoch, range(1))
    assert "detail" not in live.batch(1, epoch).json()
    assert producers(live)["dies"]["failure"]["lasts"]
