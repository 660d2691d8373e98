"""What is counted of groups and prompts, over HTTP: in the state of a run and in `/metrics`, also after a kill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import RunClient, ServeProcess, group

TIME_FREE = ("times_sampled", "rollout_tokens", "longest_rollout_tokens")


def samples(run: RunClient, name: str) -> dict[tuple[str, ...], float]:
    """Read the samples of one name: values of their labels, but for the run's, to the value."""
    lines = run.http.get("/metrics").text.splitlines(keepends=True)  # parsing those of all runs takes seconds
    families = text_string_to_metric_families("".join(line for line in lines if line.startswith(("#", name))))
    return {
        tuple(value for label, value in sorted(sample.labels.items()) if label != "run"): sample.value
        for family in families
        for sample in family.samples
        if sample.name == name and sample.labels.get("run") == run.run
    }


def counted(run: RunClient) -> dict[str, Any]:
    """Read what is counted in the state of the run."""
    state = run.state()
    return {name: state[name] for name in ("histograms", "coverage", "reuse", "staleness", "groups")}


def test_histograms_and_coverage_survive_a_kill(
    own_service: ServeProcess, connect: Callable[[str, str], RunClient]
) -> None:
    """Two groups are trained, a long one is dropped, a prompt fails; one more group has no ticket."""
    run = connect(own_service.url, "counted")
    strategy = {"name": "one-step-off-policy", "options": {"max_staleness": 4}}
    run.put(batch={"groups_per_batch": 1, "seq_len": 64}, tickets={"max_attempts": 1}, strategy=strategy)
    tickets = [ticket["ticket"] for ticket in run.post("tickets", producer="p", count=3).json()["tickets"]]
    assert run.http.delete(f"{run.path}/tickets/{tickets[2]}", params={"reason": "engine"}).status_code == 200
    run.append(group(None, ticket=tickets[0], tokens=20), group(None, ticket=tickets[1], tokens=40))
    run.append(group("own", tokens=12), group("later", tokens=12))
    epoch = run.attach(seq_len=32)
    run.train(epoch, range(2))

    reported = counted(run)
    lengths = {
        "stored": {"count": 4, "sum": 84, "buckets": [[16, 2], [32, 1], [64, 1]]},
        "used": {"count": 2, "sum": 32, "buckets": [[16, 1], [32, 1]]},
        "dropped": {"count": 1, "sum": 40, "buckets": [[64, 1]]},
    }
    assert reported["groups"]["stored"] == 4 and reported["groups"]["evicted"] == {"overlong": 1}
    assert {name: reported["histograms"][name] for name in TIME_FREE} == {
        "times_sampled": {"1": 2},
        "rollout_tokens": lengths,
        "longest_rollout_tokens": lengths,
    }
    assert reported["histograms"]["age_at_use_s"]["count"] == 2
    dropped = reported["histograms"]["dropped"]["overlong"]
    assert dropped["age_versions"] == {"count": 1, "sum": 0, "buckets": [[0, 1]]}
    assert dropped["age_s"]["count"] == 1 and 0 <= dropped["age_s"]["sum"] < 60
    prompts = {"issued": 3, "stored": 2, "trained": 1, "dropped": 1, "failed": 1, "pending": 0}
    means = {"used": 16.0, "stored": 21.0, "biased": False}  # too few groups to call it a bias
    assert reported["coverage"] == prompts | {"share": 1 / 3, "sources": {}, "lengths": means}
    assert reported["reuse"] == {"groups_by_uses": {"1": 2}, "uses_per_group": 1.0, "generated_share": 2.0}
    metrics = ("rollout_tokens_bucket", "dropped_age_seconds_sum", "prompts", "group_age_at_use_seconds_count")
    exposed = {name: samples(run, f"replaybuf_{name}") for name in metrics}
    assert exposed["rollout_tokens_bucket"][("used", "16.0")] == 1
    assert exposed["rollout_tokens_bucket"][("used", "32.0")] == 2, "buckets are cumulative"
    assert exposed["rollout_tokens_bucket"][("stored", "+Inf")] == 4
    assert exposed["dropped_age_seconds_sum"] == {("overlong",): dropped["age_s"]["sum"]}
    assert exposed["prompts"] == {("trained",): 1, ("dropped",): 1, ("failed",): 1, ("pending",): 0}

    own_service.kill()
    run = connect(own_service.start().url, "counted")
    assert counted(run) == reported
    assert {name: samples(run, f"replaybuf_{name}") for name in metrics} == exposed
