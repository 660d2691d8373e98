"""Who changed a run: changes in the history, and a change that holds only for the state that its caller has seen."""

from __future__ import annotations

from typing import Any

import httpx

from tests.conftest import RunClient, group


def change(run: RunClient, revision: int, **changes: Any) -> httpx.Response:
    """Change the run if it still has this revision."""
    return run.http.patch(run.path, json=changes, params={"if_revision": revision})


def test_the_second_of_two_operators_learns_what_the_first_changed(run: RunClient) -> None:
    """Both read the same state. The second change is refused with the first one, and nothing of it happens."""
    run.put(batch={"groups_per_batch": 1})
    seen = run.state()["revision"]
    first = change(run, seen, strategy={"options": {"max_staleness": 4}}, state="paused")
    assert first.status_code == 200 and first.json()["revision"] > seen
    for query in ({}, {"dry_run": "true"}):
        second = run.http.patch(
            run.path, json={"limits": {"max_tokens_live": 99}}, params={"if_revision": seen} | query
        )
        assert second.status_code == 409
        problem = second.json()
        assert (problem["name"], problem["value"], problem["bound"]) == ("if_revision", seen, first.json()["revision"])
        assert "strategy.options.max_staleness: 1 → 4" in problem["detail"]
        assert "state: running → paused (operator)" in problem["detail"]
    assert run.state()["config"]["limits"]["max_tokens_live"] is None
    assert change(run, first.json()["revision"], limits={"max_tokens_live": 99}).status_code == 200


def test_a_change_without_effect_keeps_the_revision(run: RunClient) -> None:
    """Groups, steps and heartbeats do not change it either."""
    run.put(batch={"groups_per_batch": 1})
    seen = run.state()["revision"]
    run.append(group("a"))
    run.train(run.attach(), range(1))
    assert change(run, seen, strategy={"options": {"max_staleness": 1}}).json()["revision"] == seen
