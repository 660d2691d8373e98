"""What PATCH changes on a running run: from the next decision on, in the ledger, and never against a guarantee."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from replaybuf.wire.batch import read_batch
from tests.conftest import RunClient, group, lasting

ONE_STEP = {"name": "one-step-off-policy", "options": {"max_staleness": 1}}
DEEP = {"name": "one-step-off-policy", "options": {"max_staleness": 9}}


def replay(**options: Any) -> dict[str, Any]:
    """The strategy `replay`, oldest first."""
    return {"name": "replay", "options": {"order": "fifo", "look_ahead": 1, **options}}


def begin(run: RunClient, strategy: dict[str, Any], groups: int = 2, **config: Any) -> int:
    """Create a run of 2 groups per batch with so many groups stored; return the epoch."""
    assert run.put(batch={"groups_per_batch": 2}, strategy=strategy, **config).status_code == 201
    run.append(*(group(f"g{number}") for number in range(groups)))
    return run.attach()


def patch(run: RunClient, **changes: Any) -> httpx.Response:
    """Change the run."""
    return run.http.patch(run.path, json=changes)


def uses(response: httpx.Response) -> dict[str, int]:
    """Read off a batch which groups it holds, and for which time they are used."""
    assert response.status_code == 200, response.text
    batch = read_batch(response.content)
    (row,) = batch.micro_batches
    named = [batch.meta.group_ids[position] for position in row.group_index.tolist()]
    return dict(zip(named, row.times_sampled.tolist(), strict=True))


def refused(run: RunClient, status: int, name: str, **changes: Any) -> dict[str, Any]:
    """Try to change the run; nothing of it may have changed. Return the problem."""
    before, ledger = run.state(), len(run.get("ledger").json()["records"])
    response = patch(run, **changes)
    assert (response.status_code, response.json()["name"]) == (status, name), response.text
    assert lasting(run.state()) == lasting(before)
    assert len(run.get("ledger").json()["records"]) == ledger
    problem: dict[str, Any] = response.json()
    return problem


def test_the_size_of_batches_changes_from_the_next_unassembled_step_on(run: RunClient) -> None:
    """The batch that is out, and the one made ahead, keep their groups; the change is in the ledger."""
    epoch = begin(run, DEEP, groups=11)
    assert len(uses(run.batch(0, epoch))) == len(uses(run.batch(1, epoch))) == 2
    assert patch(run, batch={"groups_per_batch": 3}).status_code == 200
    assert len(uses(run.batch(1, epoch))) == 2
    run.ack(0, epoch)
    assert len(uses(run.batch(2, epoch))) == 3
    changed = [record for record in run.get("ledger").json()["records"] if record["type"] == "CONFIG"][-1]
    assert changed["config"]["batch"]["groups_per_batch"] == 3
    assert patch(run, batch={"groups_per_batch": None, "tokens_per_batch": 40}).status_code == 200
    run.ack(1, epoch)
    assert len(uses(run.batch(3, epoch))) == 4  # of 10 tokens each
    assert patch(run, batch={"groups_per_batch": 2}).status_code == 200
    before = len(run.get("ledger").json()["records"])
    assert patch(run, batch={"groups_per_batch": 2}).status_code == 200
    assert len(run.get("ledger").json()["records"]) == before


def test_a_batch_that_was_prepared_for_the_size_before_is_made_again(run: RunClient) -> None:
    """The service prepares step 2 after step 1 was served; nothing of it was decided."""
    epoch = begin(run, DEEP, groups=9)
    run.batch(0, epoch)
    run.ack(0, epoch)
    run.batch(1, epoch)
    run.ack(1, epoch)
    assert patch(run, batch={"groups_per_batch": 5}).status_code == 200
    assert len(uses(run.batch(2, epoch))) == 5


def test_a_changed_time_out_and_tail_hold_at_once(run: RunClient) -> None:
    epoch = begin(run, ONE_STEP, groups=1)
    assert "timeout_in_s" not in run.batch(0, epoch).json()
    assert patch(run, batch={"timeout_s": 0.1}).status_code == 200
    assert run.batch(0, epoch, wait_ms=30_000).status_code == 200
    assert patch(run, batch={"timeout_s": None, "tail": "drop"}).status_code == 200
    config = run.state()["config"]["batch"]
    assert (config["timeout_s"], config["tail"], config["groups_per_batch"]) == (None, "drop", 2)


@pytest.mark.parametrize(
    ("status", "name", "batch"),
    [
        (422, "batch.tokens_per_batch", {"tokens_per_batch": 3}),
        (422, "batch.tokens_per_batch", {"groups_per_batch": None, "tokens_per_batch": None}),
        (422, "batch.min_groups", {"min_groups": 3}),
        (422, "batch.tail", {"timeout_s": 5, "tail": "drop"}),
        (422, "limits.max_tokens_live", {"groups_per_batch": 500}),
        (409, "batch.tokens_per_batch", {"tokens_per_batch": 9}),
        (409, "batch.tokens_per_batch", {"tokens_per_batch": {"per_rank": 9}}),
    ],
)
def test_a_size_of_batches_with_which_the_run_would_stop_is_refused(
    run: RunClient, status: int, name: str, batch: dict[str, Any]
) -> None:
    """A live group has 10 tokens."""
    begin(run, ONE_STEP, groups=1, group_size=2, limits={"max_tokens_live": 1000})
    refused(run, status, name, batch=batch)


def test_a_budget_per_rank_follows_the_layout_of_the_trainer(run: RunClient) -> None:
    """Groups of 10 tokens, 20 for each rank; a batch that was made keeps its groups in another layout."""
    assert run.put(batch={"tokens_per_batch": {"per_rank": 20}, "seq_len": 16}, strategy=DEEP).status_code == 201
    assert run.state()["waiting"]["need"] == {"groups": 0, "tokens": 20}
    run.append(*(group(f"g{number}") for number in range(12)))
    epoch = run.attach(dp_world_size=2)
    assert run.batch(0, epoch).status_code == 200
    assert len(run.get("batches/0/record").json()["groups"]) == 4
    epoch = run.attach(dp_world_size=1)
    assert run.batch(0, epoch).status_code == 200
    assert len(run.get("batches/0/record").json()["groups"]) == 4
    run.ack(0, epoch)
    assert run.batch(1, epoch).status_code == 200
    assert len(run.get("batches/1/record").json()["groups"]) == 2
    assert run.state()["config"]["batch"]["tokens_per_batch"] == {"per_rank": 20}


def test_a_layout_too_small_for_a_live_group_or_too_large_for_the_limits_is_refused(run: RunClient) -> None:
    batch = {"tokens_per_batch": {"per_rank": 8}, "seq_len": 16}
    assert run.put(batch=batch, strategy=ONE_STEP, limits={"max_tokens_live": 40}).status_code == 201
    assert run.append(group("large"))[0]["reason"] == "over_budget"
    run.attach(dp_world_size=2)
    assert run.append(group("large"))[0]["status"] == "stored"
    small = run.post("attach", dp_world_size=1, resume_step=0)
    assert (small.status_code, small.json()["value"], small.json()["bound"]) == (409, 8, 10)
    large = run.post("attach", dp_world_size=6, resume_step=0)
    assert (large.status_code, large.json()["name"], large.json()["bound"]) == (422, "limits.max_tokens_live", 48)
    assert run.state()["epoch"] == 1


def test_from_replay_to_single_use_and_back_with_half_used_groups_and_a_batch_ahead(run: RunClient) -> None:
    """409 as long as a batch that is out, or ahead, uses a group for the second time; uses are kept both ways."""
    epoch = begin(run, replay(max_uses=3, max_staleness=9))
    assert uses(run.batch(1, epoch)) == {"g0": 2, "g1": 2}
    problem = refused(run, 409, "max_uses", strategy=ONE_STEP)
    assert (problem["value"], problem["bound"]) == (1, 2)
    run.ack(0, epoch)
    refused(run, 409, "max_uses", strategy=ONE_STEP)
    run.ack(1, epoch)
    assert patch(run, strategy=ONE_STEP).status_code == 200
    counts = run.state()["groups"]
    assert (counts["live"], counts["in_batches"]) == (0, 2)
    run.publish(1, epoch)
    run.publish(2, epoch)
    run.append(group("n2", 2), group("m2", 2))
    assert uses(run.batch(2, epoch)) == {"n2": 1, "m2": 1}, "the half-used are used no more"
    assert patch(run, strategy=replay(max_uses=3, max_staleness=9)).status_code == 200
    run.ack(2, epoch)
    assert uses(run.batch(3, epoch)) == {"g0": 3, "g1": 3}, "least recently used, and once more only"
    records = [record for record in run.get("ledger").json()["records"] if record["type"] == "CONFIG"]
    assert [record["config"]["strategy"]["name"] for record in records] == ["replay", "one-step-off-policy", "replay"]
    assert [record["max_uses"] for record in records] == [3, 1, 3]


def test_max_staleness_below_an_unacked_batch_is_rejected_and_a_lower_one_evicts(
    run: RunClient,
) -> None:
    """What was evicted stays so when the bound is raised again."""
    epoch = begin(run, replay(max_uses=9, max_staleness=4))
    run.train(epoch, range(3))
    assert run.batch(3, epoch).status_code == 200
    problem = refused(run, 409, "max_staleness", strategy=replay(max_uses=9, max_staleness=2))
    assert (problem["value"], problem["bound"]) == (2, 3)
    run.ack(3, epoch)
    assert patch(run, strategy=replay(max_uses=9, max_staleness=2)).status_code == 200
    assert (run.state()["groups"]["live"], run.batch(4, epoch).json()["reason"]) == (0, "all_stale")
    assert patch(run, strategy=replay(max_uses=9, max_staleness=9)).status_code == 200
    assert run.state()["groups"]["live"] == 0


def test_a_prefetched_batch_is_served_after_a_change_to_no_look_ahead(run: RunClient) -> None:
    """Two steps per publication: on-policy allows what was prefetched, and would not have made it yet."""
    epoch = begin(run, ONE_STEP, groups=6, steps_per_publish=2)
    ahead = run.batch(1, epoch).content
    assert patch(run, strategy={"name": "on-policy"}).status_code == 200
    assert run.batch(1, epoch).content == ahead
    run.ack(0, epoch)
    assert run.batch(1, epoch).content == ahead
    assert run.batch(2, epoch).json()["reason"] == "awaiting_ack"


def test_a_rewind_redelivers_batches_of_older_bounds_and_the_run_can_be_paused(run: RunClient) -> None:
    """Acked batches stand as they were; only a change of strategy is held against them."""
    epoch = begin(run, replay(max_uses=2, max_staleness=9))
    bodies = run.train(epoch, range(2))
    assert patch(run, strategy=replay(max_uses=1, max_staleness=9)).status_code == 200
    epoch = run.attach(resume_step=0)
    assert [run.batch(step, epoch).content for step in (0, 1)] == bodies
    for state in ("paused", "running"):
        assert patch(run, state=state).status_code == 200
    refused(run, 409, "max_uses", strategy=replay(max_uses=1, max_staleness=8))


def test_a_lower_limit_keeps_live_groups_and_rejects_new_ones(run: RunClient) -> None:
    """Smaller than a batch it is refused, as at the start: no batch would ever be full."""
    epoch = begin(run, ONE_STEP, groups=4, group_size=2)
    refused(run, 422, "limits.max_tokens_live", limits={"max_tokens_live": 7})
    assert patch(run, limits={"max_tokens_live": 30}).status_code == 200
    assert run.state()["tokens"]["live"] == 40
    assert run.post("groups", groups=[group("more")]).status_code == 429
    assert run.batch(0, epoch).status_code == 200
    assert run.append(group("more"))[0]["status"] == "stored"


def test_a_patch_keeps_omitted_limits_and_null_resets_one(run: RunClient) -> None:
    """A change of one bound used to switch the others off."""
    begin(run, ONE_STEP, limits={"max_tokens_live": 200_000, "max_bytes_live": 90_000_000})

    def bounds(**changes: Any) -> tuple[int | None, int | None, int]:
        limits = patch(run, limits=changes).json()["config"]["limits"]
        return limits["max_tokens_live"], limits["max_bytes_live"], limits["max_group_bytes"]

    assert bounds(max_group_bytes=1_000_000) == (200_000, 90_000_000, 1_000_000)
    assert bounds(max_bytes_live=None) == (200_000, None, 1_000_000)
    assert bounds(max_group_bytes=None) == (200_000, None, 67_108_864)
    assert bounds(max_tokens_live=None, max_bytes_live=80_000_000) == (None, 80_000_000, 67_108_864)
    problem = refused(run, 422, "limits.max_group_bytes", limits={"max_group_bytes": 0})
    assert problem["value"] == 0
    assert run.http.patch(run.path, json={"limits": {"max_tokens": 1}}).status_code == 400


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"limits": {}},
        {"limits": {"max_tokens_live": 200_000}},
        {"limits": None, "filters": None, "strategy": None, "state": None},
        {"filters": []},
        {"strategy": ONE_STEP},
        {"strategy": {}},
        {"state": "running"},
    ],
    ids=str,
)
def test_a_patch_without_change_writes_no_record(run: RunClient, change: dict[str, Any]) -> None:
    begin(run, ONE_STEP, limits={"max_tokens_live": 200_000})
    before, records = run.state(), run.get("ledger").json()
    answer = patch(run, **change)
    assert (answer.status_code, lasting(answer.json())) == (200, lasting(before))
    assert run.get("ledger").json() == records
    assert patch(run, state="paused").status_code == patch(run, state="paused").status_code == 200
    assert [record["type"] for record in run.get("ledger").json()["records"]].count("CONFIG") == 2


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"strategy": replay(max_uses=1, cooldown=1)}, "strategy.options.cooldown"),
        ({"strategy": replay(max_uses="two")}, "strategy.options"),
        ({"strategy": {"name": "nobody"}}, "strategy"),
        ({"filters": [{"name": "nobody"}]}, "filter"),
        ({"limits": {"max_group_bytes": 99}}, "limits.max_group_bytes"),
        ({"strategy": replay(samples_per_insert=2, error_buffer=1.5)}, "strategy.options.error_buffer"),
    ],
    ids=str,
)
def test_a_patch_is_checked_like_a_new_configuration(run: RunClient, change: dict[str, Any], name: str) -> None:
    begin(run, ONE_STEP)
    refused(run, 422, name, **change)


def test_a_dry_run_shows_the_change_and_changes_nothing(run: RunClient) -> None:
    """The status as it would be; neither the run nor its ledger changes."""
    begin(run, ONE_STEP)
    before, records = lasting(run.state()), run.get("ledger").json()["records"]
    changes = {"strategy": DEEP, "state": "paused"}
    shown = run.http.patch(run.path, json=changes, params={"dry_run": "true"}).json()
    assert (shown["state"], shown["strategy"], shown["config"]["strategy"]) == ("paused", DEEP, DEEP)
    assert (lasting(run.state()), run.get("ledger").json()["records"]) == (before, records)
    assert {name: shown["config"][name] for name in ("batch", "limits")} == {
        name: before["config"][name] for name in ("batch", "limits")
    }


def test_a_dry_run_without_effect_or_against_a_bound_answers_like_the_change(run: RunClient) -> None:
    """The state as it is; and the same error."""
    begin(run, ONE_STEP)
    same = run.http.patch(run.path, json={"strategy": ONE_STEP}, params={"dry_run": "true"})
    assert lasting(same.json()) == lasting(run.state())
    wrong = {"strategy": {"name": "nobody"}}
    refused = [run.http.patch(run.path, json=wrong, params=query) for query in ({}, {"dry_run": "true"})]
    assert refused[0].status_code == refused[1].status_code >= 400
    assert refused[0].json() == refused[1].json()
