"""Samples of trained steps: what stays readable after a checkpoint has freed the groups, and never two histories."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from replaybuf import Client
from replaybuf.errors import NotLeader
from replaybuf.service.run import samples as kept_samples
from replaybuf.service.run.served_run import Run
from replaybuf.store import EmbeddedServer, Store, keys
from replaybuf.store import reader_data as stored_samples
from replaybuf.wire.answer.samples import StepSamples, encode_samples
from replaybuf.wire.config import BatchSpec, HistorySpec
from replaybuf.wire.contract import AttachRequest
from tests.conftest import RunClient, ServeProcess, Starter, group
from tests.generator.qwen import write_qwen
from tests.led_run import append, on_a_run, train
from tests.waiting import eventually


def samples_of(run: RunClient, steps: int, **query: Any) -> list[dict[str, Any]]:
    """Wait until so many steps have samples, and list them."""
    eventually(lambda: run.get("samples").json()["steps"] == steps, within_s=60.0)
    samples: list[dict[str, Any]] = run.get("samples", **query).json()["samples"]
    return samples


def scored(name: str, *rewards: float, version: int = 0) -> dict[str, Any]:
    """Build a group with these rewards."""
    made = group(name, version, rollouts=len(rewards))
    for rollout, reward in zip(made["rollouts"], rewards, strict=True):
        rollout |= {"reward": reward, "rewards": {"correct": reward, "length": 3.0}}
    return made | {"metadata": {"answer": 42}}


def test_the_best_the_worst_and_two_by_chance_outlive_the_checkpoint_that_frees_their_groups(run: RunClient) -> None:
    """The payloads are gone, and the page of a freed group has its sample."""
    run.put(batch={"groups_per_batch": 4, "tokens_per_batch": None})
    epoch = run.attach()
    run.append(scored("mixed", 0.0, 1.0), scored("good", 1.0, 0.5), scored("bad", -1.0, 0.5), scored("flat", 0.5, 0.5))
    run.train(epoch, range(1))
    assert run.post("checkpoints", epoch=epoch, step=1, keep=1).status_code == 200
    eventually(lambda: run.get("groups/good").json()["rollouts"] is None, within_s=60.0)
    best, worst, *chance = samples_of(run, 1)
    assert (best["why"], best["group_id"], best["place"], best["reward"]) == ("best", "good", 0, 1.0)
    assert (worst["why"], worst["group_id"], worst["place"], worst["reward"]) == ("worst", "bad", 0, -1.0)
    assert {(sample["why"], sample["group_id"]) for sample in chance} == {("chance", "mixed"), ("chance", "flat")}
    assert best["rewards"] == {"correct": 1.0, "length": 3.0} and best["answer"] == "42"
    assert (best["prompt"], best["completion"], best["completion_tokens"]) == ([[1, 2]], [[3, 3, 3]], 3)
    assert run.get("groups/good").json()["samples"] == [best]
    assert run.get("samples", step=1).json()["samples"] == []


def test_a_page_of_groups_previews_the_rollout_that_its_order_asks_for(run: RunClient) -> None:
    """Of a freed group it is the sample."""
    run.put(batch={"groups_per_batch": 1})
    epoch = run.attach()
    run.append(scored("old", 0.25, 0.75))
    run.train(epoch, range(1))
    assert run.post("checkpoints", epoch=epoch, step=1, keep=1).status_code == 200
    run.append(scored("new", 0.5, 1.0, -1.0, version=1))
    eventually(lambda: run.get("groups/old").json()["rollouts"] is None, within_s=60.0)

    def rewards(**query: Any) -> dict[str, float]:
        page = run.get("groups", preview="true", **query).json()["groups"]
        return {entry["group_id"]: entry["preview"]["reward"] for entry in page}

    assert rewards() == {"old": 0.75, "new": 0.5}
    assert rewards(order="reward", desc="true") == {"new": 1.0}
    assert rewards(order="reward") == {"new": -1.0}
    assert "preview" not in run.get("groups").json()["groups"][0]


def test_pages_go_from_the_newest_step_to_the_oldest(run: RunClient) -> None:
    run.put(batch={"groups_per_batch": 1})
    epoch = run.attach()
    for step in range(3):
        run.append(group(f"g{step}", step))
        run.train(epoch, range(step, step + 1))
    assert [sample["step"] for sample in samples_of(run, 3)] == [2, 2, 1, 1, 0, 0]
    with Client(str(run.http.base_url), run.run) as client:
        page = client.list_samples(limit=2)
        assert {sample.step for sample in page.samples} == {2, 1} and (page.next, page.oldest) == (1, 0)
        last = client.list_samples(before=page.next)
        assert {sample.step for sample in last.samples} == {0} and last.next is None


def test_a_run_may_keep_no_samples(run: RunClient) -> None:
    run.put(batch={"groups_per_batch": 1}, history={"samples_per_step": 0})
    epoch = run.attach()
    run.append(group("g"))
    run.train(epoch, range(1))
    assert run.post("checkpoints", epoch=epoch, step=1, keep=1).status_code == 200
    eventually(lambda: run.get("groups/g").json()["rollouts"] is None, within_s=60.0)
    nothing: dict[str, Any] = {"samples": [], "next": None, "steps": 0, "oldest": None, "samples_per_step": 0}
    assert run.get("samples").json() == nothing


def test_texts_are_searched_and_cut(tmp_path: Path, connect: Callable[[str, str], RunClient], started: Starter) -> None:
    """With a tokenizer samples are text: the start and the end of a long one."""
    server = started(ServeProcess(tmp_path / "data", "--tokenizer", str(write_qwen(tmp_path / "model"))))
    run = connect(server.url, "r")
    run.put(batch={"groups_per_batch": 1, "tokens_per_batch": None, "seq_len": 8192})
    epoch = run.attach()
    ids = [*b"ab"] * 3000
    long = {"prompt_ids": [*b"xy"], "completion_ids": ids, "inference_logprobs": [-0.5] * len(ids), "reward": 1.0}
    assert run.append(group("long") | {"rollouts": [long]})[0]["status"] == "stored"
    run.train(epoch, range(1))
    (sample,) = samples_of(run, 1)
    assert [type(piece) for piece in sample["completion"]] == [str, str]
    assert sample["completion_tokens"] == 6000
    assert sum(map(len, sample["completion"])) <= 8192
    letters = sample["completion"][0][:2]
    assert run.get("samples", contains=letters.swapcase()).json()["samples"] == [sample]
    assert run.get("samples", contains="<script>").json()["samples"] == []
    assert run.get("samples", contains="\u202egnp.exe").status_code == 422


def test_a_rewind_hides_samples_of_undone_steps_until_the_new_batch_replaces_them(server: EmbeddedServer) -> None:
    """Redelivered steps keep theirs: the batch is the same."""

    async def work(store: Store, run: Run) -> None:
        async def shown() -> list[tuple[int, str]]:
            return [(sample.step, sample.group_id) for sample in (await run.samples.list_newest(100)).samples]

        epoch = (await run.trainer_calls.attach(AttachRequest(dp_world_size=1))).epoch
        for step, name in enumerate("abc"):
            await append(run, name, version=step)
            await train(run, epoch, range(step, step + 1))
        await run.tick()
        before = await shown()
        assert [step for step, _ in before] == [2, 1, 0]
        epoch = (await run.trainer_calls.attach(AttachRequest(dp_world_size=1, resume_step=1))).epoch
        assert await shown() == before[2:]
        await train(run, epoch, range(1, 3))
        assert await shown() == before
        resumed = AttachRequest(dp_world_size=1, resume_step=1, on_resume="resample")
        epoch = (await run.trainer_calls.attach(resumed)).epoch
        assert await shown() == before[2:]
        await append(run, "d", "e", version=1)
        await train(run, epoch, range(1, 2))
        assert await shown() == before[2:], "the step has another batch, whose samples are not kept yet"
        await run.tick()
        assert [step for step, _ in await shown()] == [1, 0]
        assert await store.samples.list_steps(run.name) == [1, 0]
        run.samples.__init__(run.journal, run.batches)  # type: ignore[misc]  # as a new leader
        await run.samples.take_over()
        await run.samples.keep()
        assert [step for step, _ in await shown()] == [1, 0]

    on_a_run(server, work, history=HistorySpec(samples_per_step=1))


def test_samples_of_batches_in_memory_are_taken_without_reading_their_groups_again(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollout as long as a row may have been cut for the trainer, so its stored group is read."""

    async def work(store: Store, run: Run) -> None:
        epoch = (await run.trainer_calls.attach(AttachRequest(dp_world_size=1))).epoch
        for step, name in enumerate("ab"):
            await append(run, name, version=step)
            await train(run, epoch, range(step, step + 1))
        with monkeypatch.context() as patch:
            patch.setattr(kept_samples, "fetch_groups", None)
            await run.tick()
        samples = (await run.samples.list_newest(100)).samples
        assert {(sample.step, sample.group_id) for sample in samples} == {(0, "a"), (1, "b")}
        short = AttachRequest(dp_world_size=1, resume_step=2, seq_len=int(samples[0].completion_tokens) + 2)
        epoch = (await run.trainer_calls.attach(short)).epoch
        await append(run, "c", version=2)
        await train(run, epoch, range(2, 3))
        with monkeypatch.context() as patch:
            patch.setattr(kept_samples, "fetch_groups", None)
            with pytest.raises(TypeError):
                await run.samples.keep()
        await run.samples.keep()
        assert {sample.step for sample in (await run.samples.list_newest(100)).samples} == {0, 1, 2}

    on_a_run(server, work)


def test_a_former_leader_keeps_no_samples(server: EmbeddedServer) -> None:
    """The fence is that of all writes of a leader."""

    async def work(store: Store, run: Run) -> None:
        epoch = (await run.trainer_calls.attach(AttachRequest(dp_world_size=1))).epoch
        await append(run, "a")
        await train(run, epoch, range(1))
        assert (await store.runs.take_lease(run.name, "other", 60.0, force=True)).token
        with pytest.raises(NotLeader):
            await run.samples.keep()
        assert await store.samples.list_steps(run.name) == []

    on_a_run(server, work)


def test_the_oldest_samples_go_when_all_of_a_run_are_too_large(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_samples, "KEPT_BYTES", 10_000)

    async def work(store: Store, run: Run) -> None:
        token = run.journal.token
        for step in range(40):
            await store.samples.write(run.name, token, [(step, step + 1, b"x" * 900)])
        assert await store.samples.list_steps(run.name) == [*range(39, 29, -1)]
        await store.samples.write(run.name, token, [(35, 99, b"x" * 900)])
        assert await store.samples.list_steps(run.name) == [*range(35, 29, -1)], "later steps were undone"
        counts = await store.counters.read(run.name)
        assert counts["sample_bytes"] == 6 * 1000
        await store.connection.client.hset(keys.samples(run.name), "7", b"\xc1")
        assert (await run.samples.list_newest(100)).samples == [], "what does not decode is left out"

    on_a_run(server, work)


def test_a_run_with_the_most_samples_keeps_each_rollout_once(server: EmbeddedServer) -> None:
    async def work(store: Store, run: Run) -> None:
        epoch = (await run.trainer_calls.attach(AttachRequest(dp_world_size=1))).epoch
        await append(run, "a", "b")
        await train(run, epoch, range(1))
        await run.tick()
        samples = (await run.samples.list_newest(1)).samples
        assert sorted((sample.group_id, sample.place) for sample in samples) == [("a", 0), ("b", 0)]
        raw = encode_samples(StepSamples(1, samples))
        assert msgspec.msgpack.decode(raw, type=StepSamples).samples == samples

    on_a_run(server, work, batch=BatchSpec(groups_per_batch=2), history=HistorySpec(samples_per_step=64))
