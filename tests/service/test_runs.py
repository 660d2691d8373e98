"""Creating, reading and changing runs."""

from __future__ import annotations

import re

import pytest
import redis

from replaybuf import Client
from replaybuf.errors import Conflict
from tests.conftest import RunClient, ServeProcess, group, lasting
from tests.wire.test_config import DEFAULTS


def test_a_new_run_answers_201_with_its_defaults_filled_in(run: RunClient) -> None:
    """Everything but `batch` has a default, and the state shows all of them."""
    response = run.put(batch={})
    assert response.status_code == 201
    filled_in = {"name": "one-step-off-policy", "options": {"max_staleness": 1}}
    assert response.json()["config"] == DEFAULTS | {"strategy": filled_in}


def test_the_same_configuration_again_answers_200_and_changes_nothing(run: RunClient) -> None:
    """A retried PUT is harmless."""
    run.put(batch={"groups_per_batch": 2})
    before = run.state()
    assert run.put(batch={"groups_per_batch": 2}).status_code == 200
    assert lasting(run.state()) == lasting(before)


def test_another_configuration_answers_409_naming_the_fields(run: RunClient) -> None:
    """The message names what differs, dotted."""
    run.put(batch={"groups_per_batch": 2})
    response = run.put(batch={"groups_per_batch": 3}, seed=1)
    assert response.status_code == 409
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json()["value"] == ["batch.groups_per_batch", "seed"]
    for way_on in ("batch.groups_per_batch, seed", "PATCH", "if_absent=true", "another name"):
        assert way_on in response.json()["detail"]


def test_if_absent_keeps_the_configuration_of_a_run_that_exists(run: RunClient) -> None:
    """A trainer that restarts after an operator's PATCH goes on with the patched run."""
    config = {"batch": {"groups_per_batch": 2}}
    assert run.http.put(run.path, json=config, params={"if_absent": "true"}).status_code == 201
    run.http.patch(run.path, json={"strategy": {"options": {"max_staleness": 3}}})
    patched = run.state()["config"]
    with Client(str(run.http.base_url), run.run) as client:
        assert client.put_run(config, if_absent=True).config == patched
        with pytest.raises(Conflict, match=re.escape("strategy.options")):
            client.put_run(config)
    assert run.http.put(run.path, json=config, params={"if_absent": "yes"}).status_code == 422


def test_a_patch_of_a_fixed_field_names_the_fields_that_can_change(run: RunClient) -> None:
    """The message also says what to do instead."""
    run.put(batch={"groups_per_batch": 2})
    response = run.http.patch(run.path, json={"seed": 3, "limits": {}})
    assert (response.status_code, response.json()["name"]) == (400, "seed")
    changeable = ("strategy", "filters", "limits", "batch", "state", "adapters")
    assert all(field in response.json()["detail"] for field in changeable)
    assert "create a run with another name" in response.json()["detail"]


@pytest.mark.parametrize(
    ("config", "status", "name"),
    [
        ({"batch": {"tokens_per_batch": 7}, "group_size": 4}, 422, "batch.tokens_per_batch"),
        ({"batch": {}, "strategy": {"name": "nope"}}, 422, "strategy"),
        ({"batch": {}, "strategy": {"options": {"nope": 1}}}, 422, "strategy.options"),
        ({"batch": {}, "advantage": "nope"}, 422, "advantage"),
        ({"batch": {}, "group_size": 1, "filters": [{"name": "zero-variance"}]}, 422, "group_size"),
        ({"batch": {}, "filters": [{"name": "overlong", "options": {"max_tokens": 1}}]}, 422, "filter.options"),
        ({"batch": {}, "unknown": 1}, 400, "body"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_with_name_value_and_bound(
    run: RunClient, config: dict[str, object], status: int, name: str
) -> None:
    """Nothing is created where the configuration is refused. All rules are in tests/wire/test_config.py."""
    response = run.put(**config)
    assert (response.status_code, response.json()["name"]) == (status, name), response.text
    assert run.http.get(run.path).status_code == 404


def test_a_refused_configuration_leaves_no_key_in_redis(run: RunClient, service: ServeProcess) -> None:
    refused = run.put(batch={"seq_len": 4, "pad_to_multiple_of": 3})
    assert refused.status_code == 422
    with redis.Redis(unix_socket_path=service.valkey_socket) as valkey:
        assert list(valkey.scan_iter(f"rb:{{{run.run}}}*")) == []


def test_a_run_name_outside_the_pattern_is_refused(run: RunClient) -> None:
    """The bound is the pattern itself."""
    response = run.http.put("/v1/runs/Bad_Name", json={"batch": {}})
    assert response.status_code == 422
    assert response.json()["bound"] == "[a-z0-9][a-z0-9._-]{0,62}"


def test_a_new_state_has_every_field_of_the_contract(run: RunClient) -> None:
    """Counts start at 0, the published version too: the initial weights."""
    run.put(batch={"groups_per_batch": 2})
    state = run.state()
    assert {k: state[k] for k in ("state", "paused_reason", "epoch", "generation", "step", "published_version")} == {
        "state": "running",
        "paused_reason": None,
        "epoch": 0,
        "generation": 0,
        "step": 0,
        "published_version": 0,
    }
    assert state["groups"] == {
        "stored": 0,
        "live": 0,
        "in_batches": 0,
        "retired": 0,
        "evicted": {},
        "dead_lettered": 0,
        "partial": 0,
        "rejected": {},
    }
    assert state["tickets"] == {"issued": 0, "out": 0, "expired": 0, "returned": 0, "failed": 0}
    assert state["durability"] == "strict"
    assert state["waiting"]["reason"] == "no_producers"


def test_metrics_report_the_measured_speeds(run: RunClient) -> None:
    """0 before anything happened; then how long groups and steps took, as gauges."""
    names = ("groups_per_second", "steps_per_second", "step_seconds", "group_seconds")

    def shown() -> list[float]:
        text = run.http.get("/metrics").text
        matches = [re.search(rf'^replaybuf_{name}{{run="{run.run}"}} (\S+)$', text, re.MULTILINE) for name in names]
        return [float(match[1]) for match in matches if match]

    run.put(batch={"groups_per_batch": 1})
    assert shown() == [0.0] * len(names)
    epoch = run.attach()
    for _ in range(2):
        ticket = run.post("tickets", producer="p", count=1).json()["tickets"][0]["ticket"]
        run.append(group(None, ticket=ticket))
    run.train(epoch, range(2))
    assert len(shown()) == len(names) and min(shown()) > 0
    assert run.state()["bytes"]["live"] == 0 == run.state()["tokens"]["live"]
