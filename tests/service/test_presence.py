"""When trainer and producers last called: reported in the state and in metrics, so that an alert finds a dead one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from replaybuf.kernel.state.producers import KNOWN_S, MOST_KNOWN
from replaybuf.service.presence import Presence
from tests.conftest import ClockedServe, RunClient, group

ALERTS: dict[str, Any] = yaml.safe_load((Path(__file__).parents[2] / "docker" / "alerts.yml").read_text())
_names = count()
SLACK_S = 60.0
"""A test on a busy machine takes less."""


@pytest.fixture
def run(clocked: ClockedServe) -> Iterator[RunClient]:
    """A new run of a service with a test clock."""
    client = RunClient(clocked.url, f"seen-{next(_names)}")
    yield client
    client.http.close()


def fires(run: RunClient, alert: str) -> bool:
    """Evaluate the expression of an alert with the metrics of one server; absent metrics are no result."""
    (rule,) = [rule for rules in ALERTS["groups"] for rule in rules["rules"] if rule["alert"] == alert]
    families = text_string_to_metric_families(run.http.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.labels.get("run") == run.run]
    missing = []

    def value(match: re.Match[str]) -> str:
        labels = dict(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
        for sample in samples:
            if sample.name == match[1] and labels.items() <= sample.labels.items():
                return str(sample.value)
        missing.append(match[0])
        return "0"

    # One server and one run: aggregations and matchings change nothing.
    expression = re.sub(r"\b(?:min|max|sum) by \(run\)|\bon \(run\)", "", rule["expr"])
    expression = re.sub(r"(replaybuf_\w+)(\{[^}]*\})?", value, expression)
    return bool(eval(expression)) and not missing


def test_the_state_reports_the_last_call_of_the_trainer(clocked: ClockedServe, run: RunClient) -> None:
    """Null before the first attach; every call with the epoch counts, a call with an older one does not."""
    run.put(batch={"groups_per_batch": 1})
    assert run.state()["trainer"] is None
    older, epoch = run.attach(), run.attach()
    run.append(group("a"))
    calls: list[Callable[[], httpx.Response]] = [
        lambda: run.batch(0, epoch),
        lambda: run.ack(0, epoch),
        lambda: run.publish(1, epoch),
        lambda: run.post("checkpoints", epoch=epoch, step=1),
        lambda: run.batch(1, epoch),
    ]
    for call in calls:
        clocked.put_forward(500.0)
        assert run.batch(0, older).status_code == 409
        seen = run.state()["trainer"]
        assert seen["epoch"] == epoch and 500.0 <= seen["last_seen_s"] < 500.0 + SLACK_S
        assert call().status_code in (200, 202)
        assert run.state()["trainer"]["last_seen_s"] < SLACK_S


def test_the_state_reports_the_last_call_of_a_producer(clocked: ClockedServe, run: RunClient) -> None:
    """Requests for tickets and appends count; names are known for an hour."""
    run.put(batch={"groups_per_batch": 1})
    assert run.state()["producers"] == {"last_seen_s": None, "known": 0, "gone": 0}
    for name in ("a", "b", "a"):
        run.post("tickets", producer=name)
    clocked.put_forward(500.0)
    seen = run.state()["producers"]
    assert seen["known"] == 2 and 500.0 <= seen["last_seen_s"] < 500.0 + SLACK_S
    run.append(group("g"))
    assert run.state()["producers"]["last_seen_s"] < SLACK_S
    clocked.put_forward(KNOWN_S)
    assert run.state()["producers"]["known"] == 0


def test_the_names_of_producers_have_a_bound() -> None:
    """A client that invents a name per call must not fill the memory."""
    presence = Presence(lambda: 0.0)
    for number in range(2 * MOST_KNOWN):
        presence.record_producer(f"p{number}")
    assert presence.producers_known == MOST_KNOWN


def test_an_alert_fires_for_a_trainer_that_is_gone(clocked: ClockedServe, run: RunClient) -> None:
    """Nobody waits for a batch then, so waiting times stay as they are and cannot raise an alert."""
    run.put(batch={"groups_per_batch": 1})
    run.append(group("a"), group("b"))
    clocked.put_forward(700.0)
    assert not fires(run, "ReplaybufTrainerGone"), "no trainer has attached yet"
    epoch = run.attach()
    run.batch(0, epoch)
    assert not fires(run, "ReplaybufTrainerGone")
    clocked.put_forward(700.0)
    assert fires(run, "ReplaybufTrainerGone")
    run.http.patch(run.path, json={"state": "paused"})
    assert not fires(run, "ReplaybufTrainerGone"), "an operator paused the run"
    run.http.patch(run.path, json={"state": "running"})
    run.batch(0, epoch)
    assert not fires(run, "ReplaybufTrainerGone")


def test_a_trainer_with_long_steps_raises_no_alert(clocked: ClockedServe, run: RunClient) -> None:
    """Its steps take 5 minutes: the alert waits for 10 minutes and 10 steps."""
    run.put(batch={"groups_per_batch": 1}, strategy={"name": "replay", "options": {"max_uses": 9}})
    run.append(group("a"))
    epoch = run.attach()
    for step in range(3):
        run.batch(step, epoch)
        clocked.put_forward(300.0)
        run.ack(step, epoch)
    clocked.put_forward(700.0)
    assert not fires(run, "ReplaybufTrainerGone")
    clocked.put_forward(10 * 300.0)
    assert fires(run, "ReplaybufTrainerGone")
