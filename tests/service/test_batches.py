"""Batches: what is served, in which order, with which answers; acks, versions, waiting reasons."""

from __future__ import annotations

import json

import pytest
from safetensors.numpy import load

from replaybuf.wire.batch import read_batch
from tests.conftest import JSON, RunClient, group

ON_POLICY = {"name": "on-policy"}


def test_a_batch_holds_whole_groups_and_describes_itself(run: RunClient) -> None:
    """One body per rank; the metadata and the tensors agree, for any safetensors reader."""
    run.put(batch={"groups_per_batch": 2, "seq_len": 16})
    epoch = run.attach(dp_world_size=2)
    run.append(group("a", tokens=5), group("b", tokens=7))
    bodies = [read_batch(run.batch(0, epoch, dp_rank=rank).content) for rank in (0, 1)]
    assert {body.meta.batch_tokens for body in bodies} == {24}
    assert sum(body.meta.tokens for body in bodies) == 24
    assert len({len(body.micro_batches) for body in bodies}) == 1
    placed = {
        (body.meta.group_ids[g], int(k))
        for body in bodies
        for row in body.micro_batches
        for g, k in zip(row.group_index, row.rollout_index, strict=True)
    }
    assert placed == {(name, k) for name in ("a", "b") for k in (0, 1)}


def test_the_same_request_gets_the_same_bytes(run: RunClient) -> None:
    """Retries are free: bytes do not change, uses are not counted twice."""
    run.put(batch={"groups_per_batch": 1})
    epoch = run.attach()
    run.append(group("a"), group("b"))
    first = run.batch(0, epoch).content
    assert run.batch(0, epoch).content == first
    assert run.state()["groups"]["live"] == 1


def test_with_look_ahead_the_step_after_the_next_can_be_fetched(run: RunClient) -> None:
    """One-step off-policy serves a prefetch; the one after it is refused."""
    run.put(batch={"groups_per_batch": 1})
    epoch = run.attach()
    run.append(group("a"), group("b"), group("c"))
    assert [run.batch(step, epoch).status_code for step in (1, 0, 2)] == [200, 200, 409]


def test_a_long_poll_is_answered_when_the_last_group_arrives(run: RunClient) -> None:
    """The waiting request gets the batch, long before its time is up."""
    import threading

    run.put(batch={"groups_per_batch": 1})
    epoch = run.attach()
    answers: list[int] = []
    poll = threading.Thread(target=lambda: answers.append(run.batch(0, epoch, wait_ms=20000).status_code))
    poll.start()
    run.append(group("a"))
    poll.join()
    assert answers == [200]


@pytest.mark.parametrize(("rank", "status"), [(0, 200), (1, 422), (-1, 422)])
def test_a_rank_outside_the_world_is_refused(run: RunClient, rank: int, status: int) -> None:
    """The bound is the world size the trainer attached with."""
    run.put(batch={"groups_per_batch": 1})
    epoch = run.attach()
    run.append(group("a"))
    assert run.batch(0, epoch, dp_rank=rank).status_code == status


def test_an_older_epoch_is_fenced_from_every_write_and_from_batches(run: RunClient) -> None:
    """Two trainers cannot both hold a run."""
    run.put(batch={"groups_per_batch": 1})
    old = run.attach()
    run.append(group("a"))
    run.batch(0, old)
    new = run.attach()
    assert new == old + 1
    for response in (
        run.batch(0, old),
        run.ack(0, old),
        run.publish(0, old),
        run.post("checkpoints", epoch=old, step=0),
    ):
        assert (response.status_code, response.json()["type"]) == (409, "urn:replaybuf:problem:fenced")
    assert run.batch(0, new).status_code == 200


def test_acks_go_in_order_and_count_once(run: RunClient) -> None:
    """A repeated ack is the same answer; one out of order or for a step never served is 409."""
    run.put(batch={"groups_per_batch": 1})
    epoch = run.attach()
    run.append(group("a"), group("b"))
    assert run.ack(0, epoch).status_code == 409
    run.batch(0, epoch)
    run.batch(1, epoch)
    assert run.ack(1, epoch).status_code == 409
    first = run.ack(0, epoch)
    again = run.ack(0, epoch)
    assert (first.status_code, first.json()) == (again.status_code, again.json())
    assert run.state()["step"] == 1


def test_versions_only_grow_and_never_run_ahead_of_acks(run: RunClient) -> None:
    """The same version is a no-op; a lower one, or one above version(next unacked step), is 409."""
    run.put(batch={"groups_per_batch": 1})
    epoch = run.attach()
    run.append(group("a"))
    assert run.publish(1, epoch).status_code == 409
    run.train(epoch, range(1))
    assert run.publish(1, epoch).status_code == 200
    assert run.publish(0, epoch).status_code == 409


def test_steps_per_publish_sets_the_version_of_a_step(run: RunClient) -> None:
    """With two steps per publication, steps 0 and 1 both train version 0."""
    run.put(batch={"groups_per_batch": 1}, steps_per_publish=2, strategy=ON_POLICY)
    epoch = run.attach()
    run.append(group("a"), group("b"), group("c"))
    run.batch(0, epoch)
    run.ack(0, epoch)
    assert run.publish(1, epoch).status_code == 409
    assert read_batch(run.batch(1, epoch).content).meta.version == 0
    run.ack(1, epoch)
    assert run.publish(1, epoch).status_code == 200


def test_the_record_names_the_groups_of_a_step(run: RunClient) -> None:
    """Groups with versions, staleness and uses; packing figures beside them."""
    run.put(batch={"groups_per_batch": 1, "seq_len": 16})
    epoch = run.attach()
    run.append(group("a"), group("b"))
    run.batch(1, epoch)
    record = run.get("batches/1/record").json()
    assert record["state"] == "assembled"
    assert record["groups"] == [
        {
            "group_id": "b",
            "prompt_id": "test/b",
            "prompt_index": None,
            "adapter": "",
            "policy_version": 0,
            "staleness": 1,
            "times_sampled": 1,
            "tokens": 10,
        }
    ]
    assert (record["micro_batches"], record["dp_world_size"], record["padding_fraction"]) == (1, 1, 0.0)
    assert (record["filler_micro_batches"], record["adapter_tokens"]) == (0, {"": 10})
    assert run.get("batches/2/record").status_code == 404


def test_ranks_are_balanced_by_the_cost_the_trainer_attached_with(run: RunClient) -> None:
    """Rollouts of 8, 4, 4, 4 and 4 tokens: by tokens 12 and 12; by their squares, 64 against 16 each, 8 and 16."""
    run.put(batch={"groups_per_batch": 5, "seq_len": 64}, strategy={"options": {"max_staleness": 3}})
    run.append(*(group(f"g{n}", rollouts=1, tokens=size) for n, size in enumerate((8, 4, 4, 4, 4))))

    names: set[str] = set()

    def tokens(cost: dict[str, float]) -> list[int]:
        epoch = run.attach(dp_world_size=2, resume_step=0, cost=cost)
        answers = [run.batch(0, epoch, dp_rank=rank) for rank in (0, 1)]
        names.update(answer.headers["etag"] for answer in answers)
        return sorted(read_batch(answer.content).meta.tokens for answer in answers)

    assert tokens({"linear": 1.0, "quadratic": 0.0}) == [12, 12]
    assert tokens({"linear": 0.0, "quadratic": 1.0}) == [8, 16]
    assert len(names) == 4, "other bytes have another name"


def test_rows_are_padded_to_the_multiple_alone(run: RunClient) -> None:
    """A row of 10 tokens becomes 12 at a multiple of 4, with the padding as its own last segment."""
    run.put(batch={"groups_per_batch": 1, "seq_len": 64, "pad_to_multiple_of": 4})
    epoch = run.attach()
    run.append(group("a"))
    tensors = load(run.batch(0, epoch).content)
    assert len(tensors["0.input_ids"]) == 12
    assert tensors["0.cu_seqlens"].tolist() == [0, 5, 10, 12]
    assert len(tensors["0.rewards"]) == 2


def test_truncation_evicts_a_prompt_that_fills_a_row(run: RunClient) -> None:
    """The group is evicted as overlong before the batch is decided: nothing leaves its completion a token."""
    run.put(batch={"groups_per_batch": 2, "seq_len": 64, "overlong": "truncate"})
    long = group("long")
    long["rollouts"][0]["prompt_ids"] = [1] * 32
    run.append(long, group("a", tokens=40), group("b"))
    epoch = run.attach(seq_len=32)
    meta = read_batch(run.batch(0, epoch).content).meta
    assert (meta.group_ids, meta.tokens) == (["a", "b"], 2 * 32 + 2 * 5)
    assert run.state()["groups"]["evicted"] == {"overlong": 1}
    assert run.get("batches/0/record").json()["batch_id"] == meta.batch_id


def test_the_service_fills_in_missing_advantages(run: RunClient) -> None:
    """The configured estimator fills; what a producer gave is kept."""
    run.put(batch={"groups_per_batch": 2}, advantage="dr-grpo")
    epoch = run.attach()
    complete_group = group("given")
    for number, rollout in enumerate(complete_group["rollouts"]):
        rollout["advantage"] = 10.0 + number
    run.append(group("filled"), complete_group)
    row = read_batch(run.batch(0, epoch).content).micro_batches[0]
    by_rollout = {
        (int(g), int(k)): float(row.advantages[end - 1])
        for g, k, end in zip(row.group_index, row.rollout_index, row.cu_seqlens[1:], strict=False)
    }
    assert by_rollout == {(0, 0): -0.5, (0, 1): 0.5, (1, 0): 10.0, (1, 1): 11.0}


def test_metadata_does_not_depend_on_the_epoch(run: RunClient) -> None:
    """A takeover by a trainer of the same layout reads the same bytes."""
    run.put(batch={"groups_per_batch": 1})
    epoch = run.attach()
    run.append(group("a"))
    first = run.batch(0, epoch).content
    assert run.batch(0, run.attach()).content == first
    header = json.loads(first[8 : 8 + int.from_bytes(first[:8], "little")])
    assert "epoch" not in header["__metadata__"]["replaybuf"]


def test_unreadable_feedback_is_rejected_with_its_bound(run: RunClient) -> None:
    """The ledger can be read after it, and the same step is acked by feedback within the bound."""
    run.put(batch={"groups_per_batch": 1})
    epoch = run.attach()
    run.append(group("a"))
    assert run.batch(0, epoch).status_code == 200
    for value, reported in [
        ("[" * 64 + "]" * 64, ("feedback", 65, 64)),
        ("[" * 900 + "]" * 900, ("feedback", 901, 64)),
        ("[1, 18446744073709551616]", ("feedback.x[1]", 2**64, [-(2**63), 2**64 - 1])),
    ]:
        body = f'{{"epoch": {epoch}, "feedback": {{"x": {value}}}}}'
        refused = run.http.post(f"{run.path}/batches/0/ack", content=body, headers=JSON)
        assert refused.status_code == 422, refused.text
        assert tuple(refused.json()[key] for key in ("name", "value", "bound")) == reported
    deepest: object = []
    for _ in range(62):
        deepest = [deepest]
    assert run.ack(0, epoch, feedback={"x": deepest}).status_code == 200
    assert run.get("ledger").json()["records"][-1]["feedback"] == {"x": deepest}
