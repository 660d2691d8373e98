"""Rule for failed prompts: alarm, pause or finish above a share, told in state, metrics, answers and ledger."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import RunClient, group
from tests.service.test_tickets import give_back, take


def put(run: RunClient, then: str, **tickets: Any) -> None:
    """Create a run whose prompts fail at the first attempt; at most a quarter of them may fail."""
    rule = {"max_attempts": 1, "max_failed_share": 0.25, "on_failed_share": then} | tickets
    response = run.put(batch={"groups_per_batch": 30}, strategy={"options": {"max_staleness": 9}}, tickets=rule)
    assert response.status_code == 201, response.text


def end_prompts(run: RunClient, stored: int, failed: int) -> None:
    """End prompts: first with groups, then as failed ones, in the middle of which the rule may stop the run."""
    tickets = take(run, stored + failed)
    assert len(tickets) == stored + failed
    if stored:
        run.append(*(group(None, ticket=ticket) for ticket in tickets[:stored]))
    for ticket in tickets[stored:]:
        assert give_back(run, ticket, "engine_timeout: 300 s") == 200


def ledger(run: RunClient) -> list[dict[str, Any]]:
    """Read all CONFIG records."""
    records = run.get("ledger").json()["records"]
    return [record for record in records if record["type"] == "CONFIG"]


def metrics(run: RunClient) -> dict[str, float]:
    """Read the two gauges of the rule."""
    lines = run.http.get("/metrics").text.splitlines()
    mine = [line for line in lines if line.startswith("replaybuf_prompts_failed_") and f'"{run.run}"' in line]
    named = (line.split("{")[0].removeprefix("replaybuf_prompts_failed_") for line in mine)
    values = dict(zip(named, (float(line.split()[-1]) for line in mine), strict=True))
    return {name: value for name, value in values.items() if name != "total"}


def test_the_alarm_explains_itself_and_stops_nothing(run: RunClient) -> None:
    put(run, "alarm")
    end_prompts(run, 15, 5)
    assert run.state()["failed_prompts"] == {
        "failed": 5,
        "ended": 20,
        "share": 0.25,
        "max_share": 0.25,
        "alarm": None,
    }
    assert metrics(run) == {"share": 0.25, "alarm": 0.0}
    end_prompts(run, 0, 1)
    why = (
        "failed_share: 6 of the last 21 prompts failed; tickets.max_failed_share is 0.25; the last one failed for: "
        "engine_timeout: 300 s"
    )
    state = run.state()
    assert (state["state"], state["failed_prompts"]["alarm"]) == ("running", why)
    assert metrics(run) == {"share": pytest.approx(6 / 21), "alarm": 1.0}
    waits = run.batch(0, run.attach()).json()
    assert (waits["reason"], waits["detail"]) == ("too_few_groups", why)
    assert len(take(run, 1)) == 1 and len(ledger(run)) == 1


def test_a_pause_names_its_reason_and_a_resume_starts_anew(run: RunClient) -> None:
    put(run, "pause")
    end_prompts(run, 15, 8)
    state = run.state()
    assert (state["state"], state["tickets"]["failed"]) == ("paused", 8)
    assert state["paused_reason"].startswith("failed_share: 6 of the last 21 prompts failed; ")
    denied = run.post("tickets", producer="p", count=1).json()["waiting"]
    waits = run.batch(0, run.attach()).json()
    for answer in (denied, waits):
        assert (answer["reason"], answer["blocked_on"]) == ("paused", "operator")
        assert answer["detail"] == state["paused_reason"]
    assert [record.get("reason") for record in ledger(run)] == [None, state["paused_reason"]]
    assert run.http.patch(run.path, json={"state": "running"}).status_code == 200
    assert run.state()["failed_prompts"]["ended"] == 0
    end_prompts(run, 15, 5)
    assert run.state()["state"] == "running"
    end_prompts(run, 0, 1)
    assert run.state()["paused_reason"].startswith("failed_share: 6 of the last 21 prompts failed; ")


def test_a_finished_run_answers_why(run: RunClient) -> None:
    put(run, "finish")
    epoch = run.attach()
    end_prompts(run, 15, 6)
    state = run.state()
    assert state["state"] == "finished" and state["waiting"]["detail"].startswith("failed_share: 6 of the last 21 ")
    over = run.batch(0, epoch)
    assert over.status_code == 410 and "failed_share: 6 of the last 21 prompts failed" in over.json()["detail"]
    assert run.http.delete(run.path).status_code == 204
