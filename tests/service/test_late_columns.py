"""Columns that arrive after their group: durable, checked, in the batch, and waited for where they are required."""

from __future__ import annotations

import asyncio
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from replaybuf.client.client import AsyncClient, Client
from replaybuf.client.direct import DirectBodies
from replaybuf.errors import Conflict
from replaybuf.service.bodies.assembly import fetch_groups
from replaybuf.service.bodies.writer import Part
from replaybuf.service.run.served_run import Run
from replaybuf.store import EmbeddedServer, Store
from replaybuf.wire.batch import read_batch
from replaybuf.wire.config import StrategySpec
from replaybuf.wire.contract import AttachRequest
from replaybuf.wire.frame import MEDIA_TYPE
from replaybuf.wire.group import Group, split_rollouts
from replaybuf.wire.late_columns import encode_columns, late_columns
from tests.conftest import RunClient, ServeProcess, group
from tests.faults import FaultyProxy
from tests.led_run import append, on_a_run, train
from tests.service.test_older_redis import Forwarder
from tests.service.test_restart import valkey_of
from tests.valkeys import Valkey
from tests.waiting import eventually

Connect = Callable[[str, str], RunClient]
WITHIN_S = 20.0
REQUIRED = {"name": "one-step-off-policy", "options": {"max_staleness": 99, "requires": ["ref_logprobs"]}}
ANY = {"name": "one-step-off-policy", "options": {"max_staleness": 99}}
REF = [[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]]
"""Reference logprobs of a group of `group()`: two rollouts, three completion tokens each."""


def put(run: RunClient, name: str, **columns: Any) -> httpx.Response:
    """Send columns of a group as JSON."""
    return run.http.put(f"{run.path}/groups/{name}/columns", json={"columns": columns or {"ref_logprobs": REF}})


def add(run: RunClient, *names: str, **columns: Any) -> None:
    """Send columns of groups; each answer is 200."""
    for name in names:
        reply = put(run, name, **columns)
        assert reply.status_code == 200, reply.text


def start(run: RunClient, *names: str, per_batch: int = 1, **config: Any) -> int:
    """Create the run, store groups, attach."""
    reply = run.put(**{"batch": {"groups_per_batch": per_batch}, "strategy": ANY} | config)
    assert reply.status_code == 201, reply.text
    if names:
        run.append(*map(group, names))
    return run.attach()


def refusal(reply: httpx.Response) -> tuple[int, str]:
    return reply.status_code, reply.json()["detail"]


# ---------------------------------------------------------------------- what arrives


def test_a_batch_holds_the_columns_that_arrived_before_it(run: RunClient) -> None:
    epoch = start(run, "a", "b")
    assert put(run, "a").json() == {"group_id": "a", "added": 1}
    assert put(run, "a").json() == {"group_id": "a", "added": 0}
    body = read_batch(run.batch(0, epoch).content)
    (row,) = body.micro_batches
    assert row.ref_logprobs is not None
    assert row.ref_logprobs.tolist() == [0, 0, -1, -2, -3, 0, 0, -4, -5, -6]
    stored = run.get("groups/a").json()
    assert stored["late_columns"] == ["ref_logprobs"] and stored["rollouts"][1]["ref_logprobs"] == REF[1]
    assert run.get("groups/b").json()["late_columns"] == []
    assert run.get("batches/0/record").json()["late_columns"] == ["ref_logprobs"]
    assert run.batch(0, epoch).content == run.batch(0, epoch).content


def test_a_column_that_arrives_after_the_batch_was_prepared_is_in_it(server: EmbeddedServer) -> None:
    """The service has fetched and packed the next batch: nothing of that may be older than the ledger."""

    async def work(store: Store, run: Run) -> None:
        await append(run, "a", "b")
        epoch = (await run.trainer_calls.attach(AttachRequest())).epoch
        await train(run, epoch, range(1))
        await run.batches.next_batch.work()
        lengths = [len(rollout["completion_ids"]) for rollout in split_rollouts(await stored_group(store, run, 2))]
        late = late_columns("b", {"ref_logprobs": [[-1.0] * length for length in lengths]})
        assert await run.late_columns.add(late) == 1
        part = await run.batches.part(1, epoch, 0, 0.0)
        assert isinstance(part, Part)
        (row,) = read_batch(await part.body()).micro_batches
        assert row.ref_logprobs is not None and row.ref_logprobs.min() == -1.0
        assert run.batches.next_batch.outcomes["hit"] == 0

    on_a_run(server, work, strategy=StrategySpec(name="one-step-off-policy", options={"max_staleness": 99}))


async def stored_group(store: Store, run: Run, number: int) -> Group:
    return (await fetch_groups(store, run.name, [number], run.state.pool.columns)).groups[number]


def test_other_values_and_a_drawn_group_are_a_conflict(run: RunClient) -> None:
    epoch = start(run, "a", "b")
    add(run, "a")
    status, detail = refusal(put(run, "a", ref_logprobs=[[-1, -2, -3], [-4, -5, -7]]))
    assert status == 409 and "other values of ref_logprobs" in detail
    run.batch(0, epoch)
    assert put(run, "a").json()["added"] == 0
    status, detail = refusal(put(run, "a", teacher_logprobs=REF))
    assert status == 409 and "drawn by the batch of step 0" in detail
    assert run.state()["groups"]["stored"] == 2


@pytest.mark.parametrize(
    ("columns", "status", "word"),
    [
        ({"ref_logprobs": [[-1, -2], [-4, -5, -6]]}, 422, "ref_logprobs[0]: 2 values"),
        ({"ref_logprobs": [[-1, -2, -3]]}, 422, "1 rollout;"),
        ({"ref_logprobs": [-1, -2]}, 422, "not a list of numbers"),
        ({"rewards": [1.0]}, 422, "one per rollout, 2"),
        ({"rewards": [[1.0], [2.0]]}, 422, "not a list of numbers"),
        ({"values": REF}, 422, "valid: ref_logprobs"),
        ({"inference_logprobs": REF}, 422, "valid: ref_logprobs"),
        ({"ref_logprobs": [[1.0, -2, -3], [-4, -5, -6]]}, 422, "a logprob of 1"),
        ({"ref_logprobs": [[1e300, -2, -3], [-4, -5, -6]]}, 422, "NaN, infinity"),
        ({"rewards": [1e300, 0]}, 422, "NaN, infinity"),
        ({}, 422, "columns has 0 names"),
        ({"ref_logprobs": "x"}, 400, "columns"),
    ],
)
def test_a_wrong_column_gets_one_clear_answer_and_changes_nothing(
    run: RunClient, columns: dict[str, Any], status: int, word: str
) -> None:
    start(run, "a", strategy=REQUIRED)
    before = run.get("ledger").json()
    reply = run.http.put(f"{run.path}/groups/a/columns", json={"columns": columns})
    assert reply.status_code == status and word in reply.json()["detail"], reply.text
    assert run.get("ledger").json() == before
    assert put(run, "a").json()["added"] == 1


def test_nan_and_a_large_json_body_are_refused(run: RunClient) -> None:
    start(run, "a")
    path, headers = f"{run.path}/groups/a/columns", {"content-type": "application/json"}
    nan = b'{"columns": {"rewards": [NaN, 1]}}'
    assert refusal(run.http.put(path, content=nan, headers=headers))[0] == 422
    large = b'{"columns": {"rewards": [' + b"1," * (256 << 10) + b"1]}}"
    status, detail = refusal(run.http.put(path, content=large, headers=headers))
    assert status == 413 and MEDIA_TYPE in detail


def test_a_group_that_is_unknown_dropped_or_freed_is_refused(run: RunClient) -> None:
    epoch = start(run, "a", "b", strategy={"name": "one-step-off-policy", "options": {"max_staleness": 0}})
    assert refusal(put(run, "nobody"))[0] == 404
    run.train(epoch, range(1))
    eventually(lambda: run.get("groups/b").json()["state"] == "evicted", WITHIN_S)
    status, detail = refusal(put(run, "b"))
    assert status == 409 and "evicted as too_stale" in detail
    assert run.post("checkpoints", epoch=epoch, step=1).status_code == 200
    eventually(lambda: run.get("groups/a").json()["rollouts"] is None, WITHIN_S)
    for name in ("a", "b"):
        assert refusal(put(run, name))[0] == 410


def test_a_column_of_the_groups_own_frame_is_not_replaced(run: RunClient) -> None:
    made = group("a")
    for rollout, logprobs in zip(made["rollouts"], REF, strict=True):
        rollout["ref_logprobs"] = logprobs
    epoch = start(run, strategy=REQUIRED)
    run.append(made)
    assert put(run, "a").json()["added"] == 0
    assert refusal(put(run, "a", ref_logprobs=[[-1] * 3] * 2))[0] == 409
    assert run.batch(0, epoch).status_code == 200


def test_late_rewards_give_new_advantages_and_a_new_place_in_queries(run: RunClient) -> None:
    """The advantages come from the rule of the run, unless the call has its own."""
    epoch = start(run, "a", "b", advantage="dr-grpo", per_batch=2)
    add(run, "a", **{"rewards": [3.0, 1.0], "rewards.judge": [0.5, 0.25]})
    add(run, "b", rewards=[5.0, 1.0], advantages=[0.5, 0.0])
    stored = run.get("groups/a").json()
    assert [rollout["reward"] for rollout in stored["rollouts"]] == [3.0, 1.0]
    assert [rollout["advantage"] for rollout in stored["rollouts"]] == [1.0, -1.0]
    assert stored["rollouts"][0]["rewards"] == {"judge": 0.5} and stored["reward_mean"] == 2.0
    assert [entry["group_id"] for entry in run.get("groups", min_reward=2.5).json()["groups"]] == ["b"]
    (row,) = read_batch(run.batch(0, epoch).content).micro_batches
    assert sorted(row.rewards.tolist()) == [1.0, 1.0, 3.0, 5.0]
    assert sorted({*row.advantages.tolist()}) == [-1.0, 0.0, 0.5, 1.0]


def test_a_run_takes_a_bounded_number_of_late_reward_parts(run: RunClient) -> None:
    start(run, "a", "b")
    for number in range(8):
        add(run, "a", **{f"rewards.p{number}": [0.0, 1.0]})
    status, detail = refusal(put(run, "b", **{"rewards.p8": [0.0, 1.0]}))
    assert status == 422 and "the maximum is 8" in detail
    add(run, "b", **{"rewards.p7": [0.0, 1.0]})


def test_groups_that_lack_a_column_are_listed(run: RunClient) -> None:
    epoch = start(run, "a", "b", "c", "d")
    run.batch(0, epoch)  # draws a
    add(run, "c")

    def lacking(name: str) -> list[str]:
        return [entry["group_id"] for entry in run.get("groups", lacks=name).json()["groups"]]

    assert lacking("ref_logprobs") == ["b", "d"] and lacking("rewards.judge") == ["b", "c", "d"]
    assert run.get("groups", lacks="nothing").status_code == 422


def test_both_clients_add_columns(service: ServeProcess, run: RunClient) -> None:
    start(run, "a", "b")
    columns: dict[str, Any] = {
        "ref_logprobs": [np.array(values, np.float32) for values in REF],
        "rewards": np.array([1.0, 0.0]),
    }
    with Client(service.url, run.run) as client:
        assert client.add_columns("a", columns) == 3  # with the advantages
        assert client.add_columns("a", columns) == 0
        with pytest.raises(Conflict):
            client.add_columns("a", {"rewards": [0.0, 0.0]})
        assert [entry.group_id for entry in client.list_groups(lacks="ref_logprobs").groups] == ["b"]

    async def main() -> int:
        async with AsyncClient(service.url, run.run) as client:
            return int(await client.add_columns("b", columns))

    assert asyncio.run(main()) == 3


def test_a_frame_names_its_group_and_is_checked(run: RunClient) -> None:
    start(run, "a", "b")
    frame = encode_columns(late_columns("a", {"ref_logprobs": REF}))

    def send(name: str, content: bytes) -> httpx.Response:
        path = f"{run.path}/groups/{name}/columns"
        return run.http.put(path, content=content, headers={"content-type": MEDIA_TYPE})

    assert refusal(send("b", frame))[0] == 422
    assert refusal(send("a", frame[:-1] + b"x"))[0] == 400
    assert refusal(send("a", frame[:40]))[0] == 400
    assert send("a", frame).json()["added"] == 1 and put(run, "a").json()["added"] == 0


# ---------------------------------------------------------------------- what waits


def test_a_batch_waits_for_required_columns(run: RunClient) -> None:
    epoch = start(run, "a", "b", "c", strategy=REQUIRED, per_batch=2)
    waits = run.batch(0, epoch).json()
    assert (waits["reason"], waits["blocked_on"]) == ("awaiting_columns", "producers")
    assert waits["have"]["groups"] == 0 and "groups that lack columns: 3; required: ref_logprobs" in waits["detail"]
    add(run, "b")
    assert run.batch(0, epoch).json()["reason"] == "awaiting_columns"
    add(run, "c")
    assert read_batch(run.batch(0, epoch).content).meta.group_ids == ["b", "c"]
    assert run.batch(1, epoch).json()["reason"] != "awaiting_columns"  # one more group cannot fill it


def test_a_waiting_trainer_gets_its_batch_when_the_column_arrives(service: ServeProcess, run: RunClient) -> None:
    epoch = start(run, "a", strategy=REQUIRED)
    bodies: list[bytes] = []
    trainer = threading.Thread(target=lambda: bodies.append(run.batch(0, epoch, wait_ms=20_000).content))
    trainer.start()
    other = RunClient(service.url, run.run)
    add(other, "a")
    trainer.join()
    other.http.close()
    assert read_batch(bodies[0]).meta.group_ids == ["a"]


def test_a_filter_sees_a_group_when_its_columns_are_there(run: RunClient) -> None:
    """A slow judge: the rewards of the producer are all equal, and the filter must not drop the group for that."""
    judged = {"name": "zero-variance", "options": {"requires": ["rewards"]}}
    epoch = start(run, per_batch=1, filters=[judged])
    flat = [group(name) for name in ("a", "b")]
    for made in flat:
        for rollout in made["rollouts"]:
            rollout["reward"] = 0.0
    run.append(*flat)
    assert run.state()["groups"]["live"] == 2
    assert run.batch(0, epoch).json()["reason"] == "awaiting_columns"
    add(run, "a", rewards=[1.0, 1.0])
    assert run.get("groups/a").json()["state"] == "evicted"
    add(run, "b", rewards=[1.0, 0.0])
    assert read_batch(run.batch(0, epoch).content).meta.group_ids == ["b"]


def test_the_end_of_the_prompts_waits_for_columns(run: RunClient) -> None:
    """The tail holds every group, and the run is not finished while a stage may still complete one."""
    tickets = {"prompts": 3}
    epoch = start(run, strategy=REQUIRED, per_batch=2, tickets=tickets)
    issued = run.post("tickets", producer="p", count=3).json()["tickets"]
    for ticket in issued:
        run.append(group(None, ticket=ticket["ticket"]))
    add(run, "p0", "p1")
    run.train(epoch, range(1))
    waits = run.batch(1, epoch).json()
    assert waits["reason"] == "awaiting_columns" and run.state()["state"] == "running"
    add(run, "p2")
    assert read_batch(run.batch(1, epoch).content).meta.group_ids == ["p2"]
    run.ack(1, epoch)
    assert eventually(lambda: run.state()["state"] == "finished", WITHIN_S)


def test_adapters_wait_for_their_own_columns(run: RunClient) -> None:
    config = {"adapters": {name: {"groups_per_batch": 1} for name in "xy"}, "strategy": REQUIRED, "batch": {}}
    assert run.put(**config).status_code == 201
    epoch = run.attach()
    run.append(group("a", adapter="x"), group("b", adapter="y"))
    assert run.batch(0, epoch).json()["reason"] == "awaiting_columns"
    add(run, "b")
    body = read_batch(run.batch(0, epoch).content)
    assert body.meta.group_ids == ["b"] and body.meta.adapters == ["y"]


@pytest.mark.parametrize("requires", [["nothing"], [f"rewards.p{number}" for number in range(9)], "ref_logprobs"])
def test_a_run_that_requires_a_column_that_cannot_come_is_refused(run: RunClient, requires: Any) -> None:
    strategy = {"name": "on-policy", "options": {"requires": requires}}
    assert run.put(batch={"groups_per_batch": 1}, strategy=strategy).status_code == 422


def test_a_live_change_may_require_a_column(run: RunClient) -> None:
    epoch = start(run, "a", "b")
    assert run.http.patch(run.path, json={"strategy": REQUIRED}).status_code == 200
    assert run.batch(0, epoch).json()["reason"] == "awaiting_columns"
    assert run.state()["config"]["strategy"]["options"]["requires"] == ["ref_logprobs"]
    add(run, "b")
    assert read_batch(run.batch(0, epoch).content).meta.group_ids == ["b"]


# ---------------------------------------------------------------------- what lasts


def test_columns_survive_kill_9_of_service_and_valkey(own_service: ServeProcess, connect: Connect) -> None:
    run = connect(own_service.url, "r")
    epoch = start(run, "a", "b", "c", strategy=REQUIRED, advantage="dr-grpo")
    add(run, "a")
    add(run, "b", **{"ref_logprobs": REF, "rewards.judge": [0.5, 0.25]})
    add(run, "b", rewards=[3.0, 1.0])
    first = run.train(epoch, range(1))[0]
    before = run.get("groups/b").json()
    own_service.kill()
    valkey = valkey_of(own_service.data_dir)
    valkey.send_signal(signal.SIGKILL)
    psutil.wait_procs([valkey], timeout=10)
    own_service.start()
    run = connect(own_service.url, "r")
    assert run.get("groups/b").json() == before and before["reward_mean"] == 2.0
    epoch = run.attach(0)
    assert run.batch(0, epoch).content == first
    assert put(run, "b").json()["added"] == 0
    run.train(epoch, range(2))
    assert run.batch(2, epoch).json()["reason"] == "awaiting_columns"


def test_a_rewind_keeps_the_columns_and_opens_the_group_again(run: RunClient) -> None:
    epoch = start(run, "a", "b", strategy=REQUIRED)
    add(run, "a")
    first = run.train(epoch, range(1))[0]
    epoch = run.attach(0, on_resume="redeliver")
    assert run.batch(0, epoch).content == first
    assert refusal(put(run, "a", teacher_logprobs=REF))[0] == 409
    epoch = run.attach(0, on_resume="resample")
    assert put(run, "a").json()["added"] == 0 and put(run, "a", teacher_logprobs=REF).json()["added"] == 1
    (row,) = read_batch(run.batch(0, epoch).content).micro_batches
    assert row.ref_logprobs is not None and row.teacher_logprobs is not None


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    """A Valkey that no server owns."""
    with Valkey(tmp_path / "valkey") as server:
        yield server


@pytest.mark.parametrize("fate", ["lost", "unsent"])
def test_an_interrupted_write_is_repeated_without_harm(
    fate: str, valkey: Valkey, tmp_path: Path, connect: Connect
) -> None:
    """The connection breaks at the function call: the frame is there, and the record may be or not."""
    proxy = FaultyProxy(valkey.socket_path)
    with proxy.running():
        server = ServeProcess(tmp_path / "server", "--redis-url", proxy.url).start()
        try:
            run = connect(server.url, "r")
            epoch = start(run, "a", strategy=REQUIRED)
            proxy.break_once(b"rb_columns", fate)
            assert put(run, "a").status_code == 503 and proxy.happened(WITHIN_S)
            reply = eventually(lambda: put(run, "a"), WITHIN_S, lambda answer: answer.status_code == 200)
            assert reply.json()["added"] == (0 if fate == "lost" else 1)
            (row,) = read_batch(run.batch(0, epoch).content).micro_batches
            assert row.ref_logprobs is not None and row.ref_logprobs[2] == -1.0
            records = [record for record in run.get("ledger").json()["records"] if record["type"] == "COLUMNS"]
            assert len(records) == 1
        finally:
            server.end()


def test_an_older_redis_refuses_columns(valkey: Valkey, tmp_path: Path, connect: Connect) -> None:
    forwarder = Forwarder(valkey.socket_path)
    server = ServeProcess(tmp_path / "server", "--redis-url", forwarder.url).start()
    try:
        run = connect(server.url, "r")
        start(run, "a", "b")
        with Valkey(tmp_path / "older") as older:
            older.kill()
            shutil.rmtree(older.folder)
            shutil.copytree(valkey.folder, older.folder)
            add(run, "a")
            older.start()
            forwarder.switch(older.socket_path)
            reply = eventually(lambda: put(run, "b"), WITHIN_S, lambda answer: answer.status_code != 503)
            assert reply.status_code == 500 and reply.json()["type"].endswith("data-lost")
            keys = older.client.keys("rb:p:*:ref_logprobs")
            assert keys == []
    finally:
        server.end()
        forwarder.close()


def test_freed_and_deleted_groups_leave_no_column_behind(valkey: Valkey, tmp_path: Path, connect: Connect) -> None:
    server = ServeProcess(tmp_path / "server", "--redis-url", valkey.url).start()
    try:
        run = connect(server.url, "r")
        epoch = start(run, "a", "b", "c")
        add(run, "a", "b")
        add(run, "b", rewards=[0.0, 1.0])
        assert len(valkey.client.keys("rb:p:*")) == 3 + 4
        run.train(epoch, range(1))
        run.post("checkpoints", epoch=epoch, step=1)
        eventually(lambda: len(valkey.client.keys("rb:p:*")) == 2 + 3, WITHIN_S)
        run.http.patch(run.path, json={"state": "finished"})
        assert run.http.delete(run.path).status_code == 204
        eventually(lambda: valkey.client.keys("rb:p:*") == [], WITHIN_S)
    finally:
        server.end()


def test_direct_mode_and_a_standby_build_the_same_bytes(valkey: Valkey, tmp_path: Path, connect: Connect) -> None:
    servers = [
        ServeProcess(tmp_path / name, "--redis-url", valkey.url, "--no-balance").start() for name in ("one", "two")
    ]
    try:
        run, behind = (connect(server.url, "r") for server in servers)
        epoch = start(run, "a", "b", per_batch=2)
        add(run, "a", ref_logprobs=REF, rewards=[2.0, 1.0])
        body = run.batch(0, epoch).content
        with Client(servers[0].url, "r") as client:
            bodies = DirectBodies(client, valkey.url)
            assert bytes(bodies.fetch(0, epoch)) == body and bodies.built == 1  # type: ignore[arg-type]
            bodies.close()
        other = eventually(lambda: behind.batch(0, epoch), WITHIN_S, lambda answer: answer.status_code == 200)
        assert other.content == body
        servers[0].kill()
        eventually(lambda: put(behind, "b").status_code != 503, WITHIN_S)
        assert put(behind, "a").json()["added"] == 0
    finally:
        for server in servers:
            server.end()


def test_a_broken_column_makes_a_dead_letter_of_its_group(valkey: Valkey, tmp_path: Path, connect: Connect) -> None:
    server = ServeProcess(tmp_path / "server", "--redis-url", valkey.url).start()
    try:
        run = connect(server.url, "r")
        epoch = start(run, "a", "b", "c")
        add(run, "a", "b")
        for name, content in (("a", b"broken"), ("b", None)):
            (key,) = valkey.client.keys(f"rb:p:*{name}}}:*:ref_logprobs")
            valkey.client.set(key, content) if content else valkey.client.delete(key)
        assert read_batch(run.batch(0, epoch).content).meta.group_ids == ["c"]
        reasons = {letter["group_id"]: letter["reason"] for letter in run.get("dead-letters").json()["dead_letters"]}
        assert reasons == {"a": "broken_frame", "b": "missing_payload"}
    finally:
        server.end()
