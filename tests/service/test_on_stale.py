"""`on_stale`: what happens to groups that are too stale, by their source."""

from __future__ import annotations

import json
from typing import Any

import safetensors.numpy

from tests.conftest import RunClient, group

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
