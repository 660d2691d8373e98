"""Faults of engines, stages and rewards: the ticket is returned with the reason, and the generator goes on."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response, StreamingResponse

from replaybuf.errors import EngineAway, PromptFault
from replaybuf.generator import daemon as daemon_module
from replaybuf.generator import failures as failures_module
from replaybuf.generator.environments import Reward, Score
from replaybuf.generator.fleet import TRIES
from replaybuf.generator.fleet import member as member_module
from replaybuf.generator.prompts import Prompt
from replaybuf.kernel.state.return_reasons import is_forgiven
from tests.generator.doubles import (
    TIMEOUT_S,
    Broken,
    EngineDouble,
    Gate,
    Script,
    ServiceDouble,
    fail,
    make_prompt,
    reply,
)
from tests.generator.worlds import completed, failed, reference, sampled_by, started, world
from tests.waiting import until


@pytest.fixture
def gives_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up after 5 failures in a row."""
    monkeypatch.setattr(failures_module, "FAULTS_IN_A_ROW", 5)
    monkeypatch.setattr(failures_module, "FIRST_PAUSE_S", 0.01)


# ---------------------------------------------------------------------- engines


async def die(request: dict[str, Any]) -> Response:
    """Script: the connection breaks in the middle of the answer."""

    async def half() -> AsyncIterator[bytes]:
        yield b'{"choices": [{"index": 0, "token_ids": [1, '
        raise ConnectionResetError

    return StreamingResponse(half(), media_type="application/json")


@pytest.mark.parametrize(
    ("script", "reason"),
    [(reply(token_ids=None), "engine_bad_answer"), (fail(400, "prompt too long"), "engine_refused")],
)
def test_an_engine_fault_returns_one_ticket(tmp_path: Path, script: Script, reason: str) -> None:
    engine, service = EngineDouble(), ServiceDouble(prompts=4)
    engine.script.append(script)
    w = completed(tmp_path, service, engine, max_inflight_groups=1)
    ((ticket, text),) = service.returned
    assert ticket == "t0" and text.startswith(f"{reason}: engine {engine.url}")
    assert w.stored == [1, 2, 3]
    assert w.daemon.progress.given_back == {reason: 1}


def test_a_request_that_failed_once_is_retried_and_returns_no_ticket(tmp_path: Path) -> None:
    engine = EngineDouble()
    engine.script.append(fail(500))
    w = completed(tmp_path, ServiceDouble(prompts=2), engine)
    assert w.service.returned == [] and len(w.service.groups) == 2


def test_an_engine_that_dies_during_an_answer_costs_no_ticket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_module, "PROBE_FIRST_S", 0.01)
    engine = EngineDouble()
    engine.script.append(die)
    w = completed(tmp_path, ServiceDouble(prompts=4), engine, max_inflight_groups=1)
    assert w.service.returned == [] and w.stored == [0, 1, 2, 3]
    assert w.daemon.engines[0].outcomes == {"ok": 4, "engine_away": 1}


def test_a_request_over_which_an_engine_dies_at_every_try_is_a_failed_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that brings engines down would otherwise come again for ever."""
    monkeypatch.setattr(member_module, "PROBE_FIRST_S", 0.01)
    engine = EngineDouble()
    engine.script.extend([die] * TRIES)
    w = completed(tmp_path, ServiceDouble(prompts=4), engine, max_inflight_groups=1)
    ((ticket, text),) = w.service.returned
    assert ticket == "t0" and not is_forgiven(text)
    assert text.startswith("engine_lost: the connection to the engine failed in 3 tries")
    assert w.stored == [1, 2, 3]


async def test_a_group_of_old_weights_is_not_stored_and_the_engine_is_used_once_its_weights_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_module, "PROBE_FIRST_S", 0.01)
    engine, service = EngineDouble(version=5), ServiceDouble(prompts=4)
    service.published = 5
    engine.script.append(sampled_by(2))  # it restarted, and its answer shows that
    async with started(tmp_path, engine, service, max_inflight_groups=1) as w:
        await until(lambda: bool(engine.requests))
        engine.version = 2
        await until(lambda: w.daemon.waiting == "engine_stale")
        engine.version = 5
        await w.end()
        assert {group.policy_version for group in service.groups} == {5}
        assert len(service.groups) == 4 and service.returned == []


async def test_no_ticket_is_taken_while_no_engine_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(daemon_module, "_ENGINE_POLL_S", 0.05)
    monkeypatch.setattr(member_module, "PROBE_FIRST_S", 0.05)
    engine, service = EngineDouble(), ServiceDouble(prompts=2)

    async def break_down(request: dict[str, Any]) -> Response | dict[str, Any] | None:
        engine.healthy = False
        return await fail(503)(request)

    engine.always = break_down
    async with started(tmp_path, engine, service, patience_s=0.1, max_inflight_groups=1) as w:
        await service.until(lambda: len(service.returned) == 1)
        asked = len(service.asked)
        engine.probed.clear()
        await engine.probed.wait()
        assert len(service.asked) == asked
        engine.always, engine.healthy = None, True
        await w.end()
        assert len(service.groups) == 1
        assert service.returned[0][1].startswith("engine_error: engine http://127.0.0.1")
    assert "waiting for an engine" in caplog.text


@pytest.mark.usefixtures("gives_up_soon")
def test_an_engine_that_fails_every_group_ends_it_with_the_reason(tmp_path: Path) -> None:
    engine, service = EngineDouble(), ServiceDouble()
    engine.always = reply(logprobs=None)
    w, error = failed(tmp_path, service, engine, max_inflight_groups=1)
    assert "5 groups in a row failed; the last: engine" in str(error)
    assert list(w.reasons.values()).count("engine_bad_answer") == 5
    assert not service.out, "the tickets of the last call are returned too"


async def test_an_engine_that_stalls_once_costs_the_groups_in_flight(tmp_path: Path) -> None:
    """All of them fail together, which counts as one failure in a row."""
    slots = 16
    gate, engine, service = Gate(), EngineDouble(), ServiceDouble(prompts=2 * slots)
    engine.always = gate
    async with started(tmp_path, engine, service, engine_timeout_s=1.0, max_inflight_groups=slots) as w:
        await gate.requests(slots)
        engine.always = None
        w.server._timeout_s = TIMEOUT_S  # of the requests to come, which are answered
        await w.end()
        assert list(w.reasons.values()) == ["engine_timeout"] * slots
        assert len(service.groups) == slots


async def test_a_group_too_old_for_every_step_to_come_is_returned_unscored_and_is_no_failure(tmp_path: Path) -> None:
    assert is_forgiven("superseded: detail")
    gate, engine, service = Gate(), EngineDouble(version=3), ServiceDouble(prompts=1)
    service.published, engine.always = 3, sampled_by(3, gate)
    scored: list[str] = []

    def score(prompt: Prompt, text: str) -> Score:
        scored.append(text)
        return Score(0.0)

    async with started(tmp_path, engine, service, environment=Broken(score), max_staleness=1) as w:
        await gate.requests(1)
        engine.version = 5
        reads = engine.calls.count("weight_info")
        await service.change(published=5)
        await until(lambda: engine.calls.count("weight_info") > reads)  # the fleet has learned of the publication
        gate.open.set()
        await w.end()
        assert w.reasons == {"t0": "superseded"}
        assert not scored and w.daemon.progress.given_back == {"superseded": 1}


async def test_no_ticket_is_taken_while_every_engine_is_stale(tmp_path: Path) -> None:
    engine, service = EngineDouble(version=0), ServiceDouble(prompts=3)
    service.published, service.open = 4, 1
    async with started(tmp_path, engine, service) as w:
        await until(lambda: w.daemon.waiting == "engine_stale")
        taken = service.next_index  # the generator may have asked for a ticket before it knew the engine's version
        await service.change(open=3 - taken)
        assert service.groups == [] and service.next_index == taken < 2
        engine.version = 4
        await w.end()
        assert {group.policy_version for group in service.groups} == {4} and len(service.groups) == 3


# ---------------------------------------------------------------------- stages


async def test_a_stage_that_fails_costs_one_group(tmp_path: Path) -> None:
    async with EngineDouble().up() as judge, reference(judge) as stage:
        judge.script.append(fail(400, "no such token"))
        service = ServiceDouble(prompts=5)
        async with world(tmp_path, EngineDouble(), service, stages=[stage], max_inflight_groups=1) as w:
            await w.run()
        ((ticket, text),) = service.returned
        assert ticket == "t0" and text.startswith(f"ref_engine_refused: engine {judge.url}/v1/completions")
        assert w.stored == [1, 2, 3, 4]
        assert all(group.ref_logprobs is not None for group in service.groups)


async def test_no_ticket_is_taken_while_a_stage_is_away(tmp_path: Path) -> None:
    async with EngineDouble().up() as judge:
        port = int(judge.url.rpartition(":")[2])
        stack = contextlib.AsyncExitStack()
        stage = await stack.enter_async_context(reference(judge))
    async with stack:
        with pytest.raises(EngineAway):
            await stage.compute([])
        async with started(tmp_path, EngineDouble(), ServiceDouble(prompts=2), stages=[stage]) as w:
            await until(lambda: w.daemon.waiting == "ref_engine_away", poll_s=0.01)
            assert not w.service.asked
            async with EngineDouble().up(port):
                await w.end()
            assert len(w.service.groups) == 2


@pytest.mark.usefixtures("gives_up_soon")
async def test_a_stage_that_fails_every_group_ends_it_although_the_engine_answers(tmp_path: Path) -> None:
    async with EngineDouble().up() as judge, reference(judge) as stage:
        judge.always = fail(400)
        async with world(tmp_path, EngineDouble(), ServiceDouble(), stages=[stage], max_inflight_groups=2) as w:
            with pytest.raises(BaseExceptionGroup) as caught:
                await w.run()
        assert "5 groups in a row failed" in str(caught.value.exceptions[0])


# ---------------------------------------------------------------------- rewards and prompts


async def test_after_failures_in_a_row_one_group_at_a_time_is_tried_until_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A judge is away: all 64 groups in flight fail, then few more. Once it is back, all slots are used again."""
    monkeypatch.setattr(failures_module, "FIRST_PAUSE_S", 0.01)
    back = threading.Event()

    def judge(prompt: Prompt, text: str) -> Score:
        if not back.is_set():
            raise ConnectionError("judge is away")
        return Score(1.0)

    service = ServiceDouble(prompts=200)
    async with started(tmp_path, EngineDouble(), service, environment=Broken(judge)) as w:
        await service.until(lambda: len(service.returned) >= 64)
        await until(lambda: w.daemon.waiting == "groups_fail")
        assert max(request["count"] for request in service.asked[1:]) == 1
        assert w.daemon.generating <= 1
        back.set()
        await w.end()
        assert len(service.groups) + len(service.returned) == 200
        assert len(service.returned) < 80
    assert "groups in a row failed; trying one at a time, the next in 0.01 s: reward of prompt" in caplog.text


def test_a_reward_that_raises_or_is_nan_returns_its_ticket(tmp_path: Path) -> None:
    def score(prompt: Any, text: str) -> Score:
        if prompt.text == "abc":
            raise ValueError("no parse")
        return Score(float("nan") if prompt.text == "bcd" else 1.0)

    w = completed(tmp_path, ServiceDouble(prompts=4), environment=Broken(score))
    assert w.reasons == {"t0": "reward_raised", "t2": "reward_not_finite"}
    assert sorted(group.prompt_id for group in w.service.groups) == ["abd", "cd"]


def test_a_reward_that_hangs_returns_its_ticket(tmp_path: Path) -> None:
    released = threading.Event()
    hanging = Broken(lambda prompt, text: Score(float(released.wait(TIMEOUT_S))))
    w = completed(tmp_path, ServiceDouble(prompts=1), environment=hanging, reward_timeout_s=0.05)
    released.set()
    assert w.reasons == {"t0": "reward_timeout"}


@pytest.mark.parametrize("error", [asyncio.CancelledError("inner"), SystemExit("inner")], ids=repr)
def test_a_coroutine_that_raises_a_cancellation_or_an_exit_keeps_no_slot(tmp_path: Path, error: BaseException) -> None:
    class Raising:
        def check(self, prompt: Prompt) -> None:
            """Accept any prompt."""

        async def score(self, prompt: Prompt, completion_text: str) -> Score:
            if prompt.text == "abc":
                raise error
            return Score(1.0)

    rewards = [Reward("raising", Raising())]
    w = completed(tmp_path, ServiceDouble(prompts=8), environment=rewards, max_inflight_groups=1)
    assert w.reasons == {"t0": "reward_raised", "t4": "reward_raised"}
    assert len(w.service.groups) == 6


@pytest.mark.parametrize(
    ("error", "reason"),
    [(asyncio.CancelledError(), "reward_raised"), (PromptFault("prompt_raised", "no first"), "prompt_raised")],
    ids=repr,
)
def test_a_prompt_that_raises_returns_its_own_ticket(tmp_path: Path, error: BaseException, reason: str) -> None:
    class Incomplete:
        def at(self, prompt_index: int) -> Prompt:
            if prompt_index == 1:
                raise error
            return make_prompt()

    w = completed(tmp_path, ServiceDouble(prompts=3), prompts=Incomplete(), max_inflight_groups=1)
    assert w.stored == [0, 2] and w.reasons == {"t1": reason}


def test_the_reason_of_a_returned_ticket_is_one_printable_line_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service refuses anything else, and then the prompt would wait until its ticket expires."""
    monkeypatch.setenv("SOURCE_KEY", "hunter2")

    class Failing:
        def at(self, prompt_index: int) -> Prompt:
            raise PromptFault("prompt_raised", "two\nlines\x00 with hunter2")

    w = completed(tmp_path, ServiceDouble(prompts=1), prompts=Failing())
    assert w.service.returned == [("t0", "prompt_raised: two lines\ufffd with $SOURCE_KEY")]
    failure = next(report["failure"] for _, report in w.service.heartbeats if "failure" in report)
    assert (failure["reason"], failure["prompt_index"]) == ("prompt_raised", 0)
    assert failure["traceback"].endswith("two\nlines\ufffd with $SOURCE_KEY") and "in at" in failure["traceback"]


def test_rewards_too_large_for_advantages_are_a_fault_of_the_reward(tmp_path: Path) -> None:
    rewards = deque([1e308, -1e308, 0.0, 0.0])
    environment = Broken(lambda prompt, text: Score(rewards.popleft()))
    assert completed(tmp_path, ServiceDouble(prompts=1), environment=environment).reasons == {"t0": "reward_too_large"}
