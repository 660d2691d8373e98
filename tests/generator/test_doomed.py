"""Heartbeats of a generator, and groups that it aborts at the engine because no batch can use them."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from replaybuf.generator import staleness
from replaybuf.generator.environments import Turn
from replaybuf.kernel.state.return_reasons import is_failure, is_forgiven
from tests.generator.doubles import EngineDouble, Gate, ServiceDouble
from tests.generator.turn_environments import Scripted
from tests.generator.worlds import World, gated, started
from tests.waiting import until


async def aborted(w: World, reason: str, groups: int) -> None:
    """Wait until these groups are aborted; the engine's places are free then and the tickets are back."""
    await until(lambda: len(w.service.returned) == groups)
    assert set(w.reasons.values()) == {reason}
    assert is_forgiven(reason) and not is_failure(reason), "neither prompt nor producer is at fault"
    assert w.daemon.engines[0].requests == 0
    assert w.daemon.progress.groups_aborted == groups
    assert w.daemon.progress.tokens_saved > 0


async def test_heartbeats_report_what_a_generator_does(tmp_path: Path) -> None:
    service = ServiceDouble()
    service.open = 2
    async with gated(tmp_path, service, 2) as (w, gate):
        await until(lambda: any(report["in_flight"] == 2 for _, report in service.heartbeats))
        name, report = service.heartbeats[-1]
        assert (name, report["engines"]) == ("me", 1)
        w.stop.set()
        gate.open.set()
        await w.end()


async def test_heartbeats_notice_an_engine_that_ends_while_nobody_asks_it(tmp_path: Path) -> None:
    """A run whose buffer is full gives no tickets, so no request would fail."""
    service = ServiceDouble()
    service.open = 0
    async with gated(tmp_path, service, 0) as (w, _):
        await until(lambda: service.heartbeats and service.heartbeats[-1][1]["engines"] == 1)
        w.engine.healthy = False
        await until(lambda: service.heartbeats[-1][1]["engines"] == 0)


@pytest.mark.parametrize("state", ["paused", "finished"])
async def test_a_run_that_takes_no_groups_gets_its_tickets_back(tmp_path: Path, state: str) -> None:
    """Engines sample nothing for it; a group without any stored one before lacks all of its tokens."""
    service = ServiceDouble()
    service.open = 3
    async with gated(tmp_path, service, 3) as (w, gate):
        service.state = state
        await aborted(w, f"run_{state}", 3)
        assert w.daemon.progress.tokens_saved == 3 * 4 * 8
        w.stop.set()
        await w.end()
        gate.open.set()


async def test_groups_of_weights_that_a_rewind_took_back_are_aborted(tmp_path: Path) -> None:
    service = ServiceDouble()
    service.published, service.open = 3, 2
    gate, engine = Gate(), EngineDouble(version=3)
    engine.always = gate
    async with started(tmp_path, engine, service) as w:
        await gate.requests(2)
        await until(lambda: w.daemon.published == 3)
        service.published = 1
        await aborted(w, "lost_lineage", 2)
        w.stop.set()
        await w.end()
        gate.open.set()


async def test_groups_that_publications_make_too_old_are_aborted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's queue was empty, so their first tokens are of version 0; the bound is 1, and 2 is published."""
    monkeypatch.setattr(staleness, "LOOK_EVERY_S", 0.01)
    service, engine, gate = ServiceDouble(), EngineDouble(), Gate()
    service.open, engine.gauges, engine.always = 2, (2, 0), gate
    async with started(tmp_path, engine, service, max_staleness=1) as w:
        await gate.requests(2)
        jobs = list(w.daemon._inflight.jobs.values())
        await until(lambda: all(job.begun_by == 0 for job in jobs))
        engine.version = 2
        await publish(service, 2)
        await aborted(w, "superseded", 2)
        w.stop.set()
        await w.end()
        gate.open.set()


async def test_a_straggler_that_outlasts_stored_groups_saves_tokens_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first group is stored within moments; the second is aborted after more than its time."""
    monkeypatch.setattr(staleness, "LOOK_EVERY_S", 0.01)
    service, engine, gate = ServiceDouble(), EngineDouble(), Gate()
    service.open, engine.gauges = 1, (1, 0)
    async with started(tmp_path, engine, service, max_staleness=1) as w:
        await until(lambda: w.daemon.progress.groups == 1)
        engine.always = gate
        await service.change(open=1)
        await gate.requests(1)
        (job,) = w.daemon._inflight.jobs.values()
        await until(lambda: job.begun_by == 0)
        job.expires_at_s -= 60 * w.daemon.progress.group_s.sum_s
        engine.version = 2
        await publish(service, 2)
        await aborted(w, "superseded", 1)
        w.stop.set()
        await w.end()
        gate.open.set()


async def test_a_group_given_up_between_two_turns_counts_as_aborted(tmp_path: Path) -> None:
    """The first turn is sampled by version 0; while the environment answers, version 2 is published."""
    service, engine = ServiceDouble(), EngineDouble()
    service.open = 1
    asked, answer = [], threading.Event()

    async def answers(number: int, turn: Turn) -> str:
        asked.append(turn)
        await asyncio.to_thread(answer.wait)
        return " "

    turns = Scripted(answers)
    async with started(tmp_path, engine, service, turns=turns, max_staleness=1) as w:
        await until(lambda: len(asked) == 4)
        engine.version = 2
        await publish(service, 2)
        await until(lambda: w.daemon.published == 2)
        answer.set()
        await aborted(w, "superseded", 1)


async def test_groups_that_may_still_wait_in_the_engine_are_not_aborted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request waits: its tokens will be of the new version."""
    monkeypatch.setattr(staleness, "LOOK_EVERY_S", 0.01)
    service, engine, gate = ServiceDouble(), EngineDouble(), Gate()
    service.open, engine.gauges, engine.always = 2, (1, 1), gate
    async with started(tmp_path, engine, service, max_staleness=1) as w:
        await gate.requests(2)
        engine.version = 2
        await publish(service, 2)
        await until(lambda: w.daemon.published == 2)
        for _ in range(20):
            await asyncio.sleep(0.01)
        gate.open.set()
        await until(lambda: len(service.groups) == 2)
        assert service.returned == [] and w.daemon.progress.groups_aborted == 0


async def publish(service: ServiceDouble, version: int) -> None:
    """Publish a version, and answer those who wait for it."""
    async with service.changed:
        service.published = version
        service.changed.notify_all()
