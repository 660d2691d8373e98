"""Logprob stages of reference, old policy and teacher, with servers over real HTTP or a model in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.responses import Response

from replaybuf.errors import EngineAway, EngineFault, EngineUnfit, Invalid, ReplaybufError
from replaybuf.generator.engines import VllmEngine
from replaybuf.generator.fleet import TRIES
from replaybuf.generator.fleet import fleet as fleet_module
from replaybuf.generator.fleet import member as member_module
from replaybuf.generator.stage import logprobs as logprobs_module
from replaybuf.generator.stage.logprobs import (
    EngineStage,
    LogprobOptions,
    LogprobStage,
    PolicyStage,
    StageOptions,
    StagesOptions,
    open_stages,
)
from replaybuf.generator.stage.stages import Rollout
from replaybuf.plugins import entry_points as plugins
from replaybuf.wire.group import Float32s
from tests.generator.doubles import TIMEOUT_S, EngineDouble, fail, given_logprob, scored
from tests.waiting import until


def rollout(prompt: Sequence[int], completion: Sequence[int], sampled: Sequence[int] | None = None) -> Rollout:
    mask = [1] * len(completion) if sampled is None else sampled
    return Rollout(np.array(prompt, np.int32), np.array(completion, np.int32), np.array(mask, np.bool_))


ROLLOUTS = (rollout([3, 1], [4, 1, 5]), rollout([9], [2, 6]))


async def opened(stack: AsyncExitStack, timeout_s: float = TIMEOUT_S, **options: Any) -> LogprobStage:
    """Open the one configured stage."""
    asked = LogprobOptions(**options)
    (stage,) = await open_stages(asked, stack, policy=(), timeout_s=timeout_s, start_timeout_s=TIMEOUT_S)
    return stage


async def faults_of(computing: Awaitable[Any]) -> tuple[str, str]:
    with pytest.raises(EngineFault) as caught:
        await computing
    return caught.value.reason, caught.value.detail


async def test_each_completion_token_gets_its_own_logprob_after_the_tokens_before_it() -> None:
    async with EngineDouble().up() as engine, AsyncExitStack() as stack:
        how = StagesOptions(ref=StageOptions(micro_batch=2))
        stage = await opened(stack, ref_engine=engine.url, logprob_options=how)
        values = (await stage.compute(ROLLOUTS)).values
        expected = [
            [given_logprob(1, 4), given_logprob(4, 1), given_logprob(1, 5)],
            [given_logprob(9, 2), given_logprob(2, 6)],
        ]
        for computed, wanted in zip(values, expected, strict=True):
            assert computed.tolist() == pytest.approx(wanted)
        (request,) = engine.requests
        assert request["prompt"] == [[3, 1, 4, 1, 5], [9, 2, 6]]
        assert (request["max_tokens"], request["prompt_logprobs"]) == (1, 0)
        assert (stage.column, stage.micro_batch) == ("ref_logprobs", 2)
        assert stage.record() == {"engines": [engine.url], "model": "tiny"}


def spoilt(change: Callable[[list[dict[str, Any]]], Any]) -> Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]:
    async def script(request: dict[str, Any]) -> dict[str, Any]:
        answer = scored(request)
        change(answer["choices"])
        return answer

    return script


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda choices: choices[0]["prompt_logprobs"].pop(), "4 prompt_logprobs for 5 tokens"),
        (lambda choices: choices[0].update(prompt_logprobs=None), "0 prompt_logprobs for 5 tokens"),
        (lambda choices: choices[1]["prompt_logprobs"][2].pop("6"), "1 sampled token; the first is 6 at 1"),
        (lambda choices: choices[1]["prompt_logprobs"].__setitem__(2, None), "the first is 6 at 1"),
        (lambda choices: choices[1]["prompt_logprobs"][1]["2"].update(logprob=-9999.0), "the first is 2 at 0"),
        (lambda choices: choices[1]["prompt_logprobs"][1]["2"].update(logprob=0.5), "the first is 2 at 0"),
        (lambda choices: choices.pop(), "1 choice; 2 were requested"),
    ],
    ids=["one less", "none", "not its own", "a gap", "absent", "above 0", "a choice less"],
)
async def test_an_answer_without_a_logprob_is_rejected(change: Callable[..., Any], message: str) -> None:
    async with EngineDouble().up() as engine, AsyncExitStack() as stack:
        stage = await opened(stack, teacher_engine=engine.url)
        engine.script.append(spoilt(change))
        reason, detail = await faults_of(stage.compute(ROLLOUTS))
        assert reason == "engine_bad_answer"
        assert message in detail
        assert len((await stage.compute(ROLLOUTS)).values) == 2, "the next one is taken"


async def test_tokens_that_were_not_sampled_need_no_logprob() -> None:
    async with EngineDouble().up() as engine, AsyncExitStack() as stack:
        stage = await opened(stack, ref_engine=engine.url)
        engine.script.append(spoilt(lambda choices: choices[0]["prompt_logprobs"][1].clear()))
        (values,) = (await stage.compute([rollout([9], [2, 6], sampled=[0, 1])])).values
        assert values[1] == pytest.approx(given_logprob(2, 6))


async def test_another_server_takes_over_if_one_fails() -> None:
    async with EngineDouble().up() as first, EngineDouble().up() as other, AsyncExitStack() as stack:
        stage = await opened(stack, ref_engine=f"{first.url}, {other.url}")
        first.always = fail(500)
        for _ in range(4):
            assert len((await stage.compute(ROLLOUTS)).values) == 2
        assert len(other.requests) == 4


async def test_a_server_that_stays_broken_fails_a_micro_batch_after_three_tries() -> None:
    async with EngineDouble().up() as engine, AsyncExitStack() as stack:
        stage = await opened(stack, ref_engine=engine.url)
        engine.always = fail(500)
        reason, _ = await faults_of(stage.compute(ROLLOUTS))
        assert (reason, len(engine.requests)) == ("engine_error", 3)


async def test_a_hanging_server_fails_a_micro_batch_within_the_time_limit() -> None:
    async def hang(request: dict[str, Any]) -> Response:
        await asyncio.Event().wait()
        return Response()

    async with EngineDouble().up() as engine, AsyncExitStack() as stack:
        stage = await opened(stack, timeout_s=0.2, ref_engine=engine.url)
        engine.script.append(hang)
        reason, _ = await faults_of(stage.compute(ROLLOUTS))
        assert (reason, len(engine.requests)) == ("engine_timeout", 1)


async def test_no_ticket_is_taken_until_a_dead_server_is_back() -> None:
    async with AsyncExitStack() as stack:
        async with EngineDouble().up() as engine:
            stage = EngineStage("ref_logprobs", [VllmEngine(engine.url, timeout_s=TIMEOUT_S)], 2, patience_s=0.1)
            stack.push_async_callback(stage.aclose)
            await stage.prepare(TIMEOUT_S, policy=())
            await stage.wait_ready(0.1)
            port = int(engine.url.rpartition(":")[2])
        assert (await faults_of(stage.compute(ROLLOUTS)))[0] == "engine_away"
        with pytest.raises(EngineAway):
            await stage.wait_ready(0.1)
        async with EngineDouble().up(port):
            await stage.wait_ready(TIMEOUT_S)
            assert len((await stage.compute(ROLLOUTS)).values) == 2


async def test_a_server_of_the_policy_cannot_be_the_reference() -> None:
    async with EngineDouble().up() as engine, AsyncExitStack() as stack:
        policy = VllmEngine(engine.url, timeout_s=TIMEOUT_S)
        await policy.prepare()
        stack.push_async_callback(policy.aclose)
        asked = LogprobOptions(ref_engine=engine.url)
        with pytest.raises(EngineUnfit, match=r"serves 'tiny' for ref_logprobs and for the policy"):
            await open_stages(asked, stack, policy=[policy], timeout_s=1.0, start_timeout_s=TIMEOUT_S)
        policy.model = "an adapter of it"
        assert await open_stages(asked, stack, policy=[policy], timeout_s=1.0, start_timeout_s=TIMEOUT_S)


async def test_an_unknown_served_name_is_rejected_at_start() -> None:
    async with EngineDouble().up() as engine, AsyncExitStack() as stack:
        with pytest.raises(EngineUnfit, match="the requested model is 'base'"):
            how = StagesOptions(ref=StageOptions(served_name="base"))
            await opened(stack, ref_engine=engine.url, logprob_options=how)


async def test_a_rollout_may_be_one_token_shorter_than_the_context() -> None:
    async with EngineDouble().up() as engine, AsyncExitStack() as stack:
        assert (await opened(stack, ref_engine=engine.url)).max_tokens == 63


# ---------------------------------------------------------------------- the policy's own, by one version


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_module, "PROBE_FIRST_S", 0.01)
    for module in (fleet_module, logprobs_module):
        monkeypatch.setattr(module, "RETRY_PAUSE_S", 0.01)


@contextlib.asynccontextmanager
async def policy_stage(*engines: EngineDouble, patience_s: float = TIMEOUT_S) -> AsyncIterator[PolicyStage]:
    """Open a stage with these servers of the policy."""
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine.up())
        servers = [VllmEngine(engine.url, timeout_s=TIMEOUT_S) for engine in engines]
        stage = PolicyStage("old_logprobs", servers, 2, patience_s=patience_s)
        stack.push_async_callback(stage.aclose)
        await stage.prepare(TIMEOUT_S, policy=())
        yield stage


def becomes(engine: EngineDouble, version: int) -> Callable[[dict[str, Any]], Awaitable[None]]:
    """Script: load other weights, then answer as usual."""

    async def script(request: dict[str, Any]) -> None:
        engine.version = version

    return script


async def test_old_logprobs_record_their_version() -> None:
    async with EngineDouble(version=3).up() as engine, AsyncExitStack() as stack:
        policy = VllmEngine(engine.url, timeout_s=TIMEOUT_S)
        await policy.prepare()
        stack.push_async_callback(policy.aclose)
        how = StagesOptions(old=StageOptions(micro_batch=3))
        asked = LogprobOptions(old_engine=engine.url, logprob_options=how)
        (stage,) = await open_stages(asked, stack, policy=[policy], timeout_s=TIMEOUT_S, start_timeout_s=TIMEOUT_S)
        computed = await stage.compute(ROLLOUTS, least_version=3)
        assert computed.policy_version == 3
        assert computed.values[1].tolist() == pytest.approx([given_logprob(9, 2), given_logprob(2, 6)])
        assert (stage.column, stage.micro_batch) == ("old_logprobs", 3)
        assert stage.record() == {"engines": [engine.url], "model": "tiny"}


@pytest.mark.usefixtures("_quick")
async def test_a_micro_batch_is_repeated_if_the_version_changed() -> None:
    engine = EngineDouble(version=3)
    async with policy_stage(engine) as stage:
        engine.script.append(becomes(engine, 4))
        assert (await stage.compute(ROLLOUTS)).policy_version == 4
        assert len(engine.requests) == 2
        (server,) = stage.status()
        assert server.outcomes == {"engine_version_changed": 1, "ok": 1} and server.state == "up"


@pytest.mark.usefixtures("_quick")
async def test_a_version_that_changes_in_every_try_fails_the_micro_batch() -> None:
    engine = EngineDouble(version=3)
    async with policy_stage(engine) as stage:
        engine.script.extend(becomes(engine, version) for version in (4, 5, 6))
        reason, detail = await faults_of(stage.compute(ROLLOUTS))
        assert (reason, len(engine.requests)) == ("engine_version_changed", 3)
        assert detail == f"engine {engine.url} had version 5 before it computed and 6 after"
        assert (await stage.compute(ROLLOUTS)).policy_version == 6


@pytest.mark.usefixtures("_quick")
async def test_a_micro_batch_that_loading_weights_cut_off_is_repeated() -> None:
    """vLLM 0.31 then answers 200 with the first token only."""
    engine = EngineDouble(version=3)
    async with policy_stage(engine) as stage:
        cut = spoilt(lambda choices: choices[1].update(prompt_logprobs=[None], finish_reason="abort"))
        engine.script.append(cut)
        assert (await stage.compute(ROLLOUTS)).policy_version == 3
        assert stage.status()[0].outcomes == {"engine_aborted": 1, "ok": 1}


@pytest.mark.usefixtures("_quick")
async def test_a_server_with_base_weights_waits_for_the_published_version() -> None:
    """It restarted unnoticed between two publications."""
    engine = EngineDouble(version=3)
    async with policy_stage(engine) as stage:
        stage.learn_published(3)
        assert (await stage.compute(ROLLOUTS)).policy_version == 3
        engine.version = "default"
        computing = asyncio.create_task(stage.compute(ROLLOUTS))
        await until(lambda: stage.waiting == "engine_stale")
        assert not computing.done() and len(engine.requests) == 1
        assert "has version 0; published is 3" in (stage.status()[0].fault or "")
        engine.version = 4
        assert (await computing).policy_version == 4
        assert stage.waiting is None and len(engine.requests) == 2


@pytest.mark.usefixtures("_quick")
async def test_a_server_without_the_published_version_is_not_used() -> None:
    behind, right = EngineDouble(version=3), EngineDouble(version=4)
    async with policy_stage(behind, right) as stage:
        stage.learn_published(4)
        for _ in range(4):
            assert (await stage.compute(ROLLOUTS)).policy_version == 4
        assert (len(behind.requests), len(right.requests)) == (0, 4)


@pytest.mark.usefixtures("_quick")
async def test_rollouts_wait_until_a_server_has_their_weights() -> None:
    """Servers load one after another; the version is announced when all have it."""
    engine = EngineDouble(version=3)
    async with policy_stage(engine) as stage:
        stage.learn_published(3)
        computing = asyncio.create_task(stage.compute(ROLLOUTS, least_version=4))
        await until(lambda: stage.status()[0].outcomes.get("engine_behind", 0) > TRIES)
        assert not engine.requests and stage.waiting is None, "nothing is wrong with it"
        engine.version = 4
        assert (await computing).policy_version == 4


@pytest.mark.usefixtures("_quick")
async def test_a_micro_batch_fails_if_the_weights_do_not_arrive() -> None:
    engine = EngineDouble(version=3)
    async with policy_stage(engine, patience_s=0.1) as stage:
        reason, detail = await faults_of(stage.compute(ROLLOUTS, least_version=4))
        assert (reason, engine.requests) == ("engine_behind", [])
        assert detail == f"engine {engine.url} has version 3; the rollouts were sampled by 4"
        assert (await stage.compute(ROLLOUTS, least_version=3)).policy_version == 3


@pytest.mark.usefixtures("_quick")
async def test_servers_with_weights_from_before_a_rewind_are_not_used() -> None:
    engine = EngineDouble(version=5)
    async with policy_stage(engine) as stage:
        stage.learn_published(5)
        stage.learn_published(2)
        computing = asyncio.create_task(stage.compute(ROLLOUTS))
        await until(lambda: engine.calls.count("health") > 2)
        assert stage.waiting == "engine_stale" and not engine.requests
        engine.version = 2
        assert (await computing).policy_version == 2


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"weight_info": False}, {}, "reports no policy version, which old_logprobs need"),
        ({"version": "a-name"}, {}, "labels its weights 'a-name'"),
        ({"model": "another"}, {}, r"serves \['another'\]; the requested model is 'tiny'"),
        ({}, {"served_name": "base"}, "the requested model is 'base'"),
    ],
    ids=["no version", "no number", "another model", "another name"],
)
async def test_a_server_that_cannot_have_the_policy_is_rejected_at_start(
    change: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    other = EngineDouble()
    for name, value in change.items():
        setattr(other, name, value)
    async with EngineDouble().up() as engine, other.up(), AsyncExitStack() as stack:
        policy = VllmEngine(engine.url, timeout_s=TIMEOUT_S)
        await policy.prepare()
        stack.push_async_callback(policy.aclose)
        how = StagesOptions(old=StageOptions(**options))
        asked = LogprobOptions(old_engine=other.url, logprob_options=how)
        with pytest.raises(EngineUnfit, match=message):
            await open_stages(asked, stack, policy=[policy], timeout_s=TIMEOUT_S, start_timeout_s=TIMEOUT_S)


# ---------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ref_engine": "http://a", "ref_model": Path("m")}, "ref_engine and ref_model are both set"),
        (
            {"ref_engine": "sglang+http://a:1"},
            r"ref_engine is 'sglang\+.*; it must be the address of a vLLM server",
        ),
        ({"old_engine": "http://a:1,"}, "old_engine is ''"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        LogprobOptions(**options).check()


class Counting:
    """Model: minus the length of the rollout, for each token; in one thread, one call at a time."""

    max_tokens = 32

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.threads = {threading.get_ident()}
        self.open = threading.Event()
        self.open.set()
        self.running = 0
        self.error: Exception | None = None

    def logprobs(self, rollouts: Sequence[Rollout]) -> list[Float32s]:
        self.threads.add(threading.get_ident())
        self.running += 1
        assert self.running == 1
        self.open.wait(TIMEOUT_S)
        self.running -= 1
        if self.error is not None:
            raise self.error
        return [np.full(len(rollout.completion_ids), -len(rollout), np.float32) for rollout in rollouts]


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> list[Counting]:
    """Models loaded by the plug-in."""
    made: list[Counting] = []

    def load(folder: Path) -> Counting:
        made.append(Counting(folder))
        return made[-1]

    monkeypatch.setattr(plugins, "load", lambda group, name: load)
    return made


async def test_a_model_computes_in_one_thread_of_its_own(models: list[Counting]) -> None:
    async with AsyncExitStack() as stack:
        how = StagesOptions(ref=StageOptions(micro_batch=2))
        stage = await opened(stack, ref_model=Path("folder"), logprob_options=how)
        first, other = await asyncio.gather(stage.compute(ROLLOUTS), stage.compute(ROLLOUTS[:1]))
        assert [values.tolist() for values in first.values] == [[-5.0] * 3, [-3.0] * 2]
        assert [values.tolist() for values in other.values] == [[-5.0] * 3]
        assert len(models[0].threads) == 1 and threading.get_ident() not in models[0].threads
        assert (stage.max_tokens, stage.record()) == (32, {"model": "folder"})


async def test_a_model_that_raises_fails_one_micro_batch(models: list[Counting]) -> None:
    async with AsyncExitStack() as stack:
        stage = await opened(stack, ref_model=Path("folder"))
        models[0].error = MemoryError("no room")
        reason, detail = await faults_of(stage.compute(ROLLOUTS))
        assert reason == "model_raised"
        assert detail == "folder with 2 rollouts, 8 tokens, raised MemoryError('no room')"
        models[0].error = None
        assert len((await stage.compute(ROLLOUTS)).values) == 2


async def test_a_hanging_model_ends_generate(models: list[Counting]) -> None:
    async with AsyncExitStack() as stack:
        stage = await opened(stack, timeout_s=0.1, ref_model=Path("folder"))
        models[0].open.clear()
        with pytest.raises(ReplaybufError, match=r"did not finish within 0\.1 s; use smaller") as caught:
            await stage.compute(ROLLOUTS)
        assert not isinstance(caught.value, EngineFault)
        models[0].open.set()
