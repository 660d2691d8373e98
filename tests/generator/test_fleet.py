"""Several engines share the work; one that fails is left alone until it is healthy again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import numpy as np
import pytest

from replaybuf.errors import EngineAway, EngineFault, EngineUnfit
from replaybuf.generator.engines import Sampling, VllmEngine
from replaybuf.generator.fleet import TRIES, Fleet
from tests.generator.doubles import TIMEOUT_S, EngineDouble, fail, reply

PROMPT = np.array([2, 0, 1], np.int32)
SAMPLING = Sampling(n=1, max_tokens=5)


@contextlib.asynccontextmanager
async def fleet_of(
    *doubles: EngineDouble, patience_s: float = TIMEOUT_S, timeout_s: float = 10
) -> AsyncIterator[Fleet]:
    async with contextlib.AsyncExitStack() as stack:
        for double in doubles:
            await stack.enter_async_context(double.up())
        fleet = Fleet([VllmEngine(double.url, timeout_s=timeout_s) for double in doubles], patience_s=patience_s)
        stack.push_async_callback(fleet.aclose)
        yield fleet


def run(main: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await main

    asyncio.run(bounded())


def test_the_least_loaded_server_gets_the_next_request() -> None:
    async def main() -> None:
        gate, arrived = asyncio.Event(), asyncio.Semaphore(0)

        async def hold(request: dict[str, Any]) -> None:
            arrived.release()
            await gate.wait()

        doubles = EngineDouble(), EngineDouble()
        async with fleet_of(*doubles) as fleet:
            for double in doubles:
                double.always = hold
            tasks = []
            for _ in range(6):
                tasks.append(asyncio.create_task(fleet.generate(PROMPT, SAMPLING)))
                await arrived.acquire()
            assert [len(double.requests) for double in doubles] == [3, 3]
            gate.set()
            await asyncio.gather(*tasks)

    run(main())


def test_a_request_that_one_server_failed_goes_to_another() -> None:
    async def main() -> None:
        broken, sound = EngineDouble(), EngineDouble()
        async with fleet_of(broken, sound) as fleet:
            broken.always = fail(500)
            broken.healthy = False
            for _ in range(4):
                await fleet.generate(PROMPT, SAMPLING)
            assert len(broken.requests) == 1
            assert len(sound.requests) == 4
            assert fleet.up

    run(main())


def test_a_server_is_used_again_when_it_is_healthy_again() -> None:
    async def main() -> None:
        double = EngineDouble()
        async with fleet_of(double) as fleet:
            double.script.append(fail(500))
            await fleet.generate(PROMPT, SAMPLING)
            assert double.calls.count("health") == 1
            assert len(double.requests) == 2

    run(main())


def test_after_a_few_tries_the_fault_is_told() -> None:
    async def main() -> None:
        double = EngineDouble()
        async with fleet_of(double) as fleet:
            double.always = fail(500)
            with pytest.raises(EngineAway, match="answered 500"):
                await fleet.generate(PROMPT, SAMPLING)
            assert len(double.requests) == TRIES

    run(main())


def test_a_timeout_is_not_tried_again() -> None:
    async def main() -> None:
        async def hang(request: dict[str, Any]) -> None:
            await asyncio.Event().wait()

        double = EngineDouble()
        async with fleet_of(double, timeout_s=0.2) as fleet:
            double.always = hang
            with pytest.raises(EngineAway, match="no answer"):
                await fleet.generate(PROMPT, SAMPLING)
            assert len(double.requests) == 1

    run(main())


def test_a_fault_of_the_request_is_not_tried_again() -> None:
    async def main() -> None:
        double = EngineDouble()
        async with fleet_of(double) as fleet:
            double.always = reply(token_ids=None)
            with pytest.raises(EngineFault, match="without token_ids"):
                await fleet.generate(PROMPT, SAMPLING)
            assert len(double.requests) == 1
            assert fleet.up

    run(main())


def test_with_no_server_up_a_request_waits_as_long_as_its_patience() -> None:
    async def main() -> None:
        double = EngineDouble()
        async with fleet_of(double, patience_s=0.3) as fleet:
            double.always, double.healthy = fail(500), False
            with pytest.raises(EngineAway, match=r"waited 0\.3 s for an engine in vain: .*answered 500"):
                await fleet.generate(PROMPT, SAMPLING)
            assert not fleet.up

    run(main())


def test_a_server_that_starts_late_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        double = EngineDouble(model="qwen")
        double.healthy = False
        async with fleet_of(double) as fleet:
            preparing = asyncio.create_task(fleet.prepare(TIMEOUT_S))
            await double.probed.wait()
            double.healthy = True
            await preparing
            assert fleet.up and fleet.max_model_len == 64

    run(main())
    assert "waiting for an engine" in caplog.text


def test_the_shortest_context_of_all_servers_counts() -> None:
    async def main() -> None:
        short, long = EngineDouble(), EngineDouble()
        short.max_model_len, long.max_model_len = 32, 128
        async with fleet_of(short, long) as fleet:
            await fleet.prepare(TIMEOUT_S)
            assert fleet.max_model_len == 32

    run(main())


def test_servers_of_different_models_are_refused() -> None:
    async def main() -> None:
        async with fleet_of(EngineDouble(model="a"), EngineDouble(model="b")) as fleet:
            with pytest.raises(EngineUnfit, match="engines serve different models"):
                await fleet.prepare(TIMEOUT_S)

    run(main())
