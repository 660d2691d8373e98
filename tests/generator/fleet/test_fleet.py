"""Several engines share the work; a failing engine is suspended until it is healthy."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from replaybuf.errors import EngineAway, EngineFault, EngineUnfit
from replaybuf.generator.engines import Sampling, VllmEngine
from replaybuf.generator.fleet import TRIES, Fleet
from replaybuf.generator.fleet import fleet as fleet_module
from replaybuf.generator.fleet import member as member_module
from replaybuf.generator.fleet.member import FAILURES_IN_A_ROW
from tests.generator.doubles import TIMEOUT_S, EngineDouble, Gate, Script, fail, reply
from tests.waiting import until

PROMPT = np.array([2, 0, 1], np.int32)
SAMPLING = Sampling(n=1, max_tokens=5)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make probes and retries fast."""
    monkeypatch.setattr(member_module, "PROBE_FIRST_S", 0.01)
    monkeypatch.setattr(fleet_module, "RETRY_PAUSE_S", 0.01)


@contextlib.asynccontextmanager
async def fleet_of(
    *doubles: EngineDouble, patience_s: float = TIMEOUT_S, timeout_s: float = 10, **options: Any
) -> AsyncIterator[Fleet]:
    async with contextlib.AsyncExitStack() as stack:
        for double in doubles:
            await stack.enter_async_context(double.up())
        servers = [VllmEngine(double.url, timeout_s=timeout_s) for double in doubles]
        fleet = Fleet(servers, patience_s=patience_s, **options)
        stack.push_async_callback(fleet.aclose)
        yield fleet


async def test_the_least_loaded_server_gets_the_next_request() -> None:
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


async def test_a_failed_request_goes_to_another_server() -> None:
    broken, sound = EngineDouble(), EngineDouble()
    async with fleet_of(broken, sound) as fleet:
        broken.always = fail(500)
        broken.healthy = False
        for _ in range(FAILURES_IN_A_ROW + 3):
            await fleet.generate(PROMPT, SAMPLING)
        assert len(broken.requests) == FAILURES_IN_A_ROW
        assert len(sound.requests) == FAILURES_IN_A_ROW + 3
        assert [status.state for status in fleet.status()] == ["suspended", "up"]


async def test_a_single_failure_does_not_suspend_a_server(quick: None) -> None:
    double = EngineDouble()
    async with fleet_of(double) as fleet:
        double.script.append(fail(500))
        await fleet.generate(PROMPT, SAMPLING)
        assert len(double.requests) == 2 and "health" not in double.calls
        (status,) = fleet.status()
        assert (status.state, status.failures, status.requests, status.tokens) == ("up", 0, 0, 0)


async def test_an_idle_server_that_is_away_is_suspended_until_it_is_back(quick: None) -> None:
    """A busy one is left alone: its requests show what it does."""
    idle, busy, gate = EngineDouble(), EngineDouble(), Gate()
    async with fleet_of(idle, busy) as fleet:
        idle.always = busy.always = gate
        both = [asyncio.create_task(fleet.generate(PROMPT, SAMPLING)) for _ in range(2)]
        await gate.requests(2)
        idle.healthy = busy.healthy = False
        await fleet.check_idle(TIMEOUT_S)
        assert [status.state for status in fleet.status()] == ["up", "up"]
        gate.open.set()
        await asyncio.gather(*both)
        await fleet.check_idle(TIMEOUT_S)
        assert [status.state for status in fleet.status()] == ["suspended", "suspended"]
        idle.healthy = True
        await until(lambda: [status.state for status in fleet.status()] == ["trial", "suspended"])


async def test_a_failed_connection_suspends_a_server_until_it_is_back(quick: None) -> None:
    double = EngineDouble(model="qwen")
    async with double.up():
        port = int(double.url.rpartition(":")[2])
    fleet = Fleet([VllmEngine(double.url, timeout_s=10)], patience_s=TIMEOUT_S)
    try:
        waiting = asyncio.create_task(fleet.generate(PROMPT, SAMPLING))
        await until(lambda: not fleet.up)
        assert fleet.status()[0].state == "suspended" and not waiting.done()
        async with double.up(port):
            await waiting
            assert double.calls[:2] == ["health", "models"]  # looked at anew before it is used
            assert fleet.status()[0].state == "up"
    finally:
        await fleet.aclose()


async def test_a_suspended_server_comes_back_while_others_are_up(quick: None) -> None:
    broken, sound = EngineDouble(), EngineDouble()
    async with fleet_of(broken, sound) as fleet:
        broken.always = fail(500)
        for _ in range(FAILURES_IN_A_ROW):
            await fleet.generate(PROMPT, SAMPLING)
        broken.always = None
        await until(lambda: fleet.status()[0].state != "suspended")
        assert fleet.status()[0].state == "trial"
        await fleet.generate(PROMPT, SAMPLING)
        assert [status.state for status in fleet.status()] == ["up", "up"]


async def test_the_first_failure_in_trial_suspends_a_server_for_longer(
    quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    broken, sound = EngineDouble(), EngineDouble()
    async with fleet_of(broken, sound) as fleet:
        broken.always = fail(500)
        for state in ("trial", "suspended"):
            while fleet.status()[0].state != state:
                await fleet.generate(PROMPT, SAMPLING)
        assert len(broken.requests) == FAILURES_IN_A_ROW + 1
    reported = [record.getMessage() for record in caplog.records if "is suspended" in record.msg]
    assert [line.partition(": ")[0].rpartition(" is ")[2] for line in reported] == [
        "suspended after 3 failures in a row, next probe in 0.01 s",
        "suspended after 4 failures in a row, next probe in 0.02 s",
    ]


async def test_a_server_in_trial_gets_one_request_at_a_time_while_others_are_up(quick: None) -> None:
    tried, sound = EngineDouble(), EngineDouble()
    async with fleet_of(tried, sound) as fleet:
        tried.always = fail(500)
        for _ in range(FAILURES_IN_A_ROW):
            await fleet.generate(PROMPT, SAMPLING)
        await until(lambda: fleet.status()[0].state == "trial")
        tried.requests.clear()
        tried.always = sound.always = gate = Gate()
        tasks = [asyncio.create_task(fleet.generate(PROMPT, SAMPLING)) for _ in range(6)]
        await gate.requests(6)
        assert len(tried.requests) == 1
        gate.open.set()
        await asyncio.gather(*tasks)


async def test_the_server_with_fewer_tokens_in_flight_gets_the_request() -> None:
    long, short = EngineDouble(), EngineDouble()
    async with fleet_of(long, short) as fleet:
        long.always = short.always = gate = Gate()
        tasks = [asyncio.create_task(fleet.generate(PROMPT, Sampling(n=8, max_tokens=20)))]
        await gate.requests(1)
        tasks += [asyncio.create_task(fleet.generate(PROMPT, SAMPLING)) for _ in range(3)]
        await gate.requests(3)
        assert [len(double.requests) for double in (long, short)] == [1, 3]
        assert [status.tokens for status in fleet.status()] == [3 + 8 * 20, 3 * (3 + 5)]
        gate.open.set()
        await asyncio.gather(*tasks)


async def test_an_aborted_completion_is_not_a_failure_of_the_server(quick: None) -> None:
    double = EngineDouble()
    async with fleet_of(double) as fleet:
        double.always = reply(finish_reason="abort")
        for _ in range(FAILURES_IN_A_ROW):
            with pytest.raises(EngineAway, match="aborted"):
                await fleet.generate(PROMPT, SAMPLING)
        assert fleet.status()[0].failures == 0 and fleet.up


async def test_an_unfit_server_is_suspended_while_others_are_up(quick: None) -> None:
    other, sound = EngineDouble(model="qwen"), EngineDouble(model="qwen")
    async with fleet_of(other, sound) as fleet:
        await fleet.prepare(TIMEOUT_S)
        other.model, other.always = "llama", fail(404, "no such model")
        await fleet.generate(PROMPT, SAMPLING)
        await until(lambda: "serves ['llama']" in (fleet.status()[0].fault or ""))
        await fleet.generate(PROMPT, SAMPLING)
        assert (len(other.requests), len(sound.requests)) == (1, 2)
        sound.always = fail(404, "gone")
        with pytest.raises(EngineUnfit, match="gone"):
            await fleet.generate(PROMPT, SAMPLING)


async def test_after_the_last_try_the_fault_is_raised(quick: None) -> None:
    double = EngineDouble()
    async with fleet_of(double) as fleet:
        double.always = fail(500)
        with pytest.raises(EngineAway, match="answered 500"):
            await fleet.generate(PROMPT, SAMPLING)
        assert len(double.requests) == TRIES


async def test_a_timeout_is_not_retried() -> None:
    async def hang(request: dict[str, Any]) -> None:
        await asyncio.Event().wait()

    double = EngineDouble()
    async with fleet_of(double, timeout_s=0.2) as fleet:
        double.always = hang
        with pytest.raises(EngineAway, match="no answer"):
            await fleet.generate(PROMPT, SAMPLING)
        assert len(double.requests) == 1


async def test_a_bad_answer_of_the_only_server_is_not_retried() -> None:
    double = EngineDouble()
    async with fleet_of(double) as fleet:
        double.always = reply(token_ids=None)
        with pytest.raises(EngineFault, match="without token_ids"):
            await fleet.generate(PROMPT, SAMPLING)
        assert len(double.requests) == 1
        assert fleet.up


@pytest.mark.parametrize("answer", [fail(400, "bad"), fail(200, "<html>gateway</html>"), reply(token_ids=None)])
async def test_a_server_that_alone_answers_badly_is_suspended_and_costs_no_request(quick: None, answer: Script) -> None:
    """It answers at once, so it is always the least loaded server: without suspension all requests would go there."""
    sound, broken = EngineDouble(), EngineDouble()
    async with fleet_of(sound, broken) as fleet:
        broken.always, broken.healthy, sound.always = answer, False, (gate := Gate())
        tasks = [asyncio.create_task(fleet.generate(PROMPT, SAMPLING)) for _ in range(2 * FAILURES_IN_A_ROW)]
        await gate.requests(len(tasks))
        gate.open.set()
        await asyncio.gather(*tasks)
        assert [status.state for status in fleet.status()] == ["up", "suspended"]
        asked = len(broken.requests)
        await fleet.generate(PROMPT, SAMPLING)
        assert len(broken.requests) == asked


async def test_a_request_that_two_servers_refuse_is_at_fault(quick: None) -> None:
    doubles = EngineDouble(), EngineDouble(), EngineDouble()
    async with fleet_of(*doubles) as fleet:
        for double in doubles:
            double.always = fail(400, "no such token")
        for _ in range(2 * FAILURES_IN_A_ROW):
            with pytest.raises(EngineFault, match="no such token") as caught:
                await fleet.generate(PROMPT, SAMPLING)
            assert caught.value.reason == "engine_refused"
        assert sum(len(double.requests) for double in doubles) == 4 * FAILURES_IN_A_ROW
        assert [status.state for status in fleet.status()] == ["up"] * 3


async def test_a_badly_answered_request_prefers_a_server_without_bad_answers(quick: None) -> None:
    """So every broken server is found while one works."""
    sound, *broken = (EngineDouble() for _ in range(4))
    async with fleet_of(*broken, sound) as fleet:
        for double in broken:
            double.always, double.healthy = fail(400), False
        failed = 0
        while sum(status.state == "up" for status in fleet.status()) > 1:
            try:
                await fleet.generate(PROMPT, SAMPLING)
            except EngineFault:
                failed += 1
        assert failed < len(broken) and fleet.status()[-1].state == "up"


async def test_with_no_server_up_a_request_waits_for_patience_s(quick: None) -> None:
    double = EngineDouble()
    async with fleet_of(double, patience_s=0.3) as fleet:
        double.always, double.healthy = fail(500), False
        with pytest.raises(EngineAway, match="answered 500"):
            await fleet.generate(PROMPT, SAMPLING)
        with pytest.raises(EngineAway, match=r"no engine came up within 0\.3 s: .*answered 500"):
            await fleet.generate(PROMPT, SAMPLING)
        assert not fleet.up


async def test_a_server_that_starts_late_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    double = EngineDouble(model="qwen")
    double.healthy = False
    async with fleet_of(double) as fleet:
        preparing = asyncio.create_task(fleet.prepare(TIMEOUT_S))
        await double.probed.wait()
        double.healthy = True
        await preparing
        assert fleet.up and fleet.max_model_len == 64
    assert "waiting for an engine" in caplog.text


async def test_the_fleets_context_is_the_shortest_of_its_servers() -> None:
    short, long = EngineDouble(), EngineDouble()
    short.max_model_len, long.max_model_len = 32, 128
    async with fleet_of(short, long) as fleet:
        await fleet.prepare(TIMEOUT_S)
        assert fleet.max_model_len == 32


async def test_servers_of_different_models_are_rejected() -> None:
    async with fleet_of(EngineDouble(model="a"), EngineDouble(model="b")) as fleet:
        with pytest.raises(EngineUnfit, match="engines serve different models"):
            await fleet.prepare(TIMEOUT_S)
