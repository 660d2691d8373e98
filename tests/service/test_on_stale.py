"""`on_stale`: what happens to groups that are too stale, by their source."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import safetensors.numpy

from tests.conftest import RunClient, ServeProcess, group

ONE_STEP = {"name": "one-step-off-policy", "options": {"max_staleness": 1}}
TRAINED = 3
"""Steps before the first group of a test: then version 3 is published."""


def start(run: RunClient, **config: Any) -> int:
    """Train some steps of one plain group each; return the epoch."""
    created = run.put(batch={"groups_per_batch": 1, "seq_len": 64}, strategy=ONE_STEP, **config)
    assert created.status_code == 201, created.text
    epoch = run.attach()
    for step in range(TRAINED):
        run.append(group(f"plain{step}", version=step))
        run.train(epoch, range(step, step + 1))
    return epoch


def half_old(group_id: str, source: str) -> dict[str, Any]:
    """A group of two rollouts with the rewards 1 and 0: one of version 0, one of version 3."""
    made = group(group_id, rollouts=2, tokens=8, metadata={"source": source})
    old, fresh = made["rollouts"]
    old |= {"reward": 1.0, "advantage": None}
    fresh |= {"reward": 0.0, "advantage": None, "version_spans": [[3, 0, 6]]}
    return made


def test_a_masked_group_trains_its_fresh_tokens_with_the_rewards_of_the_old_ones(run: RunClient) -> None:
    """Groups of other sources, and groups without a fresh token, are dropped as ever."""
    epoch = start(run, on_stale={"code": "mask"})
    run.append(half_old("kept", "code"), half_old("other", "math"), group("old", metadata={"source": "code"}))
    assert run.state()["groups"]["evicted"] == {"too_stale": 2}
    response = run.batch(TRAINED, epoch)
    assert response.status_code == 200, response.text
    row = safetensors.numpy.load(response.content)
    length = int.from_bytes(response.content[:8], "little")
    meta = json.loads(json.loads(response.content[8 : 8 + length])["__metadata__"]["replaybuf"])
    assert (meta["group_ids"], meta["batch_masked_tokens"]) == (["kept"], 6)
    by_rollout = dict(zip(row["0.rollout_index"].tolist(), row["0.cu_seqlens"].tolist(), strict=False))
    old, fresh = (slice(by_rollout[k], by_rollout[k] + 8) for k in range(2))
    assert not row["0.loss_mask"][old].any() and row["0.loss_mask"][fresh].sum() == 6
    # The reward of the old rollout is the reason why the fresh one is below the mean.
    assert (row["0.advantages"][fresh][row["0.loss_mask"][fresh] == 1] < 0).all()
    record = run.get(f"batches/{TRAINED}/record").json()
    assert (record["stale_token_mask"], record["masked_tokens"], record["groups"][0]["staleness"]) == (1, 6, 3)
    assert run.ack(TRAINED, epoch).is_success


def take_ticket(run: RunClient) -> dict[str, Any]:
    """Take one ticket."""
    (ticket,) = run.post("tickets", producer="p", count=1).json()["tickets"]
    return dict(ticket)


def made(ticket: dict[str, Any], version: int) -> dict[str, Any]:
    """Make the group of a ticket."""
    return group(None, version, ticket=ticket["ticket"])


def test_a_dropped_prompt_is_issued_again_once_whenever_the_server_is_killed(
    own_service: ServeProcess, connect: Callable[[str, str], RunClient]
) -> None:
    """Between the drop and the ticket, and while the ticket is out; a rewind does not bring the dropped group back."""
    run = connect(own_service.url, "again")
    assert run.put(batch={"groups_per_batch": 1}, strategy=ONE_STEP, on_stale="reissue").is_success
    epoch = run.attach()
    slow = take_ticket(run)
    for version in range(2):
        run.append(made(take_ticket(run), version))
        run.train(epoch, range(version, version + 1))
    assert run.append(made(slow, 0)) == [{"group_id": "p0", "status": "stored"}]

    def restart() -> RunClient:
        own_service.kill()
        return connect(own_service.start().url, "again")

    run = restart()
    tickets = run.state()["tickets"]
    assert (tickets["reissued"], tickets["awaiting_reissue"]) == (1, 1)
    again = take_ticket(run)
    assert (again["prompt_index"], again["reissue"], again["ticket"]) == (0, 1, "t0-0-1-1-1")
    run = restart()
    assert take_ticket(run)["prompt_index"] == 3, "the ticket is out already"
    forged = made(again, 2) | {"ticket": "t0-1-1-1-1"}
    results = run.append(made(slow, 0), made(again, 2), made(again, 2), forged)
    assert [result["status"] for result in results] == ["duplicate", "stored", "duplicate", "rejected"]
    assert results[1]["group_id"] == "p0-1" and results[3]["reason"] == "unknown_ticket"
    run.train(epoch, range(2, 3))
    assert [used["group_id"] for used in run.get("batches/2/record").json()["groups"]] == ["p0-1"]
    run.attach(resume_step=1, on_resume="resample")
    groups = run.state()["groups"]
    assert (groups["live"], groups["evicted"]) == (1, {"lost_lineage": 1, "too_stale": 1})
    coverage = run.state()["coverage"]
    assert (coverage["issued"], "awaiting_reissue" in run.state()["tickets"]) == (5, False)


def test_an_operator_changes_the_policy_of_a_live_run(run: RunClient) -> None:
    """Groups that the old policy kept are evicted; those that become too stale later are issued again."""
    epoch = start(run, on_stale="mask")
    run.append(half_old("kept", "code"), half_old("waits", "code"))
    assert run.batch(TRAINED, epoch).status_code == 200
    refused = run.http.patch(run.path, json={"on_stale": "reissue"})
    assert (refused.status_code, refused.json()["name"]) == (409, "max_staleness"), (
        "a batch with old tokens is not acked"
    )
    assert run.ack(TRAINED, epoch).is_success
    changed = run.http.patch(run.path, json={"on_stale": "reissue", "max_reissues": 3})
    assert changed.status_code == 200, changed.text
    config = changed.json()["config"]
    assert (config["on_stale"], config["max_reissues"]) == ("reissue", 3)
    assert run.state()["groups"]["evicted"] == {"too_stale": 1}
    slow = take_ticket(run)
    run.append(made(slow, 0))
    assert run.state()["tickets"]["awaiting_reissue"] == 1
    assert take_ticket(run)["reissue"] == 1
