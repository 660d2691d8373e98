"""Reference and teacher logprobs: of given tokens, by servers over real HTTP and by a model in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.responses import Response

from replaybuf import plugins
from replaybuf.errors import EngineAway, EngineFault, EngineUnfit, Invalid, ReplaybufError
from replaybuf.generator.engines import VllmEngine
from replaybuf.generator.logprobs import EngineStage, LogprobOptions, LogprobStage, open_stages
from replaybuf.generator.stages import Rollout
from replaybuf.group import Float32s
from tests.generator.doubles import TIMEOUT_S, EngineDouble, fail, given_logprob, scored


def rollout(prompt: Sequence[int], completion: Sequence[int], sampled: Sequence[int] | None = None) -> Rollout:
    mask = [1] * len(completion) if sampled is None else sampled
    return Rollout(np.array(prompt, np.int32), np.array(completion, np.int32), np.array(mask, np.bool_))


ROLLOUTS = (rollout([3, 1], [4, 1, 5]), rollout([9], [2, 6]))


def run(main: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await main

    asyncio.run(bounded())


async def opened(stack: AsyncExitStack, timeout_s: float = TIMEOUT_S, **options: Any) -> LogprobStage:
    """Open the one stage that is asked for."""
    asked = LogprobOptions(**options)
    (stage,) = await open_stages(asked, stack, policy=(), timeout_s=timeout_s, start_timeout_s=TIMEOUT_S)
    return stage


async def faults_of(computing: Awaitable[Any]) -> tuple[str, str]:
    with pytest.raises(EngineFault) as caught:
        await computing
    return caught.value.reason, caught.value.detail


def test_each_completion_token_gets_its_own_logprob_after_the_tokens_before_it() -> None:
    async def main() -> None:
        async with EngineDouble().up() as engine, AsyncExitStack() as stack:
            stage = await opened(stack, ref_engine=engine.url, ref_micro_batch=2)
            values = await stage.compute(ROLLOUTS)
            expected = [
                [given_logprob(1, 4), given_logprob(4, 1), given_logprob(1, 5)],
                [given_logprob(9, 2), given_logprob(2, 6)],
            ]
            for found, wanted in zip(values, expected, strict=True):
                assert found.tolist() == pytest.approx(wanted)
            (request,) = engine.requests
            assert request["prompt"] == [[3, 1, 4, 1, 5], [9, 2, 6]]
            assert (request["max_tokens"], request["prompt_logprobs"]) == (1, 0)
            assert (stage.column, stage.micro_batch) == ("ref_logprobs", 2)
            assert stage.record() == {"engines": [engine.url], "model": "tiny"}

    run(main())


def spoilt(change: Callable[[list[dict[str, Any]]], Any]) -> Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]:
    async def script(request: dict[str, Any]) -> dict[str, Any]:
        answer = scored(request)
        change(answer["choices"])
        return answer

    return script


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda choices: choices[0]["prompt_logprobs"].pop(), "4 prompt_logprobs for 5 tokens"),
        (lambda choices: choices[0].update(prompt_logprobs=None), "0 prompt_logprobs for 5 tokens"),
        (lambda choices: choices[1]["prompt_logprobs"][2].pop("6"), "1 sampled tokens, the first is 6 at 1"),
        (lambda choices: choices[1]["prompt_logprobs"].__setitem__(2, None), "the first is 6 at 1"),
        (lambda choices: choices[1]["prompt_logprobs"][1]["2"].update(logprob=-9999.0), "the first is 2 at 0"),
        (lambda choices: choices[1]["prompt_logprobs"][1]["2"].update(logprob=0.5), "the first is 2 at 0"),
        (lambda choices: choices.pop(), "1 choices; asked for were 2"),
    ],
    ids=["one less", "none", "not its own", "a gap", "absent", "above 0", "a choice less"],
)
def test_an_answer_that_lacks_a_logprob_is_refused(change: Callable[..., Any], told: str) -> None:
    async def main() -> None:
        async with EngineDouble().up() as engine, AsyncExitStack() as stack:
            stage = await opened(stack, teacher_engine=engine.url)
            engine.script.append(spoilt(change))
            reason, detail = await faults_of(stage.compute(ROLLOUTS))
            assert reason == "engine_bad_answer"
            assert told in detail
            assert len(await stage.compute(ROLLOUTS)) == 2, "the next one is taken"

    run(main())


def test_tokens_that_nobody_sampled_may_lack_a_logprob() -> None:
    async def main() -> None:
        async with EngineDouble().up() as engine, AsyncExitStack() as stack:
            stage = await opened(stack, ref_engine=engine.url)
            engine.script.append(spoilt(lambda choices: choices[0]["prompt_logprobs"][1].clear()))
            (values,) = await stage.compute([rollout([9], [2, 6], sampled=[0, 1])])
            assert values[1] == pytest.approx(given_logprob(2, 6))

    run(main())


def test_another_server_takes_over_where_one_fails() -> None:
    async def main() -> None:
        async with EngineDouble().up() as one, EngineDouble().up() as other, AsyncExitStack() as stack:
            stage = await opened(stack, ref_engine=f"{one.url}, {other.url}")
            one.always = fail(500)
            for _ in range(4):
                assert len(await stage.compute(ROLLOUTS)) == 2
            assert len(other.requests) == 4

    run(main())


def test_a_server_that_stays_broken_fails_a_micro_batch_after_three_tries() -> None:
    async def main() -> None:
        async with EngineDouble().up() as engine, AsyncExitStack() as stack:
            stage = await opened(stack, ref_engine=engine.url)
            engine.always = fail(500)
            reason, _ = await faults_of(stage.compute(ROLLOUTS))
            assert (reason, len(engine.requests)) == ("engine_error", 3)

    run(main())


def test_a_server_that_hangs_fails_a_micro_batch_in_time() -> None:
    async def hang(request: dict[str, Any]) -> Response:
        await asyncio.Event().wait()
        return Response()

    async def main() -> None:
        async with EngineDouble().up() as engine, AsyncExitStack() as stack:
            stage = await opened(stack, timeout_s=0.2, ref_engine=engine.url)
            engine.script.append(hang)
            reason, _ = await faults_of(stage.compute(ROLLOUTS))
            assert (reason, len(engine.requests)) == ("engine_timeout", 1)

    run(main())


def test_a_server_that_died_is_waited_for_before_tickets_are_taken() -> None:
    async def main() -> None:
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
                assert len(await stage.compute(ROLLOUTS)) == 2

    run(main())


def test_a_server_that_samples_the_policy_is_no_reference() -> None:
    async def main() -> None:
        async with EngineDouble().up() as engine, AsyncExitStack() as stack:
            policy = VllmEngine(engine.url, timeout_s=TIMEOUT_S)
            await policy.prepare()
            stack.push_async_callback(policy.aclose)
            asked = LogprobOptions(ref_engine=engine.url)
            with pytest.raises(EngineUnfit, match=r"serves 'tiny' for ref_logprobs and for the policy"):
                await open_stages(asked, stack, policy=[policy], timeout_s=1.0, start_timeout_s=TIMEOUT_S)
            policy.model = "an adapter of it"
            assert await open_stages(asked, stack, policy=[policy], timeout_s=1.0, start_timeout_s=TIMEOUT_S)

    run(main())


def test_a_name_that_the_server_does_not_serve_is_refused_at_start() -> None:
    async def main() -> None:
        async with EngineDouble().up() as engine, AsyncExitStack() as stack:
            with pytest.raises(EngineUnfit, match="asked for is 'base'"):
                await opened(stack, ref_engine=engine.url, ref_served_name="base")

    run(main())


def test_a_rollout_may_be_as_long_as_the_context_without_the_token_that_vllm_generates() -> None:
    async def main() -> None:
        async with EngineDouble().up() as engine, AsyncExitStack() as stack:
            assert (await opened(stack, ref_engine=engine.url)).max_tokens == 63

    run(main())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"ref_engine": "http://a", "ref_model": Path("m")}, "ref_engine and ref_model are both given"),
        ({"ref_micro_batch": 0}, "ref_micro_batch is 0; at least 1 is needed"),
        ({"teacher_micro_batch": -1}, "teacher_micro_batch is -1"),
        ({"ref_engine": "sglang+http://a:1"}, "sglang"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], told: str) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            with pytest.raises(Invalid, match=told):
                await opened(stack, **options)

    run(main())


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
        return [np.full(len(one.completion_ids), -len(one), np.float32) for one in rollouts]


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> list[Counting]:
    """Models that were loaded by the plug-in."""
    made: list[Counting] = []

    def load(folder: Path) -> Counting:
        made.append(Counting(folder))
        return made[-1]

    monkeypatch.setattr(plugins, "load", lambda group, name: load)
    return made


def test_a_model_computes_in_one_thread_of_its_own(models: list[Counting]) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            stage = await opened(stack, ref_model=Path("folder"), ref_micro_batch=2)
            one, other = await asyncio.gather(stage.compute(ROLLOUTS), stage.compute(ROLLOUTS[:1]))
            assert [values.tolist() for values in one] == [[-5.0] * 3, [-3.0] * 2]
            assert [values.tolist() for values in other] == [[-5.0] * 3]
            assert len(models[0].threads) == 1 and threading.get_ident() not in models[0].threads
            assert (stage.max_tokens, stage.record()) == (32, {"model": "folder"})

    run(main())


def test_a_model_that_raises_fails_one_micro_batch(models: list[Counting]) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            stage = await opened(stack, ref_model=Path("folder"))
            models[0].error = MemoryError("no room")
            reason, detail = await faults_of(stage.compute(ROLLOUTS))
            assert reason == "model_raised"
            assert detail == "folder with 2 rollouts, 8 tokens, raised MemoryError('no room')"
            models[0].error = None
            assert len(await stage.compute(ROLLOUTS)) == 2

    run(main())


def test_a_model_that_hangs_ends_generating(models: list[Counting]) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            stage = await opened(stack, timeout_s=0.1, ref_model=Path("folder"))
            models[0].open.clear()
            with pytest.raises(ReplaybufError, match=r"not done after 0\.1 s; smaller micro-batches") as caught:
                await stage.compute(ROLLOUTS)
            assert not isinstance(caught.value, EngineFault)
            models[0].open.set()

    run(main())
