"""Results of evaluations are kept by version beside the run, and never become part of its history."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.conftest import JSON, RunClient


def result(version: int = 0, **changes: Any) -> dict[str, Any]:
    return {"name": "held-out", "version": version, "versions": [version], "reward_mean": 0.5, "rollouts": 4} | changes


def post(run: RunClient, body: dict[str, Any]) -> Any:
    return run.http.post(f"{run.path}/evaluations", content=json.dumps(body), headers=JSON)


def test_results_are_kept_by_version_and_the_last_of_a_version_counts(run: RunClient) -> None:
    assert run.put(batch={"groups_per_batch": 1}).status_code == 201
    before = run.state()
    for body in (result(0), result(10), result(0, name="other"), result(0, reward_mean=0.75, parts={"length": 3.0})):
        answer = post(run, body)
        assert answer.status_code == 200, answer.text
        assert answer.json().items() >= ({"generation": 0, "adapter": ""} | body).items()
    kept = run.get("evaluations").json()["evaluations"]
    assert [(one["name"], one["version"], one["reward_mean"]) for one in kept] == [
        ("held-out", 10, 0.5),
        ("other", 0, 0.5),
        ("held-out", 0, 0.75),
    ]
    assert [one["name"] for one in run.get("evaluations", limit=2).json()["evaluations"]] == ["other", "held-out"]
    after = run.state()
    assert (after["groups"], after["tickets"], after["step"]) == (before["groups"], before["tickets"], before["step"])
    assert [record["type"] for record in run.get("ledger").json()["records"]] == ["CONFIG"]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"name": ""}, "name"),
        ({"name": "x" * 257}, "name"),
        ({"producer": "a\nb"}, "producer"),
        ({"versions": [0] * 257}, "versions"),
        ({"parts": {"x" * 257: 1.0}}, "parts key"),
        ({"parts": {str(n): 1.0 for n in range(65)}}, "parts"),
        ({"adapter": "math"}, "adapter"),
        ({"version": -1}, "version"),
        ({"rollouts": 0}, "rollouts"),
        ({"reward_mean": math.nan}, "reward_mean"),
        ({"standard_error": math.inf}, "standard_error"),
        ({"parts": {"length": math.nan}}, "parts.length"),
    ],
)
def test_what_no_evaluation_comes_to_is_refused_with_its_name(
    run: RunClient, changes: dict[str, Any], name: str
) -> None:
    run.put(batch={"groups_per_batch": 1})
    answer = post(run, result() | changes)
    assert (answer.status_code, answer.json()["name"]) == (422, name)
    assert run.get("evaluations").json() == {"evaluations": []}
