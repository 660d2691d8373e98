"""Tickets: issue, return, expiry, and rejection of tickets that were never issued."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ClockedServe, RunClient, ServeProcess, group


def take(run: RunClient, count: int, **fields: Any) -> list[str]:
    """Ask for tickets; return their names."""
    answer = run.post("tickets", producer="test", count=count, **fields).json()
    return [ticket["ticket"] for ticket in answer["tickets"]]


def test_tickets_count_prompts_from_zero_and_stop_at_the_window(run: RunClient) -> None:
    """One-step off-policy has room for two batches before the first publication."""
    run.put(batch={"groups_per_batch": 3})
    answer = run.post("tickets", producer="p", count=100).json()
    assert [ticket["prompt_index"] for ticket in answer["tickets"]] == list(range(6))
    assert {ticket["attempt"] for ticket in answer["tickets"]} == {1}
    denied = run.post("tickets", producer="p", count=1).json()
    assert denied["tickets"] == []
    assert denied["waiting"]["reason"] == "rate_limited"


def test_one_call_issues_at_most_a_thousand_tickets(run: RunClient) -> None:
    """A hundred thousand at once held up every run of the service until it lost their leases."""
    run.put(batch={"groups_per_batch": 16_384, "tokens_per_batch": None})
    for first in (0, 1000):
        tickets = run.post("tickets", producer="p", count=100_000).json()["tickets"]
        assert [ticket["prompt_index"] for ticket in tickets] == list(range(first, first + 1000))
    assert run.state()["tickets"]["out"] == 2000
    asked = run.http.get("/openapi.json").json()["components"]["schemas"]["TicketRequest"]["properties"]["count"]
    assert (asked["minimum"], asked["default"]) == (1, 1)
    assert "1000" in asked["description"]


def test_a_ticketed_group_takes_its_name_from_the_prompt(run: RunClient) -> None:
    """`p<prompt_index>`, once: the second group is a duplicate."""
    run.put(batch={"groups_per_batch": 2})
    first, second = take(run, 2)
    assert run.append(group(None, ticket=second))[0] == {"group_id": "p1", "status": "stored"}
    assert run.append(group(None, ticket=second))[0]["status"] == "duplicate"
    assert run.append(group("own-name", ticket=second))[0]["status"] == "duplicate"
    assert run.append(group(None, ticket=first, prompt_index=1))[0]["reason"] == "wrong_prompt_index"
    assert run.state()["tickets"]["out"] == 1


def test_a_ticket_of_the_next_prompt_is_rejected_before_it_is_issued(run: RunClient) -> None:
    """Prompts 0 and 1 are issued; a made-up ticket names prompt 2."""
    run.put(batch={"groups_per_batch": 2})
    made_up = take(run, 2)[1].replace("-1-", "-2-", 1)
    assert run.append(group(None, ticket=made_up))[0]["reason"] == "unknown_ticket"


def test_a_made_up_ticket_of_an_issued_prompt_is_rejected(run: RunClient) -> None:
    """Prompt 0 had two tickets: another text was never issued. The others are in tests/kernel/test_tickets.py."""
    run.put(batch={"groups_per_batch": 1})
    first, second = take(run, 2)
    give_back(run, first, "shutdown")
    (again,) = take(run, 1)
    assert (first, second, again) == ("t0-0-1-1", "t0-1-1-1", "t0-0-1-2")
    refused = run.append(group(None, ticket="t0-0-1-3"))[0]
    assert (refused["status"], refused["reason"]) == ("rejected", "unknown_ticket")
    assert run.append(group(None, ticket=first))[0]["status"] == "stored", "an older ticket is still good"
    assert run.append(group(None, ticket="t0-0-1-3"))[0]["status"] == "duplicate"


def test_a_returned_ticket_is_issued_again_until_its_prompt_has_failed(run: RunClient) -> None:
    """A new ticket per attempt; after max_attempts the prompt is recorded as failed and blocks nobody."""
    run.put(batch={"groups_per_batch": 1}, tickets={"max_attempts": 2})
    (first,) = take(run, 1)
    assert run.http.delete(f"{run.path}/tickets/{first}", params={"reason": "engine"}).status_code == 200
    assert run.http.delete(f"{run.path}/tickets/{first}").status_code == 404
    again = run.post("tickets", producer="p", count=1).json()["tickets"][0]
    assert (again["prompt_index"], again["attempt"]) == (0, 2)
    assert again["ticket"] != first
    run.http.delete(f"{run.path}/tickets/{again['ticket']}", params={"reason": "engine"})
    assert run.post("tickets", producer="p", count=1).json()["tickets"][0]["prompt_index"] == 1
    assert run.state()["tickets"] == {"issued": 3, "out": 1, "expired": 0, "returned": 2, "failed": 1}
    failures = [record for record in run.get("ledger").json()["records"] if record["type"] == "TICKET"]
    assert [(record["prompt_index"], record["reason"]) for record in failures] == [(0, "engine")]


def test_a_disconnected_caller_gets_no_ticket(run: RunClient) -> None:
    """It was killed while it waited: nobody would honour what is issued to it until that expires."""
    run.put(batch={"groups_per_batch": 1})
    first, _ = take(run, 2)
    body = b'{"producer": "killed", "count": 1, "wait_ms": 20000}'
    head = f"POST {run.path}/tickets HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with socket.create_connection((run.http.base_url.host, run.http.base_url.port or 80)) as killed:
        killed.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    give_back(run, first, "engine")
    assert len(take(run, 1)) == 1
    assert run.state()["tickets"]["out"] == 2


def give_back(run: RunClient, ticket: str, reason: str) -> int:
    """Give a ticket back; return the status."""
    return run.http.delete(f"{run.path}/tickets/{ticket}", params={"reason": reason}).status_code


def test_a_group_id_of_another_prompt_is_rejected(run: RunClient) -> None:
    """Neither stored nor a duplicate: it would be lost in silence. A producer without tickets chose `p0`, too."""
    run.put(batch={"groups_per_batch": 2})
    run.append(group("p0"))
    tickets = take(run, 3)
    assert run.append(group("mine", ticket=tickets[1]))[0]["status"] == "stored"
    for wire in (group(None, ticket=tickets[0]), group("x", ticket=tickets[0]), group("mine", ticket=tickets[2])):
        refused = run.http.post(f"{run.path}/groups", json={"groups": [wire]})
        assert refused.status_code == 422
        assert [result["reason"] for result in refused.json()["results"]] == ["group_id_taken"]
    assert run.append(group(None, ticket=tickets[2]))[0]["status"] == "stored"
    assert run.append(group("mine", ticket=tickets[1]), group("p0"))[1]["status"] == "duplicate"
    state = run.state()
    assert (state["groups"]["rejected"], state["tickets"]["out"]) == ({"group_id_taken": 3}, 1)


def test_the_late_group_of_a_failed_prompt_is_stored_and_the_prompt_has_not_failed(run: RunClient) -> None:
    """Stored wins over failed, whichever came first."""
    run.put(batch={"groups_per_batch": 1}, tickets={"max_attempts": 1})
    (ticket,) = take(run, 1)
    assert give_back(run, ticket, "engine_error") == 200
    assert run.state()["tickets"]["failed"] == 1
    assert run.append(group(None, ticket=ticket))[0] == {"group_id": "p0", "status": "stored"}
    assert run.state()["tickets"]["failed"] == 0
    assert run.append(group(None, ticket=ticket))[0]["status"] == "duplicate"


def test_tickets_and_their_counts_survive_a_killed_service(
    own_service: ServeProcess, connect: Callable[[str, str], RunClient]
) -> None:
    """Out, due again, failed, expired, returned: all as it was; attempts go on where they stood."""
    run = connect(own_service.url, "r")
    run.put(batch={"groups_per_batch": 8}, tickets={"ttl_s": 30, "max_attempts": 2}, strategy={"name": "on-policy"})
    out, failing, back, stored = take(run, 4)
    give_back(run, failing, "engine_error")
    (failing,) = take(run, 1)
    give_back(run, failing, "engine_error")
    give_back(run, back, "engine_error")
    run.append(group(None, ticket=stored))
    before = run.state()["tickets"]
    assert before == {"issued": 5, "out": 1, "expired": 0, "returned": 3, "failed": 1}
    own_service.kill()
    own_service.start()
    again = connect(own_service.url, "r")
    assert again.state()["tickets"] == before
    (ticket,) = again.post("tickets", producer="p", count=1).json()["tickets"]
    assert (ticket["prompt_index"], ticket["attempt"]) == (2, 2)
    assert give_back(again, out, "shutdown") == 200
    (ticket,) = again.post("tickets", producer="p", count=1).json()["tickets"]
    assert (ticket["prompt_index"], ticket["attempt"]) == (0, 1)
    assert ticket["ticket"] != out


def test_capacity_counts_live_groups_and_tickets_and_a_dead_producer_frees_its_share(
    clocked: ClockedServe, connect: Callable[[str, str], RunClient]
) -> None:
    """With room for three: one group live, two tickets with a producer that dies; its share comes back by expiry."""
    run = connect(clocked.url, "expiring")
    run.put(batch={"groups_per_batch": 3}, tickets={"ttl_s": 600}, strategy={"name": "on-policy"})
    assert run.append(group("live"))[0]["status"] == "stored"
    assert len(take(run, 5)) == 2
    denied = run.post("tickets", producer="other", count=1).json()["waiting"]
    assert (denied["reason"], denied["have"]["groups"]) == ("rate_limited", 3)
    clocked.put_forward(600.0)
    assert len(take(run, 5, wait_ms=20_000)) == 2
    assert run.state()["tickets"]["expired"] == 2


def test_a_waiting_producer_is_woken_by_a_batch_that_makes_room(tmp_path: Path) -> None:
    """Replay counts the uses that live groups have left: a batch takes some, long before its ack and publication."""
    with_clock = ClockedServe(tmp_path / "data", tmp_path / "clock", stopped=True)
    server = with_clock.start()
    try:
        run = RunClient(server.url, "replayed")
        options = {"max_uses": 2, "max_staleness": 8}
        run.put(batch={"groups_per_batch": 2}, strategy={"name": "replay", "options": options})
        epoch = run.attach()
        for step in range(2):  # admission goes by the speeds of two steps
            tickets = take(run, 2)
            with_clock.put_forward(1.0)
            run.append(*(group(None, ticket=ticket) for ticket in tickets))
            run.batch(step, epoch)
            run.ack(step, epoch)
            run.publish(step + 1, epoch)
        while tickets := take(run, 1):
            run.append(group(None, ticket=tickets[0]))
        got: list[list[str]] = []
        poll = threading.Thread(target=lambda: got.append(take(run, 1, wait_ms=20000)))
        poll.start()
        run.state()
        run.batch(2, epoch)
        poll.join(60)
        assert len(got) == 1 and len(got[0]) == 1
        run.http.close()
    finally:
        server.end()


@pytest.mark.parametrize(
    ("config", "asked", "granted"),
    [
        ({"batch": {"groups_per_batch": 64}}, {}, 128),
        ({"batch": {}, "adapters": {"math": {"groups_per_batch": 64}}}, {"adapter": "math"}, 128),
        ({"batch": {}}, {"max_tokens": 128}, 128),
        ({"batch": {"groups_per_batch": 64}}, {"max_tokens": 10**9}, 128),
        ({"batch": {"tokens_per_batch": 1024, "seq_len": 512}}, {"max_tokens": 10**9}, 2),
        ({"batch": {}}, {}, 8),
    ],
)
def test_two_batches_are_granted_before_the_first_group(
    run: RunClient, config: dict[str, Any], asked: dict[str, Any], granted: int
) -> None:
    """Half-full rollouts of 4,096 tokens granted 8 groups where two batches need 128: engines stood still."""
    run.put(group_size=8, **config)
    assert len(take(run, 1000, **asked)) == granted


def test_a_limit_below_the_expected_group_size_admits_what_the_next_batch_lacks(run: RunClient) -> None:
    """Until the first group arrives its size is a guess, which must not keep it from ever coming."""
    run.put(batch={"groups_per_batch": 2, "tokens_per_batch": None, "seq_len": 4096}, limits={"max_tokens_live": 100})
    first = run.post("tickets", producer="p", count=5).json()["tickets"]
    assert len(first) == 2
    run.append(group(None, ticket=first[0]["ticket"]))
    assert len(run.post("tickets", producer="p", count=5).json()["tickets"]) == 2


@pytest.mark.parametrize("body", [{"count": 0}, {"count": 1, "adapter": "nobody"}])
def test_a_request_out_of_bounds_is_refused(run: RunClient, body: dict[str, Any]) -> None:
    """422 with name, value and bound."""
    run.put(batch={"groups_per_batch": 1})
    response = run.post("tickets", producer="p", **body)
    assert response.status_code == 422
