"""How long trainers waited per step and by reason, and since when a run waits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ClockedServe, RunClient, group

_names = itertools.count()


@pytest.fixture
def run(clocked: ClockedServe) -> Iterator[RunClient]:
    """A run of the test's own, not created yet, on a service whose clock the test advances."""
    client = RunClient(clocked.url, f"over-time-{next(_names)}")
    yield client
    client.http.close()


def row_of(run: RunClient) -> dict[str, Any]:
    """Return the row of this run."""
    row: dict[str, Any] = run.get("flow").json()["row"]
    return row


def wait(server: ClockedServe, run: RunClient, step: int, epoch: int, seconds: float) -> None:
    """Let the trainer ask for a batch that is not there, and again after these seconds."""
    assert run.batch(step, epoch).status_code == 202
    server.put_forward(seconds)
    assert run.batch(step, epoch).status_code == 202


def test_a_step_shows_how_long_its_trainer_waited_and_for_what(tmp_path: Path) -> None:
    """In the ledger, in the history, and there again after kill -9; while it lasts, in the flow."""
    server = ClockedServe(tmp_path / "data", tmp_path / "clock")
    server.start()
    try:
        run = RunClient(server.url, "waited")
        run.put(batch={"groups_per_batch": 2}, strategy={"name": "on-policy"})
        epoch = run.attach()
        run.post("tickets", producer="p", count=1)
        wait(server, run, 0, epoch, 5.0)
        assert 5.0 <= run.get("flow").json()["step_waited_s"]["no_groups"] < 35.0
        run.append(group("a"))
        wait(server, run, 0, epoch, 7.0)
        run.append(group("b"))
        run.train(epoch, range(1))
        assert run.get("flow").json()["step_waited_s"] == {}
        run.append(group("c", 1), group("d", 1))
        run.train(epoch, range(1, 2))
        acks = [record for record in run.get("ledger").json()["records"] if record["type"] == "ACK"]
        history = run.get("history").json()
        run.http.close()
        server.kill()
        server.start()
        again = RunClient(server.url, "waited")
        after = again.get("history").json()
        again.http.close()
    finally:
        server.end()
    assert {"no_groups", "too_few_groups"} <= acks[0]["waited_s"].keys()
    assert history["waited"]["no_groups"][0] == acks[0]["waited_s"]["no_groups"]
    assert 5.0 <= history["waited"]["no_groups"][0] < 35.0 and 7.0 <= history["waited"]["too_few_groups"][0] < 37.0
    assert history["waited"]["no_groups"][1] == 0.0
    assert after["waited"] == history["waited"]


def test_drops_since_the_newest_batch_are_in_the_flow(run: RunClient) -> None:
    """A run whose groups are all dropped makes no batch that could show them."""
    run.put(batch={"groups_per_batch": 2}, strategy={"name": "on-policy"})
    epoch = run.attach()
    run.append(group("a"), group("b"), group("late"))
    run.train(epoch, range(1))
    assert run.get("flow").json()["step_dropped"] == {"too_stale": 1}
    run.append(group("c", 1), group("d", 1))
    run.train(epoch, range(1, 2))
    assert run.get("flow").json()["step_dropped"] == {}
    assert run.get("history").json()["dropped"]["too_stale"] == [0, 1]


def test_a_run_reports_since_when_it_waits_for_its_present_reason(clocked: ClockedServe, run: RunClient) -> None:
    """Groups that trickle in do not begin the time again, another reason does, and a batch ends it."""
    run.put(batch={"groups_per_batch": 3})
    epoch = run.attach()
    run.append(group("a"))
    assert row_of(run)["waiting"]["reason"] == "too_few_groups"
    clocked.put_forward(100.0)
    run.append(group("b"))
    clocked.put_forward(50.0)
    row = row_of(run)
    assert row["waiting"]["reason"] == "too_few_groups" and 150.0 <= row["waiting_s"] < 180.0
    assert 150.0 <= run.state()["waiting_s"] < 180.0
    run.append(group("c"))
    assert (row_of(run)["waiting"], row_of(run)["waiting_s"]) == (None, None)
    run.train(epoch, range(1))
    row = row_of(run)
    assert row["waiting"] and row["waiting_s"] < 30.0


def test_a_jump_of_the_wall_clock_is_no_wait(clocked: ClockedServe, run: RunClient) -> None:
    run.put(batch={"groups_per_batch": 3})
    run.append(group("a"))
    assert row_of(run)["waiting_s"] < 30.0
    clocked.jump(7200.0)
    assert row_of(run)["waiting_s"] < 30.0
    clocked.jump(-7200.0)


def test_after_a_restart_a_run_has_waited_since_its_newest_change_at_least(tmp_path: Path) -> None:
    """Kill -9, and an hour in which no server runs."""
    server = ClockedServe(tmp_path / "data", tmp_path / "clock")
    server.start()
    try:
        run = RunClient(server.url, "waits")
        run.put(batch={"groups_per_batch": 3})
        run.append(group("a"))
        server.put_forward(600.0)
        run.http.close()
        server.kill()
        server.put_forward(3600.0)
        server.start()
        again = RunClient(server.url, "waits")
        row = row_of(again)
        again.http.close()
    finally:
        server.end()
    assert row["waiting"]["reason"] == "too_few_groups" and 4200.0 <= row["waiting_s"] < 4230.0
