"""Results of evaluations are kept by version beside the run, and never become part of its history."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import httpx
import pytest

from replaybuf.service.run.evaluations import MOST_SETS
from tests.conftest import JSON, RunClient, ServeProcess, Starter


def result(version: int = 0, **changes: Any) -> dict[str, Any]:
    return {"name": "held-out", "version": version, "versions": [version], "reward_mean": 0.5, "rollouts": 4} | changes


def post(run: RunClient, body: dict[str, Any]) -> Any:
    return run.http.post(f"{run.path}/evaluations", content=json.dumps(body), headers=JSON)


def test_results_are_kept_by_version_and_the_last_of_a_version_counts(run: RunClient) -> None:
    assert run.put(batch={"groups_per_batch": 1}).status_code == 201
    run.reach_version(2)
    before, recorded = run.state(), run.get("ledger").json()["records"]
    for body in (result(0), result(2), result(0, name="other"), result(0, reward_mean=0.75, parts={"length": 3.0})):
        answer = post(run, body)
        assert answer.status_code == 200, answer.text
        assert answer.json().items() >= ({"generation": 0, "adapter": ""} | body).items()
    kept = run.get("evaluations").json()["evaluations"]
    assert [(result["name"], result["version"], result["reward_mean"]) for result in kept] == [
        ("held-out", 2, 0.5),
        ("other", 0, 0.5),
        ("held-out", 0, 0.75),
    ]
    assert [result["name"] for result in run.get("evaluations", limit=2).json()["evaluations"]] == ["other", "held-out"]
    after = run.state()
    assert (after["groups"], after["tickets"], after["step"]) == (before["groups"], before["tickets"], before["step"])
    assert run.get("ledger").json()["records"] == recorded


def evaluation_samples(text: str) -> dict[str, float]:
    """Return the metrics of evaluations by name and labels."""
    lines = (line.rpartition(" ") for line in text.splitlines() if line.startswith("replaybuf_evaluation_"))
    return {name: float(value) for name, _, value in lines}


def test_metrics_have_the_newest_result_of_each_set_also_after_a_restart(tmp_path: Path, started: Starter) -> None:
    """The newest held-out result has no standard error, so that of the older one is gone."""
    server = started(ServeProcess(tmp_path / "data"))
    run = RunClient(server.url, "r")
    run.put(batch={"groups_per_batch": 1})
    run.reach_version(2)
    for body in (result(1, standard_error=0.125), result(0, name="other"), result(2, reward_mean=0.75)):
        assert post(run, body).status_code == 200
    held_out, other = (f'{{run="r",set="{name}"}}' for name in ("held-out", "other"))
    expected = {
        f"replaybuf_evaluation_reward_mean{held_out}": 0.75,
        f"replaybuf_evaluation_version{held_out}": 2.0,
        f"replaybuf_evaluation_reward_mean{other}": 0.5,
        f"replaybuf_evaluation_version{other}": 0.0,
    }
    assert evaluation_samples(run.http.get("/metrics").text) == expected
    run.http.close()
    server.kill()
    server.start()
    assert evaluation_samples(httpx.get(f"{server.url}/metrics").text) == expected


def test_sets_beyond_the_bound_leave_the_metrics_oldest_result_first(run: RunClient) -> None:
    """The first set was evaluated again, so the second one leaves."""
    run.put(batch={"groups_per_batch": 1})
    for number in (*range(MOST_SETS), 0, MOST_SETS):
        assert post(run, result(name=f"set-{number}")).status_code == 200
    text = run.http.get("/metrics").text
    names = [name for name in evaluation_samples(text) if "reward_mean" in name and f'run="{run.run}"' in name]
    assert len(names) == MOST_SETS and not any('set="set-1"' in name for name in names)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"name": ""}, "name"),
        ({"adapter": "math"}, "adapter"),
        ({"version": 1}, "version"),
        ({"versions": [0, 1]}, "version"),
        ({"reward_mean": math.nan}, "reward_mean"),
        ({"standard_error": math.inf}, "standard_error"),
        ({"parts": {"length": math.nan}}, "parts.length"),
    ],
)
def test_what_no_evaluation_comes_to_is_refused_with_its_name(
    run: RunClient, changes: dict[str, Any], name: str
) -> None:
    """The bounds of all fields are in test_bounds.py."""
    run.put(batch={"groups_per_batch": 1})
    answer = post(run, result() | changes)
    assert (answer.status_code, answer.json()["name"]) == (422, name)
    assert run.get("evaluations").json() == {"evaluations": []}


def test_a_version_that_a_rewind_took_back_has_no_evaluation(run: RunClient) -> None:
    """It would count for the version of that number which comes next. The answer says which versions there are."""
    run.put(batch={"groups_per_batch": 1})
    run.reach_version(2)
    assert post(run, result(2)).status_code == 200
    run.attach(1)
    answer = post(run, result(2))
    assert (answer.status_code, answer.json()["value"], answer.json()["bound"]) == (422, 2, [0, 1])
