"""Batches of an export without a service: the bytes that the service sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from replaybuf import Client
from replaybuf.client.exports.export import export_run
from replaybuf.client.exports.reader import ExportReader
from replaybuf.client.exports.steps import RecordedSteps, stored_batches
from replaybuf.client.offline import Layout, batch_of_groups
from replaybuf.wire.batch import read_batch
from tests.builders import group as group_of
from tests.builders import rollout
from tests.conftest import RunClient, ServeProcess, group
from tests.waiting import eventually

AGES = ("new", 5), ("old", 3)


def exported(service: ServeProcess, run: RunClient, folder: Path) -> ExportReader:
    with Client(service.url, run.run) as client:
        export_run(client, run.run, folder, lambda done, total: None)
    return ExportReader(folder)


def put(run: RunClient, **config: Any) -> None:
    options = {"max_staleness": 9, "max_uses": 2, "order": "fifo"}
    defaults: dict[str, Any] = {
        "batch": {"groups_per_batch": 2, "seq_len": 64, "pad_to_multiple_of": 8},
        "strategy": {"name": "replay", "options": options},
        "stale_token_mask": 0,
    }
    run.put(**defaults | config)


def with_columns(name: str, version: int, tokens: int) -> dict[str, Any]:
    """A group whose rollouts have all optional columns, spans of two versions and masked tokens."""
    made = group(name, version, tokens=tokens)
    for fields in made["rollouts"]:
        count = len(fields["completion_ids"])
        fields["completion_mask"] = [1] * (count - 1) + [0]
        for column in ("ref_logprobs", "old_logprobs", "teacher_logprobs", "token_advantages"):
            fields[column] = np.linspace(-1.1, -0.1, count).tolist()
        fields |= {"version_spans": [[version, 0, 2], [version + 1, 2, count]], "reward": 0.1, "temperature": 0.7}
    return made


def test_the_steps_of_an_export_have_the_bytes_that_the_service_sent(
    service: ServeProcess, run: RunClient, tmp_path: Path
) -> None:
    """With all optional columns, groups that are used twice, and stale tokens that leave the loss mask."""
    put(run)
    epoch = run.attach(
        cost={"linear": 1.0, "quadratic": 0.01}, lengths=True, reward_parts=True, per_token_versions=True
    )
    run.append(group("a", tokens=12), group("b", tokens=9))
    bodies = run.train(epoch, range(1))
    run.append(with_columns("c", 0, tokens=7), group("d", 1, tokens=20))
    bodies += run.train(epoch, range(1, 3))
    steps = RecordedSteps(exported(service, run, tmp_path / "out"))
    assert steps.steps == [0, 1, 2] and not steps.missing
    assert [bytes(steps.body(step)) for step in range(3)] == bodies
    assert any(read_batch(body).meta.batch_masked_tokens for body in bodies)


def test_a_step_has_the_layout_of_the_trainer_that_acked_it(
    service: ServeProcess, run: RunClient, tmp_path: Path
) -> None:
    """Here the trainer came back with two ranks and selected step 1 anew, which voids step 2."""
    put(run)
    run.append(*(group(f"g{number}", tokens=5 + number) for number in range(6)))
    first = run.train(run.attach(), range(3))
    epoch = run.attach(resume_step=1, on_resume="resample", dp_world_size=2, pad_to_multiple_of=16, lengths=True)
    sent = [run.batch(1, epoch, dp_rank=rank).content for rank in range(2)]
    assert run.ack(1, epoch).status_code == 200
    steps = RecordedSteps(exported(service, run, tmp_path / "out"))
    assert steps.steps == [0, 1]
    assert bytes(steps.body(0)) == first[0]
    assert [bytes(steps.body(1, rank, 2)) for rank in range(2)] == sent


def test_steps_whose_bytes_were_freed_are_missing(service: ServeProcess, run: RunClient, tmp_path: Path) -> None:
    put(run, strategy={"name": "one-step-off-policy", "options": {"max_staleness": 9}})
    run.append(*(group(f"g{number}") for number in range(6)))
    epoch = run.attach()
    run.train(epoch, range(2))
    assert run.post("checkpoints", epoch=epoch, step=1, keep=1).status_code == 200
    eventually(lambda: run.get("groups/g0").json()["rollouts"] is None, 30.0)
    steps = RecordedSteps(exported(service, run, tmp_path / "out"))
    assert steps.missing == {0: "g0"}
    assert steps.steps == [1]


def test_all_stored_groups_make_batches_of_the_configured_size(
    service: ServeProcess, run: RunClient, tmp_path: Path
) -> None:
    """Also those that nobody trained, in the order of storing."""
    put(run)
    run.append(*(group(f"g{number}") for number in range(5)))
    reader = exported(service, run, tmp_path / "out")
    metas = [read_batch(body).meta for body in stored_batches(reader)]
    assert [meta.group_ids for meta in metas] == [["g0", "g1"], ["g2", "g3"], ["g4"]]
    assert [meta.step for meta in metas] == [0, 1, 2]
    halves = [read_batch(body).meta for body in stored_batches(reader, 1, 2)]
    assert [meta.batch_rollouts for meta in halves] == [4, 4, 2] and {meta.dp_rank for meta in halves} == {1}


def test_a_token_budget_cuts_stored_groups_into_batches(service: ServeProcess, run: RunClient, tmp_path: Path) -> None:
    put(run, batch={"tokens_per_batch": 45, "seq_len": 64})
    run.append(group("a", tokens=10), group("b", tokens=10), group("c", tokens=20), group("d", tokens=5))
    ids = [read_batch(body).meta.group_ids for body in stored_batches(exported(service, run, tmp_path / "out"))]
    assert ids == [["a", "b"], ["c"], ["d"]]


def test_groups_without_a_ledger_make_a_batch() -> None:
    """Staleness is that of the version given; a rank has its own rollouts only."""
    groups = [group_of(rollout(), rollout(), group_id=name, policy_version=version) for name, version in AGES]
    layout = Layout(seq_len=8, dp_world_size=2, pad_to_multiple_of=4)
    ranks = [read_batch(batch_of_groups("r", groups, layout, step=5, version=5, dp_rank=rank)) for rank in range(2)]
    assert [batch.meta.batch_loss_tokens for batch in ranks] == [12, 12]
    assert sorted(int(age) for batch in ranks for row in batch.micro_batches for age in row.staleness) == [0, 0, 2, 2]
    assert {len(row.input_ids) % 4 for batch in ranks for row in batch.micro_batches} == {0}
    assert ranks[0].meta.step == 5
