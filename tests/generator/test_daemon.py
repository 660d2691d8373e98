"""The generator as a whole, between an engine and a service that answer by script over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import threading
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaybuf.client.client import AsyncClient
from replaybuf.errors import (
    DataLost,
    EngineAway,
    EngineUnfit,
    Invalid,
    NoRoom,
    PromptFault,
    ReplaybufError,
    RunFinished,
    ServiceUnavailable,
    TooLarge,
    Unauthorized,
)
from replaybuf.generator import daemon as daemon_module
from replaybuf.generator import failures as failures_module
from replaybuf.generator.daemon import Daemon, DaemonOptions, Follower
from replaybuf.generator.engines import Sampling, VllmEngine, request_seed
from replaybuf.generator.environments import Environment, Reward, Score
from replaybuf.generator.environments.scoring import Scorer
from replaybuf.generator.fleet import Fleet, ServerStatus
from replaybuf.generator.logprobs import EngineStage, PolicyStage
from replaybuf.generator.prompts import Prompt, PromptOrder, Prompts
from replaybuf.generator.stages import Computed, Rollout, Stage
from replaybuf.kernel.tickets import is_forgiven
from replaybuf.wire.frame import encode_frame
from replaybuf.wire.group import Group, OptionalLogprobs
from replaybuf.wire.group_check import GroupLimits, check_group
from tests.generator.doubles import (
    TIMEOUT_S,
    Broken,
    EngineDouble,
    Gate,
    Script,
    ServiceDouble,
    Spelling,
    fail,
    make_prompt,
    make_tokenizer,
    reply,
)
from tests.waiting import until

WORDS = ("abc", "abd", "bcd", "cd")


@dataclasses.dataclass
class World:
    """A generator with its two neighbours; `start` begins it, `end` waits for its end."""

    engine: EngineDouble
    service: ServiceDouble
    daemon: Daemon
    stop: asyncio.Event
    task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.task = asyncio.create_task(self.daemon.run(self.stop))

    async def end(self) -> None:
        assert self.task is not None
        await self.task

    async def run(self) -> None:
        self.start()
        await self.end()


@contextlib.asynccontextmanager
async def world(
    folder: Path,
    engine: EngineDouble,
    service: ServiceDouble,
    *,
    environment: Environment | Sequence[Reward] | None = None,
    reward_timeout_s: float = TIMEOUT_S,
    engine_timeout_s: float = TIMEOUT_S,
    patience_s: float = TIMEOUT_S,
    max_staleness: int | None = None,
    stages: Sequence[Stage] = (),
    prompts: PromptOrder | None = None,
    followers: Sequence[Follower] = (),
    serve: bool = True,
    **options: Any,
) -> AsyncIterator[World]:
    sampling = Sampling(n=service.config["group_size"], max_tokens=8)
    given: dict[str, Any] = {"producer": "me", "sampling": sampling, "poll_wait_ms": 100}
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(engine.up())
        if serve:
            await stack.enter_async_context(service.up())
        client = await stack.enter_async_context(AsyncClient(service.url, "r", timeout_s=TIMEOUT_S))
        server = VllmEngine(engine.url, timeout_s=engine_timeout_s)
        fleet = Fleet([server], patience_s=patience_s, max_staleness=max_staleness)
        daemon = Daemon(
            client,
            fleet,
            Scorer(environment or Spelling(), timeout_s=reward_timeout_s),
            prompts or Prompts([make_prompt(word) for word in WORDS], shuffle=False),
            make_tokenizer(folder),
            DaemonOptions(**given | options),
            stages,
            followers,
        )
        made = World(engine, service, daemon, asyncio.Event())
        try:
            yield made
        finally:
            await fleet.aclose()


@contextlib.asynccontextmanager
async def gated(
    folder: Path, service: ServiceDouble, requests: int, **options: Any
) -> AsyncIterator[tuple[World, Gate]]:
    """A world that has begun, and whose engine has so many requests and answers none until the gate opens."""
    gate, engine = Gate(), EngineDouble()
    engine.always = gate
    async with world(folder, engine, service, **options) as w:
        w.start()
        await gate.requests(requests)
        yield w, gate


def sampled_by(version: int, gate: Gate | None = None) -> Script:
    """Script: the usual answer of this version, whatever the engine has by then."""

    async def script(request: dict[str, Any]) -> dict[str, Any]:
        if gate is not None:
            await gate(request)
        return EngineDouble(version=version).answer(request)

    return script


def run(main: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await main

    asyncio.run(bounded())


def the_error(caught: pytest.ExceptionInfo[BaseExceptionGroup[BaseException]]) -> BaseException:
    (error,) = caught.value.exceptions
    return error


# ---------------------------------------------------------------------- the way of a group


def test_requests_are_seeded_by_run_seed_prompt_index_and_attempt_where_asked_for(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, EngineDouble(), ServiceDouble(prompts=3), request_seed=11) as w:
            await w.run()
            told = {group.prompt_index: group.metadata["sampling"]["seed"] for group in w.service.groups}
            assert told == {index: request_seed(11, index, 1) for index in range(3)}
            assert sorted(request["seed"] for request in w.engine.requests) == sorted(told.values())

    run(main())


def test_a_report_tells_how_every_engine_is_doing(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"

    async def main() -> None:
        async with world(tmp_path, EngineDouble(), ServiceDouble(prompts=1), metrics_file=file) as w:
            await w.run()
            (engine,) = json.loads(file.read_text().splitlines()[-1])["engines"]
            assert engine == {
                "url": w.engine.url,
                "state": "up",
                "requests": 0,
                "tokens": 0,
                "failures": 0,
                "outcomes": {"ok": 1},
                "fault": None,
                "running": None,
                "waiting": None,
            }

    run(main())


def test_every_ticket_becomes_one_group_of_its_prompt(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, EngineDouble(), ServiceDouble(prompts=6)) as w:
            await w.run()
            groups = {group.prompt_index: group for group in w.service.groups}
            assert groups.keys() == set(range(6))
            assert [groups[i].prompt_id for i in range(6)] == [*WORDS, *WORDS[:2]]
            assert {group.ticket for group in groups.values()} == {f"t{i}" for i in range(6)}
            assert w.service.returned == []

    run(main())


def test_a_group_holds_tokens_logprobs_rewards_advantages_and_versions(tmp_path: Path) -> None:
    async def main() -> None:
        engine, service = EngineDouble(version=3), ServiceDouble(prompts=1, group_size=2)
        service.published = 3

        async def half_right(request: dict[str, Any]) -> dict[str, Any]:
            answer = engine.answer(request)
            answer["choices"][1] |= {"token_ids": [0, 0, 0], "finish_reason": "length"}
            return answer

        engine.script.append(half_right)
        async with world(tmp_path, engine, service, metadata={"env": "spelling"}) as w:
            await w.run()
            (group,) = service.groups
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

    run(main())


def test_the_runs_estimator_computes_the_advantages(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, EngineDouble(), ServiceDouble(prompts=1), advantage="dr-grpo") as w:
            await w.run()
            advantages = w.service.groups[0].advantages
            assert advantages is not None and advantages.tolist() == [0.0] * 4

    run(main())


def test_no_more_groups_are_in_flight_than_allowed(tmp_path: Path) -> None:
    async def main() -> None:
        service = ServiceDouble(prompts=9)
        async with gated(tmp_path, service, 3, max_inflight_groups=3) as (w, gate):
            assert service.asked[0] == {"producer": "me", "count": 3, "adapter": "", "wait_ms": 100}
            gate.open.set()
            await w.end()
            assert max(request["count"] for request in service.asked) == 3
            assert len(service.groups) == 9

    run(main())


@pytest.mark.parametrize("compress", [False, True])
def test_groups_are_compressed_where_the_options_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compress: bool
) -> None:
    asked = []

    def encode(group: Group, *, compress: bool) -> bytes:
        asked.append(compress)
        return encode_frame(group, compress=compress)

    async def main() -> None:
        async with world(tmp_path, EngineDouble(), ServiceDouble(prompts=2), compress=compress) as w:
            await w.run()

    monkeypatch.setattr("replaybuf.client.calls.encode_frame", encode)
    run(main())
    assert asked == [compress] * 2


def test_groups_that_are_ready_together_go_in_one_append(tmp_path: Path) -> None:
    async def main() -> None:
        service = ServiceDouble(prompts=8)
        service.faults["groups"] = deque([NoRoom("full", retry_after_s=0.2)])
        async with gated(tmp_path, service, 8) as (w, gate):
            gate.open.set()
            await w.end()
            assert len(service.appended) < 8
            assert len(service.groups) == 8

    run(main())


def test_stages_complete_groups_before_they_are_appended(tmp_path: Path) -> None:
    class Reference:
        column: OptionalLogprobs = "ref_logprobs"
        micro_batch = 8
        waiting: str | None = None

        async def compute(self, rollouts: Sequence[Rollout], least_version: int = 0) -> Computed:
            return Computed([np.full(len(r.completion_ids), -2.0, np.float32) for r in rollouts])

        def learn_published(self, version: int) -> None:
            """It has nothing to do with the policy."""

        async def wait_ready(self, timeout_s: float) -> None:
            """It is there."""

        def status(self) -> tuple[ServerStatus, ...]:
            return ()

    async def main() -> None:
        async with world(tmp_path, EngineDouble(), ServiceDouble(prompts=5), stages=[Reference()]) as w:
            await w.run()  # 5 groups of 4 rollouts, windows of 8: the last group is the tail
            assert sorted(group.prompt_index or 0 for group in w.service.groups) == list(range(5))
            for group in w.service.groups:
                assert group.ref_logprobs is not None and set(group.ref_logprobs.tolist()) == {-2.0}

    run(main())


def test_a_server_that_lost_the_weights_of_the_policy_is_waited_for_and_no_ticket_is_taken(tmp_path: Path) -> None:
    async def main() -> None:
        async with EngineDouble(version=3).up() as scorer:
            stage = PolicyStage("old_logprobs", [VllmEngine(scorer.url, timeout_s=TIMEOUT_S)], micro_batch=4)
            await stage.prepare(TIMEOUT_S, policy=())
            service = ServiceDouble(prompts=3)
            service.published, scorer.version = 3, "default"
            async with world(tmp_path, EngineDouble(version=3), service, stages=[stage], max_inflight_groups=1) as w:
                w.start()
                async with asyncio.timeout(TIMEOUT_S):
                    while w.daemon.waiting != "old_engine_stale":  # noqa: ASYNC110 - the daemon has no event for it
                        await asyncio.sleep(0.01)
                assert not service.groups and not scorer.requests
                scorer.version = "3"
                await w.end()
                assert [group.metadata["old_logprobs"] for group in service.groups] == [{"policy_version": 3}] * 3
                assert not service.returned
            await stage.aclose()

    run(main())


@contextlib.asynccontextmanager
async def reference(engine: EngineDouble) -> AsyncIterator[EngineStage]:
    """Open a stage that asks `engine` for reference logprobs."""
    stage = EngineStage("ref_logprobs", [VllmEngine(engine.url, timeout_s=TIMEOUT_S)], micro_batch=4, patience_s=0.1)
    await stage.prepare(TIMEOUT_S, policy=())
    try:
        yield stage
    finally:
        await stage.aclose()


def test_a_stage_that_fails_costs_one_group_and_the_run_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with EngineDouble().up() as judge, reference(judge) as stage:
            judge.script.append(fail(400, "no such token"))
            async with world(
                tmp_path, EngineDouble(), ServiceDouble(prompts=5), stages=[stage], max_inflight_groups=1
            ) as w:
                await w.run()
                assert w.service.returned[0][0] == "t0"
                assert w.service.returned[0][1].startswith(f"ref_engine_refused: engine {judge.url}/v1/completions")
                assert w.daemon.progress.given_back == {"ref_engine_refused": 1}
                assert sorted(group.prompt_index or 0 for group in w.service.groups) == [1, 2, 3, 4]
                assert all(group.ref_logprobs is not None for group in w.service.groups)

    run(main())


def test_no_ticket_is_taken_while_a_stage_is_away(tmp_path: Path) -> None:
    async def main() -> None:
        async with EngineDouble().up() as judge:
            port = int(judge.url.rpartition(":")[2])
            stack = contextlib.AsyncExitStack()
            stage = await stack.enter_async_context(reference(judge))
        async with stack:
            with pytest.raises(EngineAway):
                await stage.compute([])
            async with world(tmp_path, EngineDouble(), ServiceDouble(prompts=2), stages=[stage]) as w:
                w.start()
                async with asyncio.timeout(TIMEOUT_S):
                    while w.daemon.waiting != "ref_engine_away":  # noqa: ASYNC110 - the daemon has no event for it
                        await asyncio.sleep(0.01)
                assert not w.service.asked
                async with EngineDouble().up(port):
                    await w.end()
                assert len(w.service.groups) == 2

    run(main())


def test_a_stage_that_fails_every_group_ends_generating_though_the_engine_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures_module, "FAULTS_IN_A_ROW", 5)
    monkeypatch.setattr(failures_module, "FIRST_PAUSE_S", 0.01)

    async def main() -> None:
        async with EngineDouble().up() as judge, reference(judge) as stage:
            judge.always = fail(400)
            async with world(tmp_path, EngineDouble(), ServiceDouble(), stages=[stage], max_inflight_groups=2) as w:
                with pytest.raises(BaseExceptionGroup) as caught:
                    await w.run()
                assert "5 groups in a row failed" in str(the_error(caught))

    run(main())


# ---------------------------------------------------------------------- ends


def test_it_ends_when_the_supply_is_finished_and_nothing_is_out(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, EngineDouble(), ServiceDouble(prompts=2)) as w:
            await w.run()
            assert w.daemon.progress.groups == 2

    run(main())


def test_it_goes_on_while_a_ticket_of_somebody_else_may_come_back(tmp_path: Path) -> None:
    async def main() -> None:
        service = ServiceDouble(prompts=2)
        service.next_index, service.out = 1, {"t0": 0}  # somebody else holds the first
        async with world(tmp_path, EngineDouble(), service) as w:
            w.start()
            await service.until(lambda: len(service.groups) == 1)
            asked = len(service.asked)
            await service.until(lambda: len(service.asked) >= asked + 3)
            assert w.task is not None and not w.task.done()
            service.prompts = 3  # the ticket comes back, for us
            service.out.clear()
            await w.end()
            assert len(service.groups) == 2

    run(main())


def test_a_run_that_finishes_ends_it_and_what_is_in_flight_is_still_brought(tmp_path: Path) -> None:
    async def main() -> None:
        service = ServiceDouble()
        service.open = 2
        async with gated(tmp_path, service, 2) as (w, gate):
            service.faults["tickets"] = deque([RunFinished("max_steps is reached")])
            await service.until(lambda: not service.faults["tickets"])
            gate.open.set()
            await w.end()
            assert len(service.groups) == 2

    run(main())


def test_groups_that_come_after_the_end_of_the_run_are_dropped(tmp_path: Path) -> None:
    async def main() -> None:
        service = ServiceDouble()
        service.open = 1
        service.faults["groups"] = deque([RunFinished("max_steps is reached")])
        async with world(tmp_path, EngineDouble(), service) as w:
            await w.run()
            assert service.groups == []

    run(main())


def test_a_stop_lets_what_is_nearly_done_finish(tmp_path: Path) -> None:
    async def main() -> None:
        service = ServiceDouble()
        service.open = 2
        async with gated(tmp_path, service, 2) as (w, gate):
            w.stop.set()
            gate.open.set()
            await w.end()
            assert len(service.groups) == 2
            assert service.returned == []

    run(main())


def test_a_stop_gives_back_what_does_not_finish_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_module, "FINISH_S", 0.1)

    async def main() -> None:
        service = ServiceDouble()
        service.open = 3
        async with gated(tmp_path, service, 3) as (w, gate):
            w.stop.set()
            await w.end()
            assert sorted(service.returned) == [(f"t{i}", "shutdown: the producer ends") for i in range(3)]
            assert all(is_forgiven(reason) for _, reason in service.returned), "a restart fails no prompt"
            assert service.out == {}
            gate.open.set()

    run(main())


def test_a_stop_while_the_service_is_away_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_module, "FINISH_S", 1000.0)

    async def main() -> None:
        service = ServiceDouble()
        service.faults["tickets"] = deque([ServiceUnavailable("restarting", retry_after_s=60.0)])
        async with world(tmp_path, EngineDouble(), service) as w:
            w.start()
            await service.until(lambda: not service.faults["tickets"])
            w.stop.set()
            await w.end()

    run(main())


def test_tickets_that_arrive_with_the_stop_are_given_back(tmp_path: Path) -> None:
    async def main() -> None:
        service = ServiceDouble()
        service.open = 0
        async with world(tmp_path, EngineDouble(), service, poll_wait_ms=1500) as w:
            w.start()
            await service.until(lambda: len(service.asked) == 1)
            w.stop.set()
            await asyncio.sleep(0)
            await service.change(open=2)
            await w.end()
            assert sorted(ticket for ticket, _ in service.returned) == ["t0", "t1"]

    run(main())


def test_a_fault_of_the_process_gives_tickets_back_and_is_raised(tmp_path: Path) -> None:
    async def main() -> None:
        gate, engine, service = Gate(), EngineDouble(), ServiceDouble()
        service.open = 2
        engine.script.append(gate)
        engine.script.append(reply(weight_versions=[{"version": "other", "start": 0, "end": 3}]))
        async with world(tmp_path, engine, service) as w:
            with pytest.raises(BaseExceptionGroup) as caught:
                await w.run()
            assert isinstance(the_error(caught), EngineUnfit)
            assert sorted(service.returned) == [(f"t{i}", "producer_fault: the producer ends") for i in range(2)]
            gate.open.set()

    run(main())


def test_a_token_that_is_not_known_ends_it(tmp_path: Path) -> None:
    async def main() -> None:
        service = ServiceDouble()
        service.faults["tickets"] = deque([Unauthorized("no such token")])
        async with world(tmp_path, EngineDouble(), service) as w:
            with pytest.raises(BaseExceptionGroup) as caught:
                await w.run()
            assert isinstance(the_error(caught), Unauthorized)

    run(main())


# ---------------------------------------------------------------------- faults of the engine


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (reply(token_ids=None), "engine_bad_answer"),
        (reply(logprobs=None), "engine_bad_answer"),
        (fail(400, "prompt too long"), "engine_refused"),
    ],
)
def test_an_engine_fault_gives_the_ticket_back_and_the_run_goes_on(tmp_path: Path, script: Any, reason: str) -> None:
    async def main() -> None:
        engine, service = EngineDouble(), ServiceDouble(prompts=4)
        engine.script.append(script)
        async with world(tmp_path, engine, service, max_inflight_groups=1) as w:
            await w.run()
            ((ticket, said),) = service.returned
            assert ticket == "t0" and said.startswith(f"{reason}: engine {engine.url}")
            assert sorted(group.prompt_index or 0 for group in service.groups) == [1, 2, 3]
            assert w.daemon.progress.given_back == {reason: 1}

    run(main())


def test_a_request_that_failed_once_is_tried_again_without_giving_the_ticket_back(tmp_path: Path) -> None:
    async def main() -> None:
        engine, service = EngineDouble(), ServiceDouble(prompts=2)
        engine.script.append(fail(500))
        async with world(tmp_path, engine, service) as w:
            await w.run()
            assert service.returned == []
            assert len(service.groups) == 2

    run(main())


def test_no_ticket_is_taken_while_no_engine_is_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        engine, service = EngineDouble(), ServiceDouble(prompts=2)
        engine.always, engine.healthy = fail(503), False
        async with world(tmp_path, engine, service, patience_s=0.1, max_inflight_groups=1) as w:
            w.start()
            await service.until(lambda: len(service.returned) == 1)
            asked = len(service.asked)
            engine.probed.clear()
            await engine.probed.wait()
            assert len(service.asked) == asked
            engine.always, engine.healthy = None, True
            await w.end()
            assert len(service.groups) == 1
            assert service.returned[0][1].startswith("engine_error: engine http://127.0.0.1")

    run(main())
    assert "waiting for an engine" in caplog.text


def test_an_engine_that_fails_every_group_ends_it_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures_module, "FAULTS_IN_A_ROW", 5)
    monkeypatch.setattr(failures_module, "FIRST_PAUSE_S", 0.01)

    async def main() -> None:
        engine, service = EngineDouble(), ServiceDouble()
        engine.always = reply(logprobs=None)
        async with world(tmp_path, engine, service, max_inflight_groups=1) as w:
            with pytest.raises(BaseExceptionGroup) as caught:
                await w.run()
            assert "5 groups in a row failed; the last: engine" in str(the_error(caught))
            assert sum(reason.startswith("engine_bad_answer") for _, reason in service.returned) == 5
            assert not service.out  # of the call that was under way, too

    run(main())


def test_an_engine_that_stands_still_once_costs_what_was_in_flight_and_the_run_goes_on(tmp_path: Path) -> None:
    """By default 64 groups are in flight, and all of them fail together."""
    slots = DaemonOptions(producer="me", sampling=Sampling(n=1, max_tokens=1)).max_inflight_groups

    async def main() -> None:
        gate, engine, service = Gate(), EngineDouble(), ServiceDouble(prompts=2 * slots)
        engine.always = gate
        async with world(tmp_path, engine, service, engine_timeout_s=1.0) as w:
            w.start()
            await gate.requests(slots)
            engine.always = None
            await w.end()
            assert [said.partition(":")[0] for _, said in service.returned] == ["engine_timeout"] * slots
            assert len(service.groups) == slots

    run(main())


def test_while_every_group_fails_one_at_a_time_is_tried_and_the_run_goes_on_when_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A judge that is away: of 64 in flight all fail, then few more; once it is back, all slots are used again."""
    monkeypatch.setattr(failures_module, "FIRST_PAUSE_S", 0.01)
    back = threading.Event()

    def judge(prompt: Prompt, text: str) -> Score:
        if not back.is_set():
            raise ConnectionError("judge is away")
        return Score(1.0)

    async def main() -> None:
        service = ServiceDouble(prompts=200)
        async with world(tmp_path, EngineDouble(), service, environment=Broken(judge)) as w:
            w.start()
            await service.until(lambda: len(service.returned) >= 64)
            await until(lambda: w.daemon.waiting == "groups_fail")
            assert max(request["count"] for request in service.asked[1:]) == 1
            assert w.daemon.generating <= 1
            back.set()
            await w.end()
            assert len(service.groups) + len(service.returned) == 200
            assert len(service.returned) < 80

    run(main())
    assert "groups in a row failed; trying one at a time, the next in 0.01 s: reward of prompt" in caplog.text


# ---------------------------------------------------------------------- faults of the reward


def test_a_reward_that_raises_hangs_or_is_nan_gives_its_ticket_back_and_the_run_goes_on(tmp_path: Path) -> None:
    released = threading.Event()

    def score(prompt: Any, text: str) -> Score:
        if prompt.text == "abc":
            raise ValueError("no parse")
        if prompt.text == "abd":
            released.wait(TIMEOUT_S)
        return Score(float("nan") if prompt.text == "bcd" else 1.0)

    async def main() -> None:
        service = ServiceDouble(prompts=4)
        async with world(tmp_path, EngineDouble(), service, environment=Broken(score), reward_timeout_s=1.0) as w:
            await w.run()
            reasons = {ticket: said.partition(":")[0] for ticket, said in service.returned}
            assert reasons == {"t0": "reward_raised", "t1": "reward_timeout", "t2": "reward_not_finite"}
            assert [group.prompt_id for group in service.groups] == ["cd"]

    run(main())
    released.set()


@pytest.mark.parametrize("error", [asyncio.CancelledError("inner"), SystemExit("inner")], ids=repr)
def test_a_coroutine_that_lets_out_what_ends_tasks_and_loops_holds_no_slot(
    tmp_path: Path, error: BaseException
) -> None:
    class Raising:
        def check(self, prompt: Prompt) -> None:
            """Accept any prompt."""

        async def score(self, prompt: Prompt, completion_text: str) -> Score:
            if prompt.text == "abc":
                raise error
            return Score(1.0)

    async def main() -> None:
        service = ServiceDouble(prompts=8)
        async with world(
            tmp_path, EngineDouble(), service, environment=[Reward("raising", Raising())], max_inflight_groups=1
        ) as w:
            await w.run()
            reasons = {ticket: said.partition(":")[0] for ticket, said in service.returned}
            assert reasons == {"t0": "reward_raised", "t4": "reward_raised"}
            assert len(service.groups) == 6

    run(main())


def test_a_cancellation_that_nobody_asked_for_gives_the_ticket_back_and_the_run_goes_on(tmp_path: Path) -> None:
    class Cancelled:
        def at(self, prompt_index: int) -> Prompt:
            if prompt_index == 1:
                raise asyncio.CancelledError
            return make_prompt()

    async def main() -> None:
        service = ServiceDouble(prompts=3)
        async with world(tmp_path, EngineDouble(), service, prompts=Cancelled(), max_inflight_groups=1) as w:
            await w.run()
            assert sorted(group.prompt_index or 0 for group in service.groups) == [0, 2]
            assert [ticket for ticket, _ in service.returned] == ["t1"]

    run(main())


def test_a_prompt_that_cannot_be_made_costs_its_own_ticket(tmp_path: Path) -> None:
    class Gappy:
        def at(self, prompt_index: int) -> Prompt:
            if prompt_index == 1:
                raise PromptFault("prompt_raised", "no first")
            return make_prompt()

    async def main() -> None:
        async with world(tmp_path, EngineDouble(), ServiceDouble(prompts=3), prompts=Gappy()) as w:
            await w.run()
            assert sorted(group.prompt_index or 0 for group in w.service.groups) == [0, 2]
            assert w.service.returned == [("t1", "prompt_raised: no first")]

    run(main())


def test_rewards_too_large_for_advantages_are_a_fault_of_the_reward(tmp_path: Path) -> None:
    async def main() -> None:
        rewards = iter([1e308, -1e308, 0.0, 0.0])
        service = ServiceDouble(prompts=1)
        environment = Broken(lambda prompt, text: Score(next(rewards)))
        async with world(tmp_path, EngineDouble(), service, environment=environment) as w:
            await w.run()
            assert service.returned[0][1].startswith("reward_too_large")

    run(main())


# ---------------------------------------------------------------------- the service's answers


def test_groups_are_kept_while_the_service_is_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        service = ServiceDouble(prompts=3)
        service.faults["groups"] = deque(
            [ServiceUnavailable("restarting", retry_after_s=0.0), NoRoom("full", retry_after_s=0.0)]
        )
        service.faults["tickets"] = deque([ServiceUnavailable("restarting", retry_after_s=0.0)])
        async with world(tmp_path, EngineDouble(), service) as w:
            await w.run()
            assert len(service.groups) == 3
            assert service.returned == []

    run(main())
    assert "for the service (append): restarting" in caplog.text and "for room in the service (append)" in caplog.text


def lost() -> DataLost:
    return DataLost("Redis was emptied; restore it", name="redis", value="r")


def test_groups_are_kept_while_redis_has_lost_data_until_an_operator_brings_it_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Told once per call, with what it waits for; the status line names it; then everything is stored."""

    async def main() -> None:
        service, file = ServiceDouble(prompts=2), tmp_path / "metrics.jsonl"
        service.faults["groups"] = deque([lost(), lost(), ServiceUnavailable("restarting", retry_after_s=0.0), lost()])
        async with world(tmp_path, EngineDouble(), service, metrics_file=file, report_every_s=0.01) as w:
            await w.run()
            assert (len(service.groups), service.returned) == (2, [])
        assert "data_lost" in _reasons(file)

    run(main())
    told = [record for record in caplog.records if "for an operator" in record.message]
    assert [record.levelname for record in told] == ["ERROR", "ERROR"]
    assert "Redis was emptied; restore it" in told[0].message


def test_a_redis_that_stays_without_its_data_ends_the_generator_in_the_end(tmp_path: Path) -> None:
    """It says how long it waited, for whom, and what that costs."""

    async def main() -> None:
        service = ServiceDouble(prompts=1)
        service.faults["groups"] = deque(lost() for _ in range(100))
        async with world(tmp_path, EngineDouble(), service, service_patience_s=0.2) as w:
            with pytest.raises(BaseExceptionGroup) as caught:
                await w.run()
        error = the_error(caught)
        assert isinstance(error, DataLost)
        assert "waited 0.2 s for an operator to restore the data; 1 groups in flight are lost" in error.detail

    run(main())


def test_a_service_that_stays_away_ends_the_generator_in_the_end(tmp_path: Path) -> None:
    """Every answer starts the time anew, and one that has no room is an answer."""

    async def main() -> None:
        service = ServiceDouble(prompts=2)
        away = [ServiceUnavailable("restarting", retry_after_s=0.0) for _ in range(100)]
        service.faults["groups"] = deque([*away[:1], NoRoom("full", retry_after_s=0.3), *away[1:]])
        async with world(tmp_path, EngineDouble(), service, service_patience_s=0.2) as w:
            with pytest.raises(BaseExceptionGroup) as caught:
                await w.run()
        error = the_error(caught)
        assert isinstance(error, ServiceUnavailable)
        assert error.detail.startswith("waited 0.2 s for the service (append); ")
        assert error.detail.endswith(" groups in flight are lost: restarting") and error.bound == 0.2
        assert len(service.faults["groups"]) < 98

    run(main())


def test_as_many_groups_are_generated_at_once_as_the_engines_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for less while rollouts queue, goes back up when none does, and never beyond its bounds."""
    monkeypatch.setattr(daemon_module, "_LOAD_EVERY_S", 0.01)

    async def main() -> None:
        gate, engine, service = Gate(), EngineDouble(), ServiceDouble()
        engine.always, engine.gauges = gate, (3, 0)
        async with world(tmp_path, engine, service, max_inflight_groups=8, min_inflight_groups=2) as w:
            w.start()
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

    run(main())


def test_engines_without_gauges_get_as_many_groups_as_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_module, "_LOAD_EVERY_S", 0.01)

    async def main() -> None:
        service = ServiceDouble()
        async with gated(tmp_path, service, 5, max_inflight_groups=5, min_inflight_groups=1) as (w, gate):
            await until(lambda: w.engine.calls.count("metrics") > 2)
            assert w.daemon.limit == 5
            w.stop.set()
            gate.open.set()
            await w.end()

    run(main())


def test_other_bounds_and_another_temperature_count_from_the_next_ticket_on(tmp_path: Path) -> None:
    async def main() -> None:
        service = ServiceDouble(prompts=3)
        async with gated(tmp_path, service, 1, max_inflight_groups=1) as (w, gate):
            await w.daemon.reconfigure(temperature=0.5, max_inflight_groups=3)
            await gate.requests(2)
            with pytest.raises(Invalid, match="min_inflight_groups is 4; it must be from 1 to max_inflight_groups, 3"):
                await w.daemon.reconfigure(min_inflight_groups=4, temperature=2.0)
            gate.open.set()
            await w.end()
        told = {group.prompt_index: group.metadata["sampling"]["temperature"] for group in service.groups}
        assert told == {0: 1.0, 1: 0.5, 2: 0.5}
        assert [set(group.temperatures.tolist()) for group in service.groups if group.prompt_index == 0] == [{1.0}]

    run(main())


def test_groups_are_kept_while_nothing_listens_at_the_services_address(tmp_path: Path) -> None:
    async def main() -> None:
        gate, engine, service = Gate(), EngineDouble(), ServiceDouble(prompts=2)
        engine.always = gate
        async with contextlib.AsyncExitStack() as gone:
            await gone.enter_async_context(service.up())
            port = int(service.url.rpartition(":")[2])
            async with world(tmp_path, engine, service, serve=False) as w:
                w.start()
                await gate.requests(2)
                await gone.aclose()
                gate.open.set()
                async with asyncio.timeout(TIMEOUT_S):
                    while w.daemon.waiting != "service_away":  # noqa: ASYNC110 - nothing is told while nothing listens
                        await asyncio.sleep(0.01)
                async with service.up(port):
                    await w.end()
        assert len(service.groups) == 2

    run(main())


def test_a_group_ahead_of_the_published_version_is_held_until_it_is_published(tmp_path: Path) -> None:
    async def main() -> None:
        engine, service = EngineDouble(version=1), ServiceDouble()
        service.open = 2
        async with world(tmp_path, engine, service) as w:
            w.start()
            await service.until(lambda: len(service.asked) >= 3)
            assert service.appended == []
            await service.change(published=1)
            await service.until(lambda: len(service.groups) == 2)
            assert service.returned == []
            w.stop.set()
            await w.end()

    run(main())


def test_a_held_group_is_given_back_when_its_ticket_has_run_out(tmp_path: Path) -> None:
    async def main() -> None:
        engine, service = EngineDouble(version=1), ServiceDouble(prompts=1)
        service.expires_in_s = 0.2
        async with world(tmp_path, engine, service) as w:
            await w.run()
            assert service.appended == []
            assert [said.partition(":")[0] for _, said in service.returned] == ["version_above_published"]

    run(main())


def test_a_held_group_is_given_back_when_the_run_is_rewound(tmp_path: Path) -> None:
    async def main() -> None:
        engine, service = EngineDouble(version=6), ServiceDouble(prompts=1)
        service.published, engine.always = 5, sampled_by(6)
        async with world(tmp_path, engine, service) as w:
            w.start()
            await service.until(lambda: len(service.asked) >= 2)
            engine.version = 3  # a trainer that goes back loads its engines, too
            await service.change(published=3)
            await w.end()
            assert [said.partition(":")[0] for _, said in service.returned] == ["lost_lineage"]

    run(main())


def test_a_held_group_is_given_back_when_the_engine_loses_its_version_before_it_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fleet still labelled by the last run, or a trainer that died between loading and announcing: its number comes
    again, and means other weights."""
    monkeypatch.setattr(daemon_module, "_HELD_EVERY_S", 0.01)

    async def main() -> None:
        engine, service = EngineDouble(version=1), ServiceDouble()
        service.open = 1
        async with world(tmp_path, engine, service) as w:
            w.start()
            await until(lambda: w.daemon.waiting == "awaiting_publication")
            engine.version = 0
            await service.until(lambda: bool(service.returned))
            assert [said.partition(":")[0] for _, said in service.returned] == ["lost_lineage"]
            engine.version = 1
            await service.change(published=1, open=1)
            await service.until(lambda: bool(service.groups))
            assert [group.prompt_index for group in service.groups] == [1]
            w.stop.set()
            await w.end()

    run(main())


def test_a_group_of_a_version_that_was_taken_back_is_given_back(tmp_path: Path) -> None:
    async def main() -> None:
        gate, engine, service = Gate(), EngineDouble(version=5), ServiceDouble(prompts=1)
        service.published, engine.always = 5, sampled_by(5, gate)
        async with world(tmp_path, engine, service) as w:
            w.start()
            await gate.requests(1)
            engine.version = 4
            await service.change(published=4)
            gate.open.set()
            await w.end()
            assert [said.partition(":")[0] for _, said in service.returned] == ["lost_lineage"]

    run(main())


def test_groups_of_weights_that_a_rewind_took_back_are_given_back_even_where_their_number_is_published_again(
    tmp_path: Path,
) -> None:
    """They are held meanwhile; the version that comes is another."""

    async def main() -> None:
        gate, engine, service = Gate(), EngineDouble(version=5), ServiceDouble(prompts=1)
        service.published, engine.always = 5, sampled_by(5, gate)
        async with world(tmp_path, engine, service) as w:
            w.start()
            await gate.requests(1)
            await service.change(published=4)
            await until(lambda: w.daemon.waiting == "engine_stale")
            engine.version = 5  # of the new history
            await service.change(published=5)
            gate.open.set()
            await service.until(lambda: bool(service.returned))
            assert [said.partition(":")[0] for _, said in service.returned] == ["lost_lineage"]
            w.stop.set()
            await w.end()
        assert service.groups == []

    run(main())


def test_a_group_too_old_for_every_step_to_come_is_given_back_unscored_and_counts_as_no_failure(tmp_path: Path) -> None:
    assert is_forgiven("superseded: detail")

    async def main() -> None:
        gate, engine, service = Gate(), EngineDouble(version=3), ServiceDouble(prompts=1)
        service.published, engine.always = 3, sampled_by(3, gate)
        scored: list[str] = []

        def score(prompt: Prompt, text: str) -> Score:
            scored.append(text)
            return Score(0.0)

        async with world(tmp_path, engine, service, environment=Broken(score), max_staleness=1) as w:
            w.start()
            await gate.requests(1)
            engine.version = 5
            known = engine.calls.count("weight_info")
            await service.change(published=5)
            await until(lambda: engine.calls.count("weight_info") > known)  # it has heard of the publication
            gate.open.set()
            await w.end()
            assert [said.partition(":")[0] for _, said in service.returned] == ["superseded"]
            assert not scored and w.daemon.progress.given_back == {"superseded": 1}

    run(main())


def test_no_ticket_is_taken_while_every_engine_is_stale(tmp_path: Path) -> None:
    async def main() -> None:
        engine, service = EngineDouble(version=0), ServiceDouble(prompts=3)
        service.published, service.open = 4, 1
        async with world(tmp_path, engine, service) as w:
            w.start()
            await until(lambda: w.daemon.waiting == "engine_stale")
            await service.change(open=2)
            assert service.groups == [] and service.next_index == 1
            engine.version = 4
            await w.end()
            assert {group.policy_version for group in service.groups} == {4} and len(service.groups) == 3

    run(main())


@pytest.mark.parametrize(
    ("refused", "given", "counts"), [("overlong", "rejected_overlong", True), ("lost_lineage", "lost_lineage", False)]
)
def test_a_refused_group_is_given_back_with_the_services_reason(
    tmp_path: Path, refused: str, given: str, counts: bool
) -> None:
    """Work that a rewind took back says nothing about its prompt, and its reason is one that is forgiven."""
    assert is_forgiven(f"{given}: detail") is not counts

    async def main() -> None:
        service = ServiceDouble(prompts=3)
        service.judge = lambda group: refused if group.prompt_index == 1 else None
        async with world(tmp_path, EngineDouble(), service) as w:
            await w.run()
            assert [(ticket, said.partition(":")[0]) for ticket, said in service.returned] == [("t1", given)]
            assert len(service.groups) == 2

    run(main())


def test_an_append_that_is_refused_as_a_whole_is_sent_group_by_group(tmp_path: Path) -> None:
    async def main() -> None:
        service = ServiceDouble(prompts=4)
        # Away first, so that all four are ready together; then too large as a whole, and the first also alone.
        faults: list[ReplaybufError] = [NoRoom("full", retry_after_s=0.3), TooLarge("body"), TooLarge("group")]
        service.faults["groups"] = deque(faults)
        async with gated(tmp_path, service, 4) as (w, gate):
            gate.open.set()
            await w.end()
            assert len(service.groups) + len(service.returned) == 4
            assert 1 <= len(service.returned) <= 2
            assert {said for _, said in service.returned} <= {"append_refused: group", "append_refused: body"}

    run(main())


# ---------------------------------------------------------------------- sight


def test_the_last_status_says_what_was_done(tmp_path: Path) -> None:
    file = tmp_path / "generate.jsonl"

    async def main() -> None:
        async with world(tmp_path, EngineDouble(), ServiceDouble(prompts=3), metrics_file=file) as w:
            await w.run()

    run(main())
    last = json.loads(file.read_text().splitlines()[-1])
    assert (last["groups"], last["rollouts"], last["generated_tokens"], last["reward_mean"]) == (3, 12, 36, 1.0)
    assert last["waiting"] is None or last["waiting"] == "finished"


@pytest.mark.parametrize("reason", ["rate_limited", "service_away", "awaiting_publication", "engine_away"])
def test_the_status_says_what_is_waited_for(tmp_path: Path, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    file = tmp_path / "generate.jsonl"

    async def main() -> None:
        engine, service = EngineDouble(), ServiceDouble()
        service.open = 0
        if reason == "service_away":
            service.faults["tickets"] = deque([ServiceUnavailable("restarting", retry_after_s=0.2)] * 100)
        if reason == "awaiting_publication":
            engine.version, service.open = 1, 1
        if reason == "engine_away":
            engine.always, engine.healthy, service.open = fail(503), False, 1
        async with world(tmp_path, engine, service, metrics_file=file, report_every_s=0.02) as w:
            w.start()
            while reason not in _reasons(file):  # noqa: ASYNC110 - the file is what a reader sees
                await asyncio.sleep(0.01)
            w.stop.set()
            await w.end()

    run(main())
    assert f"waiting: {reason}" in caplog.text


def _reasons(file: Path) -> list[str | None]:
    return [json.loads(line)["waiting"] for line in file.read_text().splitlines()] if file.exists() else []
