"""What the console shows: one row per run, the flow of a run, and figures over its steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from replaybuf.service.http.call.overview_calls import VERSIONS, count_versions
from tests.conftest import ClockedServe, RunClient, ServeProcess, group
from tests.kernel.test_state import Run
from tests.kernel.test_step_figures import stored


def row_of(run: RunClient) -> dict[str, Any]:
    """Return the row of this run."""
    rows = run.http.get("/v1/overview").json()["runs"]
    return next(row for row in rows if row["run"] == run.run)


def test_a_row_says_how_a_run_does_and_why_it_waits(run: RunClient) -> None:
    """Before the first batch, and after two steps."""
    run.put(batch={"groups_per_batch": 2}, max_steps=9)
    fresh = row_of(run)
    assert (fresh["rewards"], fresh["staleness"], fresh["idle_s"], fresh["trainer_last_seen_s"]) == (
        [],
        None,
        None,
        None,
    )
    epoch = run.attach()
    run.append(*(group(f"g{number}") for number in range(4)))
    run.train(epoch, range(2))
    row = row_of(run)
    assert (row["state"], row["step"], row["max_steps"], row["published_version"]) == ("running", 2, 9, 2)
    assert (row["rewards"], row["staleness"], row["groups_live"]) == ([0.5, 0.5], 1.0, 0)
    assert row["waiting"]["blocked_on"] == "producers"
    assert row["idle_s"] >= 0 and row["trainer_last_seen_s"] >= 0


def test_the_flow_counts_the_buffer_by_version_and_waits_by_reason(run: RunClient) -> None:
    """Live groups and groups in batches."""
    run.put(batch={"groups_per_batch": 2})
    epoch = run.attach()
    run.append(group("a"), group("b"))
    run.train(epoch, range(1))
    run.append(group("c", 1))
    run.batch(1, epoch, wait_ms=20)
    flow = run.get("flow").json()
    assert flow["versions"] == [{"version": 1, "live": 1, "in_batches": 0}, {"version": 0, "live": 0, "in_batches": 2}]
    assert flow["waited_s"]["too_few_groups"] > 0
    assert flow["ledger_entries"] == run.get("ledger", limit=1000).json()["records"][-1]["entry"]
    assert flow["row"]["run"] == run.run and flow["batch_s"] >= flow["ack_s"] >= 0


def test_older_versions_are_counted_together() -> None:
    """A buffer of many versions has a bounded answer."""
    run = Run(max_uses=None)
    newest = VERSIONS + 5
    stored(run, *({"policy_version": version, "policy_version_max": version} for version in range(newest + 1)))
    index = run.state.index
    counted = count_versions(index["policy_version"], index["state"])
    assert [each.version for each in counted] == [*range(newest, newest - VERSIONS, -1), None]
    assert counted[-1].live == newest + 1 - VERSIONS
    assert count_versions(index["policy_version"][:0], index["state"][:0]) == []


def test_the_history_survives_a_restart(own_service: ServeProcess, connect: Callable[[str, str], RunClient]) -> None:
    """The same columns, and the same changes and rewinds with their steps, from the ledger after kill -9."""
    run = connect(own_service.url, "kept")
    run.put(batch={"groups_per_batch": 1})
    epoch = run.attach()
    for step in range(5):
        run.append(group(f"g{step}", step))
        assert run.batch(step, epoch).status_code == 200
        assert run.ack(step, epoch, metrics={"loss": step / 10}).status_code == 200
        run.publish(step + 1, epoch)
    assert run.http.patch(run.path, json={"strategy": {"options": {"max_staleness": 3}}}).status_code == 200
    run.attach(4)
    before = run.get("history").json()
    own_service.kill()
    again = connect(own_service.start().url, "kept")
    after = again.get("history").json()
    kept = ("columns", "dropped", "metrics", "first_step", "last_step", "changes")
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    lines = [(change["step"], change["lines"]) for change in after["changes"]]
    assert lines == [(5, ["strategy.options.max_staleness: 1 → 3"]), (4, ["rewind to step 4 (redeliver)"])]
    assert again.state()["revision"] == after["changes"][0]["entry"]
    assert after["metrics"] == {"loss": [0.0, 0.1, 0.2, 0.3, 0.4]}
    assert after["columns"]["step"] == [0, 1, 2, 3, 4]
    assert after["columns"]["reward_mean"] == [0.5] * 5
    assert after["columns"]["tokens_in"] == [10.0] * 5


def test_a_range_and_a_number_of_points_bound_the_history(run: RunClient) -> None:
    """All steps, two of them, and pairs."""
    run.put(batch={"groups_per_batch": 1})
    epoch = run.attach()
    run.append(group("stale"), *(group(f"g{number}") for number in range(2)))
    run.train(epoch, range(2))
    run.append(*(group(f"h{number}", 2) for number in range(2)))
    run.train(epoch, range(2, 4))
    for query, steps, sizes in (
        ({}, [0, 1, 2, 3], [1] * 4),
        ({"from_step": 1, "to_step": 2}, [1, 2], [1, 1]),
        ({"points": 2}, [0, 2], [2, 2]),
    ):
        history = run.get("history", **query).json()
        columns = history["columns"]
        assert (columns["step"], columns["steps"]) == (steps, sizes)
        assert {len(column) for column in (*columns.values(), *history["dropped"].values())} == {len(steps)}
        assert (history["first_step"], history["last_step"]) == (0, 3)


@pytest.mark.parametrize(
    ("metrics", "what"),
    [
        ({f"m{number}": 1.0 for number in range(65)}, "metrics"),
        ({"é" * 33: 1.0}, "64"),
        ({"a\u202eb": 1.0}, "U+202E"),
        ({"loss": "0.5"}, "metrics"),
        ({"loss": True}, "metrics"),
    ],
    ids=["too many", "a long name", "a name that turns the text", "text", "truth"],
)
def test_metrics_out_of_bounds_ack_nothing(run: RunClient, metrics: dict[str, Any], what: str) -> None:
    """The trainer corrects them and acks again."""
    run.put(batch={"groups_per_batch": 1})
    epoch = run.attach()
    run.append(group("a"))
    assert run.batch(0, epoch).status_code == 200
    refused = run.ack(0, epoch, metrics=metrics)
    assert refused.status_code in (400, 422) and what in refused.json()["detail"]
    assert run.state()["step"] == 0
    assert run.ack(0, epoch, metrics={"loss": 1, "kl": None}).status_code == 200
    assert run.get("history").json()["metrics"] == {"loss": [1.0]}


def test_the_clock_of_the_answers_is_that_of_the_server(run: RunClient) -> None:
    """A page whose clock is wrong shows right ages, because it needs no clock."""
    run.put(batch={"groups_per_batch": 1})
    for path in ("/v1/overview", f"{run.path}/flow", f"{run.path}/history"):
        begun_s = time.time()
        now_s = run.http.get(path).json()["now_s"]
        assert begun_s <= now_s <= time.time()


def test_a_run_stands_still_only_while_it_is_running(clocked: ClockedServe) -> None:
    """Not before its first batch, and not while it is paused."""
    run = RunClient(clocked.url, "still")
    run.put(batch={"groups_per_batch": 1})
    clocked.put_forward(1000.0)
    assert not row_of(run)["stands_still"]
    epoch = run.attach()
    for step in range(3):
        run.append(group(f"g{step}", step))
        run.train(epoch, range(step, step + 1))
    assert not row_of(run)["stands_still"] and row_of(run)["tokens_per_s"] > 0
    clocked.put_forward(1000.0)
    assert row_of(run)["stands_still"] and run.get("flow").json()["row"]["stands_still"]
    assert row_of(run)["tokens_per_s"] == 0
    run.http.patch(run.path, json={"state": "paused"})
    assert not row_of(run)["stands_still"]
    run.http.close()


def test_the_report_is_one_page_without_scripts(run: RunClient) -> None:
    """As `replaybuf report` writes it; names of a user are text in it."""
    run.put(batch={"groups_per_batch": 1})
    epoch = run.attach()
    run.append(group("g0"))
    run.train(epoch, range(1))
    answer = run.get("report")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert f"<h1>{run.run}: running, 1 trained step" in answer.text and "<script" not in answer.text
