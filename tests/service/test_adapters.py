"""Adapters over HTTP: several LoRA tenants in one run, each with its own batch, versions and progress."""

from __future__ import annotations

from collections import Counter
from typing import Any

from replaybuf.wire.batch import read_batch
from tests.conftest import RunClient, group

TWO = {"code": {"groups_per_batch": 1}, "math": {"groups_per_batch": 4}}


def add(run: RunClient, adapter: str, numbers: range, version: int = 0) -> None:
    """Append groups of 10 tokens for an adapter."""
    results = run.append(*(group(f"{adapter}-{n}", version, adapter=adapter) for n in numbers))
    assert {result["status"] for result in results} == {"stored"}, results


def served(run: RunClient, step: int, epoch: int) -> dict[str, Any]:
    """Get a batch, check that its rows and its record agree, and return the record."""
    response = run.batch(step, epoch)
    assert response.status_code == 200, response.text
    body = read_batch(response.content)
    record: dict[str, Any] = run.get(f"batches/{step}/record").json()
    of_group = {entry["group_id"]: entry["adapter"] for entry in record["groups"]}
    for adapter, row in zip(body.meta.adapters, body.micro_batches, strict=True):
        names = {of_group[body.meta.group_ids[at]] for at in row.group_index.tolist()}
        assert names == ({adapter} if adapter else set())
    assert body.meta.adapters_completed == record["adapters_completed"]
    assert record["tokens"] == sum(record["adapter_tokens"].values()) <= 30
    return record


def groups_by_adapter(record: dict[str, Any]) -> list[tuple[str, int]]:
    """Tell how many groups of whom a batch holds, in its order."""
    return list(Counter(entry["adapter"] for entry in record["groups"]).items())


def conserved(run: RunClient) -> None:
    """Every group of the run and of each adapter stands in one place."""
    state = run.state()
    for groups in (state["groups"], *(adapter["groups"] for adapter in state["adapters"].values())):
        places = groups["live"] + groups["in_batches"] + groups["retired"] + groups["dead_lettered"]
        assert groups["stored"] == places + sum(groups["evicted"].values())
    assert state["groups"]["stored"] == sum(adapter["groups"]["stored"] for adapter in state["adapters"].values())


def put(run: RunClient, **config: Any) -> None:
    """Create a run of two adapters whose batches hold 3 groups of 10 tokens."""
    created = run.put(**{"batch": {"tokens_per_batch": 30, "seq_len": 16}, "adapters": TWO} | config)
    assert created.status_code == 201, created.text


def test_adapters_share_steps_in_turns_and_each_completes_its_own_batch(run: RunClient) -> None:
    put(run)
    add(run, "math", range(6))
    add(run, "code", range(3))
    epoch = run.attach()
    first = served(run, 0, epoch)
    assert groups_by_adapter(first) == [("code", 1), ("math", 2)]
    assert first["adapters_completed"] == {"code": 0}
    assert first["adapters"]["math"] == {"step": 0, "version": 0, "groups": 2, "completed": False}
    second = served(run, 1, epoch)  # math was cut: it is first now
    assert groups_by_adapter(second) == [("math", 2), ("code", 1)]
    assert second["adapters_completed"] == {"math": 0, "code": 1}
    state = run.state()["adapters"]
    assert state["math"]["progress"] == {"step": 1, "groups": 0, "groups_per_batch": 4}
    assert state["code"]["progress"] == {"step": 2, "groups": 0, "groups_per_batch": 1}
    assert (state["math"]["step"], state["code"]["step"]) == (0, 0)
    for step in (0, 1):
        assert run.ack(step, epoch).status_code == 200
    state = run.state()["adapters"]
    assert (state["math"]["step"], state["code"]["step"]) == (1, 2)
    conserved(run)


def test_versions_of_an_adapter_count_its_own_steps(run: RunClient) -> None:
    """Staleness, publication and the bound of both go by the adapter's own version."""
    put(run, strategy={"name": "on-policy"}, batch={"tokens_per_batch": 30})
    epoch = run.attach()
    add(run, "code", range(2))
    assert groups_by_adapter(served(run, 0, epoch)) == [("code", 1)]
    early = run.post("policy", epoch=epoch, version=1, adapter="code")
    assert (early.status_code, early.json()["bound"]) == (409, [0, 0])
    assert run.ack(0, epoch).status_code == 200
    assert run.post("policy", epoch=epoch, version=1, adapter="math").status_code == 409
    waiting = run.batch(1, epoch).json()
    assert (waiting["reason"], waiting["adapter"]) == ("no_producers", "math")
    assert run.state()["adapters"]["code"]["waiting"]["reason"] == "awaiting_publication"
    assert run.state()["adapters"]["code"]["groups"]["evicted"] == {"too_stale": 1}
    published = run.post("policy", epoch=epoch, version=1, adapter="code", weights_uri="file:///code-1").json()
    assert published["adapters"] == {"code": 1, "math": 0}
    assert run.get("policy", adapter="code", after=0).json()["weights_uri"] == "file:///code-1"
    add(run, "code", range(2, 3), version=1)
    assert run.append(group("early", 1, adapter="math"))[0]["reason"] == "version_above_published"
    assert [entry["staleness"] for entry in served(run, 1, epoch)["groups"]] == [0]
    conserved(run)


def test_an_unknown_adapter_is_rejected_with_the_adapters_of_the_run(run: RunClient) -> None:
    put(run)
    epoch = run.attach()
    for adapter in ("", "poetry"):
        refused = run.append(group("g", adapter=adapter))[0]
        assert (refused["status"], refused["reason"]) == ("rejected", "unknown_adapter")
        assert "['code', 'math']" in refused["detail"]
        for answer in (
            run.post("tickets", producer="p", count=1, adapter=adapter),
            run.post("policy", epoch=epoch, version=0, adapter=adapter),
        ):
            assert (answer.status_code, answer.json()["bound"]) == (422, ["code", "math"])
    assert run.get("policy", adapter="poetry").status_code == 422
    assert run.state()["groups"]["stored"] == 0


def test_tickets_are_admitted_by_the_adapters_own_window_and_supply(run: RunClient) -> None:
    """Two own batches are open before the first publication; the supply of one ends without the other's."""
    adapters = {"code": {"groups_per_batch": 1, "prompts": 1}, "math": {"groups_per_batch": 4}}
    put(run, adapters=adapters, batch={"tokens_per_batch": 4000, "seq_len": 16})
    math = run.post("tickets", producer="p", count=100, adapter="math").json()
    assert [ticket["prompt_index"] for ticket in math["tickets"]] == list(range(8))
    assert run.post("tickets", producer="p", count=1, adapter="math").json()["waiting"]["reason"] == "rate_limited"
    code = run.post("tickets", producer="p", count=100, adapter="code").json()
    assert [ticket["ticket"] for ticket in code["tickets"]] == ["code/t0-0-1-1"]
    denied = run.post("tickets", producer="p", count=1, adapter="code").json()["waiting"]
    assert (denied["reason"], denied["blocked_on"]) == ("finished", "producers")
    stored = run.append(group(None, adapter="code", ticket=code["tickets"][0]["ticket"]))
    assert stored == [{"group_id": "code/p0", "status": "stored"}]
    assert run.state()["adapters"]["code"]["tickets_out"] == 0
    assert run.state()["adapters"]["math"]["tickets_out"] == 8


def test_metrics_have_a_label_for_the_adapter(run: RunClient) -> None:
    put(run)
    add(run, "math", range(4))
    epoch = run.attach()
    served(run, 0, epoch)
    text = run.http.get("/metrics").text
    for line in (
        f'replaybuf_groups_stored_total{{adapter="math",run="{run.run}"}} 4.0',
        f'replaybuf_tokens_used_total{{adapter="math",run="{run.run}"}} 30.0',
        f'replaybuf_own_batch_groups{{adapter="math",run="{run.run}"}} 3.0',
        f'replaybuf_own_batch_groups_full{{adapter="math",run="{run.run}"}} 4.0',
        f'replaybuf_groups_live{{adapter="code",run="{run.run}"}} 0.0',
        f'replaybuf_own_batch_waiting{{adapter="code",reason="no_producers",run="{run.run}"}} 1.0',
        f'replaybuf_groups_used_by_staleness_total{{adapter="math",run="{run.run}",staleness="0"}} 3.0',
        f'replaybuf_rollout_tokens_count{{adapter="math",kind="stored",run="{run.run}"}} 4.0',
        f'replaybuf_rollout_tokens_sum{{adapter="math",kind="used",run="{run.run}"}} 15.0',
    ):
        assert line in text, line
    math = run.state()["adapters"]["math"]
    assert (math["tokens_used"], math["staleness"]) == (30, {"0": 3})
    assert math["histograms"]["rollout_tokens"]["used"]["count"] == 3
