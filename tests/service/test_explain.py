"""Why a batch: what it was chosen from, what was dropped before, the order, the packing; also after a restart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from replaybuf.store import keys
from replaybuf.wire.batch import read_batch
from tests.conftest import RunClient, ServeProcess, group

Connect = Callable[[str, str], RunClient]
FLAT = {"name": "zero-variance"}


def explain(run: RunClient, step: int, **query: Any) -> dict[str, Any]:
    """Return the explanation of a batch."""
    answer = run.get(f"batches/{step}/explain", **query)
    assert answer.status_code == 200, answer.text
    explanation: dict[str, Any] = answer.json()
    return explanation


def flat(name: str) -> dict[str, Any]:
    """Build a group whose rollouts have the same reward."""
    built = group(name)
    for rollout in built["rollouts"]:
        rollout["reward"] = 1.0
    return built


def start(run: RunClient, **config: Any) -> int:
    """Create a run with two groups per batch, attach two ranks, and store four good groups and two flat ones."""
    created = run.put(**{"batch": {"groups_per_batch": 2, "seq_len": 16}, "filters": [FLAT]} | config)
    assert created.status_code == 201, created.text
    epoch = run.attach(dp_world_size=2)
    run.append(group("a", tokens=5), group("b", tokens=6, rollouts=3), flat("c"), group("d"), flat("e"), group("f"))
    run.append(group("wrong", policy_version=9))
    return epoch


def test_a_batch_is_explained_from_its_candidates_to_its_rows(run: RunClient) -> None:
    """Six groups came, the filter dropped two, an append was rejected, the batch took two of the four others."""
    epoch = start(run)
    assert run.batch(0, epoch).status_code == 200
    answer = explain(run, 0)
    assert (answer["state"], answer["version"], answer["strategy"]) == ("assembled", 0, "one-step-off-policy")
    assert (answer["filters"], answer["seed"]) == (["zero-variance"], [0, 0, 0])
    assert answer["since_last_batch"]["stored"] == 6
    assert answer["since_last_batch"]["dropped"] == {"zero_variance": 2}
    assert sum(answer["since_last_batch"]["rejected"].values()) == 1
    candidates = answer["candidates"][""]
    assert (candidates["live"], candidates["usable"], candidates["budget"]["groups"]) == (4, 4, 2)
    assert "left_out" not in candidates and "unknown" not in answer
    assert [entry["group_id"] for entry in answer["choice"]["first"]] == ["a", "b"]
    assert answer["choice"]["first"][1]["reward_mean"] == pytest.approx(1 / 3)
    assert answer["choice"]["first"][0]["age_s"] >= 0
    assert (answer["choice"]["groups"], answer["choice"]["rollouts"], answer["choice"]["staleness"]) == (2, 5, {"0": 2})


def test_the_packing_is_that_of_the_bodies(run: RunClient) -> None:
    """Rows of each rank: as many rollouts and tokens as the rank received."""
    epoch = start(run)
    bodies = [read_batch(run.batch(0, epoch, dp_rank=rank).content) for rank in range(2)]
    packing = explain(run, 0)["packing"]
    assert (packing["dp_world_size"], packing["seq_len"]) == (2, 16)
    for body, rank in zip(bodies, packing["ranks"], strict=True):
        assert (rank["tokens"], rank["rollouts"]) == (body.meta.tokens, body.meta.rollouts)
        assert len(rank["rows"]) == body.meta.micro_batches == packing["micro_batches"]
        received = [len(row.rollout_index) for row in body.micro_batches]
        assert [row["rollouts"] for row in rank["rows"]] == received
        assert rank["fill"] == pytest.approx(rank["tokens"] / (16 * packing["micro_batches"]), abs=1e-4)
    assert sum(rank["tokens"] for rank in packing["ranks"]) == explain(run, 0)["choice"]["tokens"]


def test_counts_begin_again_after_each_batch(run: RunClient) -> None:
    epoch = start(run)
    run.train(epoch, range(1))
    run.append(flat("g"), group("h"))
    assert run.batch(1, epoch).status_code == 200
    answer = explain(run, 1)
    assert answer["since_last_batch"] == {"stored": 2, "dropped": {"zero_variance": 1}, "rejected": {}}
    assert (answer["candidates"][""]["live"], answer["candidates"][""]["usable"]) == (3, 3)
    assert [entry["group_id"] for entry in explain(run, 1, limit=1)["choice"]["first"]] == ["d"]
    assert explain(run, 0)["state"] == "acked"


def test_the_next_step_answers_why_it_waits(run: RunClient) -> None:
    """With the counts of now; later steps and unknown ones are not found."""
    start(run, batch={"groups_per_batch": 9})
    answer = explain(run, 0)
    assert (answer["state"], answer["waiting"]["reason"]) == ("waiting", "too_few_groups")
    assert answer["waiting"]["have"]["groups"] == answer["candidates"][""]["usable"] == 4
    assert answer["since_last_batch"]["dropped"] == {"zero_variance": 2}
    assert "choice" not in answer and "packing" not in answer
    later = run.get("batches/1/explain")
    assert (later.status_code, later.json()["bound"]) == (404, 0)
    assert run.get("batches/0/explain", generation=3).status_code == 404
    assert run.get("batches/x/explain").status_code == 400
    run.append(*(group(f"more{n}") for n in range(5)))
    assert explain(run, 0)["state"] == "ready"


def test_groups_that_rules_leave_out_are_counted_by_rule(run: RunClient) -> None:
    """Groups without a required column stay live and cannot be chosen."""
    strategy = {"name": "on-policy", "options": {"requires": ["ref_logprobs"]}}
    start(run, strategy=strategy, filters=[])
    columns = {"columns": {"ref_logprobs": [[-0.5] * 3] * 2}}
    assert run.http.put(f"{run.path}/groups/d/columns", json=columns).status_code == 200
    answer = explain(run, 0)
    assert answer["waiting"]["reason"] == "awaiting_columns"
    assert answer["candidates"][""]["left_out"] == {"missing_columns": 5}
    assert (answer["candidates"][""]["live"], answer["candidates"][""]["usable"]) == (6, 1)


def test_each_adapter_has_its_own_candidates(run: RunClient) -> None:
    adapters = {"code": {"groups_per_batch": 1}, "math": {"groups_per_batch": 2}}
    assert run.put(batch={"tokens_per_batch": 100, "seq_len": 32}, adapters=adapters).status_code == 201
    epoch = run.attach()
    run.append(*(group(f"m{n}", adapter="math") for n in range(3)), group("c0", adapter="code"))
    assert run.batch(0, epoch).status_code == 200
    answer = explain(run, 0)
    usable = {name: counts["usable"] for name, counts in answer["candidates"].items()}
    assert usable == {"code": 1, "math": 3}
    assert answer["choice"]["adapters"] == {"code": 1, "math": 2}
    assert {row["adapter"] for row in answer["packing"]["ranks"][0]["rows"]} == {"code", "math"}


def test_a_killed_service_still_explains_its_batches(own_service: ServeProcess, connect: Connect) -> None:
    """kill -9 after the batch: the answer is the same, and the counts of the next batch begin at it."""
    run = connect(own_service.url, "killed")
    epoch = start(run)
    run.train(epoch, range(1))
    before = explain(run, 0)
    own_service.kill()
    again = connect(own_service.start().url, "killed")
    assert explain(again, 0) == before
    again.append(flat("late"))
    assert again.batch(1, epoch).status_code == 200
    assert explain(again, 1)["since_last_batch"]["dropped"] == {"zero_variance": 1}


def test_a_freed_batch_is_explained_from_the_index(run: RunClient) -> None:
    """Its payloads are gone; its rows follow from the lengths in the index."""
    epoch = start(run)
    run.train(epoch, range(2))
    before = explain(run, 0)
    assert run.post("checkpoints", epoch=epoch, step=2).status_code == 200
    assert run.batch(0, epoch).status_code in (409, 410)
    assert explain(run, 0) == before
    assert run.get("batches/7/explain").status_code == 404


def test_a_voided_batch_is_explained_by_its_generation(run: RunClient) -> None:
    epoch = start(run)
    run.train(epoch, range(1))
    before = explain(run, 0)
    run.attach(0, on_resume="resample", dp_world_size=2)
    answer = explain(run, 0, generation=0)
    assert (answer["state"], answer["choice"]) == ("voided", before["choice"])
    assert explain(run, 0)["state"] == "ready"


def test_a_batch_without_its_counts_says_what_is_unknown(own_service: ServeProcess, connect: Connect) -> None:
    """As in a restored run: the record alone explains the order and the packing."""
    run = connect(own_service.url, "older")
    epoch = start(run)
    run.train(epoch, range(2))
    with redis.Redis(unix_socket_path=own_service.valkey_socket) as server:
        server.xdel(keys.candidates("older"), server.xrange(keys.candidates("older"))[0][0])
    first, second = explain(run, 0), explain(run, 1)
    assert [line.partition(":")[0] for line in first["unknown"]] == ["candidates"]
    assert "candidates" not in first and first["choice"]["groups"] == 2 and first["packing"]["ranks"]
    assert [line.partition(":")[0] for line in second["unknown"]] == ["since_last_batch"]
    assert second["candidates"][""]["usable"] == 2
