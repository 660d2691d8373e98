"""Jumps of the wall clock: deadlines and durations follow a clock that does not jump."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.conftest import ClockedServe, RunClient, group
from tests.service.test_tickets import give_back, take

TTL_S = 600.0
JUMP_S = 660.0
_names = count()


@pytest.fixture
def jumping(clocked: ClockedServe) -> Iterator[RunClient]:
    """A new run of a service with a test clock."""
    client = RunClient(clocked.url, f"jumps-{next(_names)}")
    yield client
    client.http.close()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[ClockedServe]:
    """A service with a test clock that a test may restart."""
    server = ClockedServe(tmp_path / "data", tmp_path / "clock").start()
    yield server
    server.end()


def test_jumps_of_the_wall_clock_expire_no_ticket(clocked: ClockedServe, jumping: RunClient) -> None:
    """Three jumps of 11 minutes failed every prompt within 3 seconds, because each one counted as a failed attempt."""
    jumping.put(batch={"groups_per_batch": 4}, tickets={"ttl_s": TTL_S, "max_attempts": 3})
    tickets = take(jumping, 8)
    for by_s in (JUMP_S, JUMP_S, JUMP_S, -4 * JUMP_S):
        clocked.jump(by_s)
        assert take(jumping, 8) == []
    assert jumping.state()["tickets"] == {"issued": 8, "out": 8, "expired": 0, "returned": 0, "failed": 0}
    assert jumping.append(group(None, ticket=tickets[0]))[0]["status"] == "stored"
    clocked.put_forward(JUMP_S)
    again = jumping.post("tickets", producer="p", count=8).json()["tickets"]
    assert [ticket["attempt"] for ticket in again] == [2] * 7


@pytest.mark.parametrize("by_s", [JUMP_S, -JUMP_S])
def test_a_jump_while_the_service_is_down_fails_no_prompt(own: ClockedServe, by_s: float) -> None:
    """A loaded ticket is out for at most its whole time, and then expires without a failed attempt."""
    run = RunClient(own.url, "down")
    run.put(batch={"groups_per_batch": 1}, tickets={"ttl_s": TTL_S, "max_attempts": 1})
    for _ in range(3):
        assert len(take(run, 2, wait_ms=5000)) == 2
        own.kill()
        own.jump(by_s)
        own.start()
        run.http.base_url = own.url
        own.put_forward(TTL_S)
    again = run.post("tickets", producer="p", count=2, wait_ms=5000).json()["tickets"]
    assert [(ticket["prompt_index"], ticket["attempt"]) for ticket in again] == [(0, 1), (1, 1)]
    assert run.state()["tickets"] == {"issued": 8, "out": 2, "expired": 6, "returned": 0, "failed": 0}
    assert give_back(run, again[0]["ticket"], "engine_error") == 200
    assert run.state()["tickets"]["failed"] == 1
    run.http.close()


def test_a_jump_of_the_wall_clock_changes_no_rate_no_reason_and_no_waiting_time(
    clocked: ClockedServe, jumping: RunClient
) -> None:
    """A jump is no silence of the producers, and nobody has waited for its length."""
    jumping.put(batch={"groups_per_batch": 2})
    epoch = jumping.attach()
    give_back(jumping, take(jumping, 1)[0], "shutdown")
    assert jumping.batch(0, epoch).json()["reason"] == "no_groups"
    clocked.jump(JUMP_S)
    assert jumping.batch(0, epoch).json()["reason"] == "no_groups"
    waited = [
        float(line.split()[-1])
        for line in jumping.http.get("/metrics").text.splitlines()
        if line.startswith("replaybuf_waiting_seconds_total") and f'run="{jumping.run}"' in line
    ]
    assert sum(waited) < 30.0
