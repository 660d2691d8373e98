"""Versions per token, lengths, reward parts and metadata in bodies, and the loss mask without old tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy

from replaybuf.client.client import AsyncClient, Client
from replaybuf.client.direct import DirectBodies
from replaybuf.wire.batch import read_batch
from tests.conftest import RunClient, ServeProcess, group
from tests.valkeys import Valkey
from tests.waiting import eventually

Connect = Callable[[str, str], RunClient]
EXTRAS = {"per_token_versions": True, "lengths": True, "reward_parts": True}
FIRST = 3
"""The first step with groups of several versions: its version is 3."""


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    """A Redis of the test's own."""
    with Valkey(tmp_path / "valkey") as server:
        yield server


@pytest.fixture
def pair(valkey: Valkey, tmp_path: Path) -> Iterator[list[ServeProcess]]:
    """Two servers on that Redis, to be killed."""
    servers = [
        ServeProcess(tmp_path / name, "--redis-url", valkey.url, "--no-balance").start() for name in ("first", "second")
    ]
    yield servers
    for server in servers:
        server.end()


def mixed(number: int) -> dict[str, Any]:
    """A group of three rollouts: tokens of versions 0 to 3 with text of the environment, one version, no spans."""
    made = group(f"m{number}", rollouts=3, tokens=8 + number)
    length = 6 + number
    first, second, third = made["rollouts"]
    first |= {"version_spans": [[0, 0, 2], [1, 2, 3], [2, 3, 5], [3, 5, length]], "rewards": {"style": 0.25}}
    first["completion_mask"] = [int(t % 4 != 1) for t in range(length)]
    second |= {"version_spans": [[3, 0, length]], "rewards": {"style": 0.5}}
    third |= {"rewards": {"style": 0.75}}
    for rollout in made["rollouts"]:
        rollout |= {"ref_logprobs": [-0.25] * length, "advantage": 0.5}
    return made


def versions_of(wire: dict[str, Any]) -> list[list[int]]:
    """List the version of every token of each rollout, -1 for the prompt and for text of the environment."""
    rows = []
    for rollout in wire["rollouts"]:
        length = len(rollout["completion_ids"])
        spans = rollout.get("version_spans") or [[wire["policy_version"], 0, length]]
        completion = [version for version, start, end in spans for _ in range(start, end)]
        sampled = rollout.get("completion_mask") or [1] * length
        versions = [version if bit else -1 for bit, version in zip(sampled, completion, strict=True)]
        rows.append([-1] * len(rollout["prompt_ids"]) + versions)
    return rows


def count_old(made: dict[str, Any], least: int) -> int:
    """Count the sampled tokens of a group with versions below `least`."""
    return sum(-1 < version < least for rollout in versions_of(made) for version in rollout)


def start(run: RunClient, groups: list[dict[str, Any]], per_batch: int, **config: Any) -> int:
    """Train three steps of plain groups, so that version 3 is published; then append `groups`; return the epoch."""
    batch = {"groups_per_batch": per_batch, "seq_len": 64, "pad_to_multiple_of": 8, "overlong": "truncate"}
    strategy = {"name": "one-step-off-policy", "options": {"max_staleness": 5}}
    created = run.put(batch=batch, strategy=strategy, **config)
    assert created.status_code == 201, created.text
    epoch = run.attach()
    run.append(*(group(f"plain{n}") for n in range(FIRST * per_batch)))
    run.train(epoch, range(FIRST))
    assert {result["status"] for result in run.append(*groups)} == {"stored"}
    return epoch


def body_of(run: RunClient, epoch: int, step: int = FIRST, rank: int = 0) -> bytes:
    """Fetch one body."""
    response = run.batch(step, epoch, dp_rank=rank, wait_ms=10_000)
    assert response.status_code == 200, response.text
    return response.content


def tensors_of(body: bytes) -> tuple[dict[str, Any], list[dict[str, npt.NDArray[Any]]]]:
    """Read a body with safetensors alone: its metadata, and the tensors of each micro-batch."""
    length = int.from_bytes(body[:8], "little")
    meta = json.loads(json.loads(body[8 : 8 + length])["__metadata__"]["replaybuf"])
    rows: list[dict[str, Any]] = [{} for _ in range(meta["micro_batches"])]
    for name, tensor in safetensors.numpy.load(body).items():
        number, _, field = name.partition(".")
        rows[int(number)][field] = tensor
    return meta, rows


def check_rows(bodies: list[bytes], groups: list[dict[str, Any]], least: int) -> int:
    """Compare every token of all ranks with the appended groups; return how many tokens are in the loss."""
    by_id, rollout_count, in_loss = {wire["group_id"]: wire for wire in groups}, 0, 0
    for meta, rows in map(tensors_of, bodies):
        for row in rows:
            ends = row["cu_seqlens"].tolist()
            for number, (index, k) in enumerate(zip(row["group_index"], row["rollout_index"], strict=True)):
                wire = by_id[meta["group_ids"][index]]
                span, expected = slice(ends[number], ends[number + 1]), np.array(versions_of(wire)[k], np.int32)
                assert row["token_versions"][span].tolist() == expected.tolist()
                assert row["loss_mask"][span].tolist() == (expected >= least).tolist()
                for name in ("advantages", "inference_logprobs", "ref_logprobs"):
                    assert (row[name][span] != 0).tolist() == (expected >= least).tolist()
                assert row["prompt_lengths"][number] == len(wire["rollouts"][k]["prompt_ids"])
                assert row["completion_lengths"][number] == len(wire["rollouts"][k]["completion_ids"])
                rollout_count += 1
            used = ends[len(row["group_index"])]
            assert (row["token_versions"][used:] == -1).all() and not row["loss_mask"][used:].any()
            in_loss += int(row["loss_mask"].sum())
        assert meta["loss_tokens"] == sum(int(row["loss_mask"].sum()) for row in rows)
    assert rollout_count == sum(len(wire["rollouts"]) for wire in groups)
    return in_loss


@pytest.mark.parametrize(("world", "mask"), [(1, None), (2, 0), (8, 1), (2, 5)])
def test_each_token_has_its_version_and_old_ones_leave_the_loss(
    service: ServeProcess, connect: Connect, world: int, mask: int | None
) -> None:
    """For every rank, with padding, fillers and text of the environment."""
    run = connect(service.url, f"tokens-{world}-{mask}".lower())
    groups = [mixed(0), mixed(3)]
    start(run, groups, 2, stale_token_mask=mask)
    epoch = run.attach(FIRST, dp_world_size=world, **EXTRAS)
    bodies = [body_of(run, epoch, rank=rank) for rank in range(world)]
    least = 0 if mask is None else max(0, FIRST - mask)
    in_loss = check_rows(bodies, groups, least)
    meta = tensors_of(bodies[0])[0]
    assert meta["batch_loss_tokens"] == in_loss
    masked = sum(count_old(made, least) for made in groups)
    assert meta.get("batch_masked_tokens") == (None if mask is None else masked)
    assert meta["batch_reward_mean"] == 1 / 3
    assert meta["batch_reward_parts"] == {"style": {"mean": 0.5, "rollouts": 6}}
    if mask is not None and mask < FIRST:
        assert masked > 0


def test_a_body_is_the_same_from_any_server_in_direct_mode_and_after_a_crash(
    pair: list[ServeProcess], valkey: Valkey, connect: Connect
) -> None:
    """Also after a rewind: a redelivered batch keeps its mask, and the trainer chooses the tensors anew."""
    first, second = (connect(server.url, "main") for server in pair)
    start(first, [mixed(0), mixed(1)], 1, stale_token_mask=1)
    epoch = first.attach(FIRST, **EXTRAS)
    body = body_of(first, epoch)
    assert tensors_of(body)[0]["batch_masked_tokens"] == count_old(mixed(0), 2)
    assert body_of(second, epoch) == body
    with Client(pair[1].url, "main") as client:
        direct = DirectBodies(client, valkey.url)
        built = direct.fetch(FIRST, epoch)
        assert isinstance(built, memoryview) and bytes(built) == body and direct.built == 1
        direct.close()
    pair[0].kill()
    pair[0].start()
    again = connect(pair[0].url, "main")
    assert body_of(again, epoch) == body
    leader = eventually(lambda: next((run for run in (second, again) if run.ack(FIRST, epoch).is_success), None), 30.0)
    assert leader and leader.publish(FIRST + 1, epoch).is_success
    epoch = leader.attach(FIRST, **EXTRAS)
    assert body_of(leader, epoch) == body
    plain = leader.attach(FIRST)
    (row,) = tensors_of(body_of(leader, plain))[1]
    assert not row.keys() & {"token_versions", "prompt_lengths", "completion_lengths"}
    assert row["loss_mask"].tolist() == tensors_of(body)[1][0]["loss_mask"].tolist()


def cut(made: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Cut the completions of a group to so many tokens."""
    rollouts = []
    for rollout in made["rollouts"]:
        lists = {name: rollout[name][:tokens] for name in ("completion_ids", "completion_mask") if name in rollout}
        spans = rollout.get("version_spans", [])
        kept = [[version, start, min(end, tokens)] for version, start, end in spans if start < tokens]
        rollouts.append(rollout | lists | ({"version_spans": kept} if spans else {}))
    return made | {"rollouts": rollouts}


def test_cut_rollouts_keep_versions_and_mask(pair: list[ServeProcess], valkey: Valkey, connect: Connect) -> None:
    """The body counts what is left of them, the record what is stored; in direct mode too."""
    run, stored = connect(pair[0].url, "main"), [mixed(3), mixed(7)]
    start(run, stored, 2, stale_token_mask=0)
    epoch = run.attach(FIRST, dp_world_size=2, seq_len=8, **EXTRAS)
    bodies = [body_of(run, epoch, rank=rank) for rank in range(2)]
    left = [cut(made, 6) for made in stored]
    assert tensors_of(bodies[0])[0]["batch_loss_tokens"] == check_rows(bodies, left, FIRST)
    old_left, old = (sum(count_old(made, FIRST) for made in groups) for groups in (left, stored))
    assert tensors_of(bodies[0])[0]["batch_masked_tokens"] == old_left < old
    assert run.get(f"batches/{FIRST}/record").json()["masked_tokens"] == old
    with Client(pair[0].url, "main") as client:
        direct = DirectBodies(client, valkey.url)
        assert [bytes(direct.fetch(FIRST, epoch, rank)) for rank in range(2)] == bodies  # type: ignore[arg-type]
        assert direct.built == 2
        direct.close()


def test_masked_tokens_are_counted_in_record_ledger_and_metric(pair: list[ServeProcess], connect: Connect) -> None:
    """And they still are after a kill of the server."""
    run = connect(pair[0].url, "main")
    groups = [mixed(0), mixed(2)]
    epoch = start(run, groups, 2, stale_token_mask=1)
    body_of(run, epoch)
    masked = sum(count_old(wire, 2) for wire in groups)
    pair[1].kill()
    for _ in range(2):
        record = run.get(f"batches/{FIRST}/record").json()
        assert (record["stale_token_mask"], record["masked_tokens"]) == (1, masked)
        assert run.get("batches/0/record").json()["masked_tokens"] == 0
        batches = [entry for entry in run.get("ledger").json()["records"] if entry["type"] == "BATCH"]
        assert [batch.get("masked_tokens", 0) for batch in batches] == [0, 0, 12, masked]  # plain groups have version 0
        assert f'replaybuf_tokens_masked_total{{run="main"}} {12 + masked}.0' in run.http.get("/metrics").text
        pair[0].kill()
        pair[0].start()
        run = connect(pair[0].url, "main")


def test_the_age_of_a_token_counts_versions_of_its_adapter(service: ServeProcess, connect: Connect) -> None:
    """The adapters are at versions 2 and 0, and each has tokens of version 0."""
    run = connect(service.url, "tokens-adapters")
    assert run.put(
        batch={"groups_per_batch": None, "tokens_per_batch": 10},
        adapters={"fast": {"groups_per_batch": 1}, "slow": {"groups_per_batch": 1, "steps_per_publish": 9}},
        strategy={"options": {"max_staleness": 5}},
        stale_token_mask=1,
    ).is_success
    epoch = run.attach(per_token_versions=True)
    masked: dict[str, list[int]] = {"fast": [], "slow": []}
    for step in range(6):
        name = ("fast", "slow")[step % 2]
        run.append(group(f"g{step}", adapter=name))
        meta, (row,) = tensors_of(body_of(run, epoch, step))
        masked[meta["adapters"][0]].append(meta["batch_masked_tokens"])
        assert row["token_versions"].max() == 0
        assert int(row["loss_mask"].sum()) == 6 - meta["batch_masked_tokens"]
        assert run.ack(step, epoch).is_success
        if name == "fast":
            run.post("policy", epoch=epoch, version=step // 2 + 1, adapter=name)
    assert masked == {"fast": [0, 0, 6], "slow": [0, 0, 0]}


def test_a_mask_changes_no_group_and_no_count_of_groups(service: ServeProcess, connect: Connect) -> None:
    """A group of old tokens only stays in its batch, without a token in the loss."""
    run = connect(service.url, "tokens-old")
    epoch = start(run, [group("old")], 1, stale_token_mask=2)
    meta, (row,) = tensors_of(body_of(run, epoch))
    assert (meta["batch_loss_tokens"], meta["batch_masked_tokens"], meta["group_ids"]) == (0, 6, ["old"])
    assert not row["loss_mask"].any() and not row["advantages"].any()
    stored = run.get("groups/old").json()
    assert (stored["state"], stored["times_sampled"]) == ("in_batches", 1)
    groups = run.state()["groups"]
    dropped = sum(groups["evicted"].values()) + groups["dead_lettered"]
    assert groups["stored"] == groups["live"] + groups["in_batches"] + groups["retired"] + dropped


def test_parts_of_some_groups_are_averaged_over_those(service: ServeProcess, connect: Connect) -> None:
    """Over all ranks, and no part where no group has one."""
    run = connect(service.url, "tokens-parts")
    first, second = group("a", rollouts=4), group("b", rollouts=2)
    for rollout in first["rollouts"]:
        rollout["rewards"] = {"correct": rollout["reward"], "length": -0.125}
    start(run, [first, second], 2)
    epoch = run.attach(FIRST, dp_world_size=2, reward_parts=True)
    for rank in range(2):
        meta, rows = tensors_of(body_of(run, epoch, rank=rank))
        assert meta["batch_reward_mean"] == 0.5
        correct, length = {"mean": 0.5, "rollouts": 4}, {"mean": -0.125, "rollouts": 4}
        assert meta["batch_reward_parts"] == {"correct": correct, "length": length}
        assert all("token_versions" not in row and "prompt_lengths" not in row for row in rows)
    assert "batch_reward_parts" not in tensors_of(body_of(run, run.attach(FIRST)))[0]


def test_a_rank_has_the_metadata_of_its_groups(service: ServeProcess, connect: Connect) -> None:
    """In the order of its group ids, as appended, and only if the trainer asks."""
    run = connect(service.url, "tokens-metadata")
    groups = {f"g{number}": group(f"g{number}", metadata={"ä": [number, None]}) for number in range(4)}
    start(run, list(groups.values()), 4)
    epoch = run.attach(FIRST, dp_world_size=2, metadata=True)
    for rank in range(2):
        meta = read_batch(body_of(run, epoch, rank=rank)).meta
        assert meta.group_metadata == [groups[group_id]["metadata"] for group_id in meta.group_ids]
    assert "group_metadata" not in tensors_of(body_of(run, run.attach(FIRST)))[0]


def test_metadata_of_a_batch_stays_within_what_readers_of_safetensors_accept(
    service: ServeProcess, connect: Connect
) -> None:
    """100 groups with 200 kB each; both ranks leave out the same groups, the last ones."""
    run = connect(service.url, "tokens-much-metadata")
    groups = {f"g{number}": group(f"g{number}", metadata={"page": "x" * 200_000}) for number in range(100)}
    run.put(batch={"groups_per_batch": 100})
    for start_at in range(0, 100, 20):
        run.append(*list(groups.values())[start_at : start_at + 20])
    epoch = run.attach(dp_world_size=2, metadata=True)
    metadata: dict[str, Any] = {}
    for rank in range(2):
        body = body_of(run, epoch, 0, rank)
        assert safetensors.numpy.load(body)
        meta = read_batch(body).meta
        assert isinstance(meta.group_metadata, list)
        metadata |= dict(zip(meta.group_ids, meta.group_metadata, strict=True))
    limit = (16 << 20) // len(msgspec.json.encode(groups["g0"]["metadata"]))
    assert [metadata[name] is not None for name in groups] == [at < limit for at in range(100)]
    assert all(value in (None, groups[name]["metadata"]) for name, value in metadata.items())


def test_the_largest_mask_masks_nothing(service: ServeProcess, connect: Connect) -> None:
    run = connect(service.url, "tokens-largest")
    epoch = start(run, [mixed(0)], 1, stale_token_mask=2**53 - 1)
    assert tensors_of(body_of(run, epoch))[0]["batch_masked_tokens"] == 0


def test_a_wrong_option_of_attach_fences_nobody(service: ServeProcess, connect: Connect) -> None:
    run = connect(service.url, "tokens-attach")
    epoch = start(run, [group("a")], 1)
    refused = run.post("attach", per_token_versions="yes")
    assert (refused.status_code, refused.json()["name"]) == (400, "per_token_versions")
    assert run.state()["epoch"] == epoch


def test_both_clients_ask_for_the_columns(service: ServeProcess, connect: Connect) -> None:
    """And read them as views."""
    run = connect(service.url, "tokens-clients")
    start(run, [mixed(0)], 1)

    async def asynchronously() -> bytes:
        async with AsyncClient(service.url, run.run) as client:
            attached = await client.attach(per_token_versions=True, lengths=True)
            body = await client.fetch_batch(attached.step, attached.epoch, wait_ms=10_000)
            assert isinstance(body, bytes)
            return body

    with Client(service.url, run.run) as client:
        attached = client.attach(per_token_versions=True, lengths=True)
        body = client.fetch_batch(attached.step, attached.epoch, wait_ms=10_000)
    assert isinstance(body, bytes) and asyncio.run(asynchronously()) == body
    (row,) = read_batch(body).micro_batches
    assert row.token_versions is not None and row.completion_lengths is not None and row.prompt_lengths is not None
    assert row.completion_lengths.tolist() == [6, 6, 6] and row.prompt_lengths.tolist() == [2, 2, 2]


def test_prompt_tokens_in_the_loss_reach_body_record_and_stored_group(run: RunClient) -> None:
    """One rollout trains its second prompt token, the other none; the batch counts it among its loss tokens."""
    made = group("g", rollouts=2, tokens=5)
    made["rollouts"][0] |= {"prompt_mask": [0, 1], "prompt_logprobs": [0.0, -0.75]}
    assert [len(rollout["prompt_ids"]) for rollout in made["rollouts"]] == [2, 2]
    assert run.put(batch={"groups_per_batch": 1, "seq_len": 64}).status_code == 201
    (result,) = run.append(made)
    assert result["status"] == "stored", result
    batch = read_batch(run.batch(0, run.attach()).content)
    (row,) = batch.micro_batches
    sampled = sum(len(rollout["completion_ids"]) for rollout in made["rollouts"])
    assert int(row.loss_mask.sum()) == batch.meta.loss_tokens == batch.meta.batch_loss_tokens == sampled + 1
    assert row.inference_logprobs[row.loss_mask].tolist().count(-0.75) == 1
    stored = run.get("groups/g").json()["rollouts"]
    assert [rollout["prompt_mask"] for rollout in stored] == [[0, 1], [0, 0]]
    assert stored[0]["prompt_logprobs"] == [0.0, -0.75]
