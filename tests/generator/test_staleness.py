"""The bound on staleness follows the run's strategy while generators run."""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from replaybuf.errors import ServiceUnavailable
from replaybuf.generator import staleness as staleness_module
from replaybuf.generator.staleness import StalenessBound
from replaybuf.wire.answer.run_status import ChosenStrategy, RunFacts
from tests.generator.doubles import EngineDouble, Gate, ServiceDouble
from tests.generator.worlds import sampled_by, started
from tests.waiting import until

NAME = "one-step-off-policy"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staleness_module, "READ_EVERY_S", 0.01)


def strategy(max_staleness: int) -> dict[str, Any]:
    return {"name": NAME, "options": {"max_staleness": max_staleness}}


def bound(max_staleness: int) -> StalenessBound:
    """Return the follower of a generator that started with this bound."""
    return StalenessBound(RunFacts(strategy=ChosenStrategy(NAME, {"max_staleness": max_staleness})))


@pytest.mark.parametrize(("then", "kept"), [(1, False), (4, True)])
async def test_a_group_in_flight_is_checked_against_the_runs_new_bound(tmp_path: Path, then: int, kept: bool) -> None:
    """The group is three versions old when it is sampled; the bound at the start was 2."""
    gate, engine, service = Gate(), EngineDouble(version=3), ServiceDouble(prompts=1, strategy=strategy(2))
    service.published, engine.always = 3, sampled_by(3, gate)
    async with started(tmp_path, engine, service, followers=[bound(2)], max_staleness=2) as w:
        await gate.requests(1)
        service.config["strategy"] = strategy(then)
        fleet = w.daemon._engine
        await until(lambda: fleet.max_staleness == then)
        engine.version = 6
        await service.change(published=6)
        await until(lambda: w.daemon.published == 6)
        gate.open.set()
        if kept:
            await service.until(lambda: bool(service.groups))
        else:
            await until(lambda: bool(w.daemon.progress.given_back))
        w.stop.set()
        await w.end()
        assert w.daemon.progress.given_back == ({} if kept else {"superseded": 1})


async def test_a_strategy_that_is_not_installed_bounds_nothing_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service = ServiceDouble(strategy={"name": "elsewhere", "options": {}})
    service.open = 0
    # The service is away once: the bound is that of before until it answers.
    service.faults["run"] = deque([ServiceUnavailable("restarting", retry_after_s=0.0)])
    async with started(tmp_path, EngineDouble(), service, followers=[bound(2)], max_staleness=2) as w:
        fleet = w.daemon._engine
        await until(lambda: fleet.max_staleness is None)
        for _ in range(5):
            await asyncio.sleep(staleness_module.READ_EVERY_S)
    assert caplog.text.count("cannot check the staleness of groups in flight") == 1
