"""The generator as a whole: from ticket to stored group, its limits, and how it ends."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaybuf.errors import EngineUnfit, Invalid, RunFinished, ServiceUnavailable, Unauthorized
from replaybuf.generator import daemon as daemon_module
from replaybuf.generator.engines import VllmEngine, request_seed
from replaybuf.generator.fleet import ServerStatus
from replaybuf.generator.stage.logprobs import PolicyStage
from replaybuf.generator.stage.stages import Computed, Rollout
from replaybuf.kernel.state.return_reasons import is_forgiven
from replaybuf.wire.frame import encode_frame
from replaybuf.wire.group import Group, OptionalLogprobs
from replaybuf.wire.group_check import GroupLimits, check_group
from tests.generator.doubles import TIMEOUT_S, EngineDouble, Gate, ServiceDouble, fail, reply
from tests.generator.worlds import WORDS, completed, failed, gated, started
from tests.waiting import until

# ---------------------------------------------------------------------- from ticket to stored group


def test_every_ticket_becomes_one_group_of_its_prompt(tmp_path: Path) -> None:
    w = completed(tmp_path, ServiceDouble(prompts=6))
    groups = {group.prompt_index: group for group in w.service.groups}
    assert groups.keys() == set(range(6))
    assert [groups[i].prompt_id for i in range(6)] == [*WORDS, *WORDS[:2]]
    assert {group.ticket for group in groups.values()} == {f"t{i}" for i in range(6)}
    assert w.service.returned == [] and w.daemon.progress.groups == 6


def test_a_group_holds_tokens_logprobs_rewards_advantages_and_versions(tmp_path: Path) -> None:
    engine, service = EngineDouble(version=3), ServiceDouble(prompts=1, group_size=2)
    service.published = 3

    async def half_right(request: dict[str, Any]) -> dict[str, Any]:
        answer = engine.answer(request)
        answer["choices"][1] |= {"token_ids": [0, 0, 0], "finish_reason": "length"}
        return answer

    engine.script.append(half_right)
    (group,) = completed(tmp_path, service, engine, metadata={"env": "spelling"}).service.groups
    assert check_group(group, GroupLimits(published_version=3, group_size=2)) is None
    assert group.prompt_ids.tolist() == [0, 1, 2, 0, 1, 2]
    assert group.completion_ids.tolist() == [2, 1, 0, 0, 0, 0]
    assert group.completion_mask.all()
    assert group.inference_logprobs.tolist() == [-0.5, -1.0, -1.5] * 2
    assert group.rewards.tolist() == [1.0, 0.0]
    assert group.advantages is not None
    assert group.advantages.tolist() == pytest.approx([1.0, -1.0], abs=1e-5)
    assert {name: part.tolist() for name, part in group.reward_parts.items()} == {"length": [3.0, 3.0]}
    assert (group.policy_version, group.version_spans.tolist()) == (3, [[0, 3, 0, 3], [1, 3, 0, 3]])
    assert group.finish_reasons == ("stop", "length")
    assert group.temperatures.tolist() == [1.0, 1.0]
    assert group.metadata["env"] == "spelling"
    assert group.metadata["engine"]["url"] == engine.url


def test_requests_have_a_seed_from_run_seed_prompt_index_and_attempt(tmp_path: Path) -> None:
    w = completed(tmp_path, ServiceDouble(prompts=3), request_seed=11)
    seeds = {group.prompt_index: group.metadata["sampling"]["seed"] for group in w.service.groups}
    assert seeds == {index: request_seed(11, index, 1) for index in range(3)}
    assert sorted(request["seed"] for request in w.engine.requests) == sorted(seeds.values())


def test_the_runs_estimator_computes_the_advantages(tmp_path: Path) -> None:
    advantages = completed(tmp_path, ServiceDouble(prompts=1), advantage="dr-grpo").service.groups[0].advantages
    assert advantages is not None and advantages.tolist() == [0.0] * 4


@pytest.mark.parametrize("compress", [False, True])
def test_the_option_compress_decides_whether_frames_are_compressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compress: bool
) -> None:
    used = []

    def encode(group: Group, *, compress: bool) -> bytes:
        used.append(compress)
        return encode_frame(group, compress=compress)

    monkeypatch.setattr("replaybuf.client.append_bodies.encode_frame", encode)
    completed(tmp_path, ServiceDouble(prompts=2), compress=compress)
    assert used == [compress] * 2


def test_stages_complete_groups_before_the_append(tmp_path: Path) -> None:
    class Reference:
        column: OptionalLogprobs = "ref_logprobs"
        micro_batch = 8
        waiting: str | None = None

        async def compute(self, rollouts: Sequence[Rollout], least_version: int = 0) -> Computed:
            return Computed([np.full(len(r.completion_ids), -2.0, np.float32) for r in rollouts])

        def learn_published(self, version: int) -> None:
            """Ignore the policy."""

        async def wait_ready(self, timeout_s: float) -> None:
            """Return at once."""

        def status(self) -> tuple[ServerStatus, ...]:
            return ()

    # 5 groups of 4 rollouts in windows of 8: the last group is flushed
    w = completed(tmp_path, ServiceDouble(prompts=5), stages=[Reference()])
    assert w.stored == list(range(5))
    for group in w.service.groups:
        assert group.ref_logprobs is not None and set(group.ref_logprobs.tolist()) == {-2.0}


async def test_no_ticket_is_taken_while_the_server_of_a_stage_lacks_the_policys_weights(tmp_path: Path) -> None:
    async with EngineDouble(version=3).up() as scorer:
        stage = PolicyStage("old_logprobs", [VllmEngine(scorer.url, timeout_s=TIMEOUT_S)], micro_batch=4)
        await stage.prepare(TIMEOUT_S, policy=())
        service = ServiceDouble(prompts=3)
        service.published, scorer.version = 3, "default"
        async with started(tmp_path, EngineDouble(version=3), service, stages=[stage], max_inflight_groups=1) as w:
            await until(lambda: w.daemon.waiting == "old_engine_stale")
            assert not service.groups and not scorer.requests
            scorer.version = "3"
            await w.end()
            assert [group.metadata["old_logprobs"] for group in service.groups] == [{"policy_version": 3}] * 3
            assert not service.returned
        await stage.aclose()


# ---------------------------------------------------------------------- limits


async def test_no_more_groups_are_in_flight_than_allowed(tmp_path: Path) -> None:
    service = ServiceDouble(prompts=9)
    async with gated(tmp_path, service, 3, max_inflight_groups=3) as (w, gate):
        asked = {"producer": "me", "count": 3, "adapter": "", "wait_ms": 100, "max_tokens": 8}
        assert service.asked[0] == asked
        gate.open.set()
        await w.end()
        assert max(request["count"] for request in service.asked) == 3
        assert len(service.groups) == 9


async def test_the_number_of_groups_generating_follows_the_engines_queue_within_its_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_module, "_LOAD_EVERY_S", 0.01)
    gate, engine, service = Gate(), EngineDouble(), ServiceDouble()
    engine.always, engine.gauges = gate, (3, 0)
    async with started(tmp_path, engine, service, max_inflight_groups=8, min_inflight_groups=2) as w:
        await gate.requests(8)
        engine.gauges = (16, 16)
        await until(lambda: w.daemon.limit == 4)
        engine.gauges = (1, 99)
        await until(lambda: w.daemon.limit == 2)
        assert w.daemon.engines[0].waiting == 99
        engine.gauges = (0, 0)
        await until(lambda: w.daemon.limit == 8)
        w.stop.set()
        gate.open.set()
        await w.end()


async def test_engines_without_gauges_get_as_many_groups_as_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_module, "_LOAD_EVERY_S", 0.01)
    service = ServiceDouble()
    async with gated(tmp_path, service, 5, max_inflight_groups=5, min_inflight_groups=1) as (w, gate):
        await until(lambda: w.engine.calls.count("metrics") > 2)
        assert w.daemon.limit == 5
        w.stop.set()
        gate.open.set()
        await w.end()


async def test_reconfigured_bounds_and_temperature_apply_from_the_next_ticket_on(tmp_path: Path) -> None:
    service = ServiceDouble(prompts=3)
    async with gated(tmp_path, service, 1, max_inflight_groups=1) as (w, gate):
        await w.daemon.reconfigure(temperature=0.5, max_inflight_groups=3)
        await gate.requests(2)
        with pytest.raises(Invalid, match="min_inflight_groups is 4; it must be from 1 to max_inflight_groups, 3"):
            await w.daemon.reconfigure(min_inflight_groups=4, temperature=2.0)
        gate.open.set()
        await w.end()
    temperatures = {group.prompt_index: group.metadata["sampling"]["temperature"] for group in service.groups}
    assert temperatures == {0: 1.0, 1: 0.5, 2: 0.5}
    assert [set(group.temperatures.tolist()) for group in service.groups if group.prompt_index == 0] == [{1.0}]


# ---------------------------------------------------------------------- ends


async def test_it_continues_while_another_producers_ticket_may_come_back(tmp_path: Path) -> None:
    service = ServiceDouble(prompts=2)
    service.next_index, service.out = 1, {"t0": 0}  # another producer has the first ticket
    async with started(tmp_path, EngineDouble(), service) as w:
        await service.until(lambda: len(service.groups) == 1)
        asked = len(service.asked)
        await service.until(lambda: len(service.asked) >= asked + 3)
        assert w.task is not None and not w.task.done()
        service.prompts = 3  # the ticket comes back, for this producer
        service.out.clear()
        await w.end()
        assert len(service.groups) == 2


async def test_groups_in_flight_are_still_appended_after_the_run_finished(tmp_path: Path) -> None:
    service = ServiceDouble()
    service.open = 2
    async with gated(tmp_path, service, 2) as (w, gate):
        service.faults["tickets"] = deque([RunFinished("max_steps is reached")])
        await service.until(lambda: not service.faults["tickets"])
        gate.open.set()
        await w.end()
        assert len(service.groups) == 2


def test_groups_that_a_finished_run_no_longer_takes_are_dropped(tmp_path: Path) -> None:
    service = ServiceDouble()
    service.open = 1
    service.faults["groups"] = deque([RunFinished("max_steps is reached")])
    assert completed(tmp_path, service).service.groups == []


async def test_a_stop_lets_groups_in_flight_finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_module, "FINISH_S", TIMEOUT_S)
    service = ServiceDouble()
    service.open = 2
    async with gated(tmp_path, service, 2) as (w, gate):
        w.stop.set()
        gate.open.set()
        await w.end()
        assert len(service.groups) == 2
        assert service.returned == []


async def test_a_stop_returns_the_tickets_that_do_not_finish_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_module, "FINISH_S", 0.1)
    service = ServiceDouble()
    service.open = 3
    async with gated(tmp_path, service, 3) as (w, gate):
        w.stop.set()
        await w.end()
        assert sorted(service.returned) == [(f"t{i}", "shutdown: the producer ends") for i in range(3)]
        assert all(is_forgiven(reason) for _, reason in service.returned), "a restart fails no prompt"
        assert service.out == {}
        gate.open.set()


async def test_a_stop_while_the_service_is_away_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_module, "FINISH_S", 1000.0)
    service = ServiceDouble()
    service.faults["tickets"] = deque([ServiceUnavailable("restarting", retry_after_s=60.0)])
    async with started(tmp_path, EngineDouble(), service):
        await service.until(lambda: not service.faults["tickets"])


async def test_tickets_that_arrive_with_the_stop_are_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_module, "FINISH_S", 0.3)
    service = ServiceDouble()
    service.open = 0
    async with started(tmp_path, EngineDouble(), service, poll_wait_ms=1500) as w:
        await service.until(lambda: len(service.asked) == 1)
        w.stop.set()
        await asyncio.sleep(0)
        await service.change(open=2)
        await w.end()
        assert sorted(w.reasons) == ["t0", "t1"]


def test_an_unfit_engine_returns_all_tickets_and_ends_it(tmp_path: Path) -> None:
    gate, engine, service = Gate(), EngineDouble(), ServiceDouble()
    service.open = 2
    engine.script.append(gate)
    engine.script.append(reply(weight_versions=[{"version": "other", "start": 0, "end": 3}]))
    _, error = failed(tmp_path, service, engine)
    assert isinstance(error, EngineUnfit)
    assert sorted(service.returned) == [(f"t{i}", "producer_fault: the producer ends") for i in range(2)]
    failure = service.heartbeats[-1][1]["failure"]
    assert failure["reason"] == "producer_fault" and "EngineUnfit: " in failure["traceback"]


def test_an_invalid_token_ends_it(tmp_path: Path) -> None:
    service = ServiceDouble()
    service.faults["tickets"] = deque([Unauthorized("no such token")])
    assert isinstance(failed(tmp_path, service)[1], Unauthorized)


# ---------------------------------------------------------------------- status


def test_the_last_status_has_all_counts_and_every_engine(tmp_path: Path) -> None:
    file = tmp_path / "generate.jsonl"
    w = completed(tmp_path, ServiceDouble(prompts=3), metrics_file=file)
    last = json.loads(file.read_text().splitlines()[-1])
    assert (last["groups"], last["rollouts"], last["generated_tokens"], last["reward_mean"]) == (3, 12, 36, 1.0)
    assert last["waiting"] in (None, "finished")
    assert last["engines"] == [
        {
            "url": w.engine.url,
            "state": "up",
            "requests": 0,
            "tokens": 0,
            "failures": 0,
            "outcomes": {"ok": 3},
            "fault": None,
            "running": None,
            "waiting": None,
        }
    ]


@pytest.mark.parametrize("reason", ["rate_limited", "service_away", "awaiting_publication", "engine_away"])
async def test_the_status_has_the_reason_for_waiting(
    tmp_path: Path, reason: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_module, "FINISH_S", 0.0)
    caplog.set_level("INFO")
    file = tmp_path / "generate.jsonl"
    engine, service = EngineDouble(), ServiceDouble()
    service.open = 0
    if reason == "service_away":
        service.faults["tickets"] = deque([ServiceUnavailable("restarting", retry_after_s=0.2)] * 100)
    if reason == "awaiting_publication":
        engine.version, service.open = 1, 1
    if reason == "engine_away":
        engine.always, engine.healthy, service.open = fail(503), False, 1
    async with started(tmp_path, engine, service, metrics_file=file, report_every_s=0.02):
        await until(lambda: reason in waiting_reasons(file), poll_s=0.01)
    assert f"waiting: {reason}" in caplog.text


def waiting_reasons(file: Path) -> list[str | None]:
    return [json.loads(line)["waiting"] for line in file.read_text().splitlines()] if file.exists() else []
