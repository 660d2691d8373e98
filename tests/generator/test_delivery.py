"""Delivery of groups: while the service is away, before their version is published, after a rewind, when rejected."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest

from replaybuf.client.retries import Backoff
from replaybuf.errors import DataLost, NoRoom, ReplaybufError, ServiceUnavailable, TooLarge
from replaybuf.generator import daemon as daemon_module
from replaybuf.generator import inflight as inflight_module
from replaybuf.kernel.state.return_reasons import is_forgiven
from tests.generator.doubles import EngineDouble, Gate, ServiceDouble
from tests.generator.worlds import completed, failed, gated, sampled_by, started
from tests.waiting import until


@pytest.fixture(autouse=True)
def _retry_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflight_module, "Backoff", lambda: Backoff(first_s=0.01, ceiling_s=0.05))


def data_lost() -> DataLost:
    return DataLost("Redis was emptied; restore it", name="redis", value="r")


async def test_groups_that_are_ready_together_go_in_one_append(tmp_path: Path) -> None:
    service = ServiceDouble(prompts=8)
    service.faults["groups"] = deque([NoRoom("full", retry_after_s=0.2)])
    async with gated(tmp_path, service, 8) as (w, gate):
        gate.open.set()
        await w.end()
        assert len(service.appended) < 8
        assert len(service.groups) == 8


# ---------------------------------------------------------------------- the service is away


def test_groups_are_kept_while_the_service_is_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    service = ServiceDouble(prompts=3)
    away = ServiceUnavailable("restarting", retry_after_s=0.0)
    service.faults["groups"] = deque([away, NoRoom("full", retry_after_s=0.0)])
    service.faults["tickets"] = deque([away])
    w = completed(tmp_path, service)
    assert w.stored == [0, 1, 2] and service.returned == []
    assert "for the service (append): restarting" in caplog.text and "for room in the service (append)" in caplog.text


async def test_groups_are_kept_while_nothing_listens_at_the_services_address(tmp_path: Path) -> None:
    gate, engine, service = Gate(), EngineDouble(), ServiceDouble(prompts=2)
    engine.always = gate
    async with contextlib.AsyncExitStack() as serving:
        await serving.enter_async_context(service.up())
        port = int(service.url.rpartition(":")[2])
        async with started(tmp_path, engine, service, serve=False) as w:
            await gate.requests(2)
            await serving.aclose()
            gate.open.set()
            await until(lambda: w.daemon.waiting == "service_away", poll_s=0.01)
            async with service.up(port):
                await w.end()
    assert len(service.groups) == 2


def test_groups_are_kept_while_redis_has_lost_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each outage is logged once per call, and the status has the reason."""
    service, file = ServiceDouble(prompts=2), tmp_path / "metrics.jsonl"
    restarting = ServiceUnavailable("restarting", retry_after_s=0.1)
    service.faults["groups"] = deque([data_lost(), data_lost(), restarting, data_lost(), data_lost()])
    completed(tmp_path, service, metrics_file=file, report_every_s=0.01)
    assert (len(service.groups), service.returned) == (2, [])
    assert "data_lost" in {json.loads(line)["waiting"] for line in file.read_text().splitlines()}
    logged = [record for record in caplog.records if "for an operator" in record.message]
    assert [record.levelname for record in logged] == ["ERROR", "ERROR"]
    assert "Redis was emptied; restore it" in logged[0].message


def test_lost_data_that_nobody_restores_ends_the_generator(tmp_path: Path) -> None:
    service = ServiceDouble(prompts=1)
    service.faults["groups"] = deque(data_lost() for _ in range(100))
    _, error = failed(tmp_path, service, service_patience_s=0.2)
    assert isinstance(error, DataLost)
    assert "waited 0.2 s for an operator to restore the data; 1 group in flight lost" in error.detail


def test_a_service_that_stays_away_ends_the_generator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer restarts the time, also the answer that there is no room. A look at the clock takes 0.125 s."""
    monkeypatch.setattr(inflight_module, "time", SimpleNamespace(monotonic=itertools.count(0.0, 0.125).__next__))
    service = ServiceDouble(prompts=2)
    away = [ServiceUnavailable("restarting", retry_after_s=0.0) for _ in range(100)]
    service.faults["groups"] = deque([*away[:1], NoRoom("full", retry_after_s=0.0), *away[1:]])
    _, error = failed(tmp_path, service, service_patience_s=0.25)
    assert isinstance(error, ServiceUnavailable)
    assert error.detail.startswith("waited 0.25 s for the service (append); ")
    assert error.detail.endswith(" in flight lost: restarting") and error.bound == 0.25
    assert len(service.faults["groups"]) == 97, "two tries after the answer"


# ---------------------------------------------------------------------- publication and rewind


async def test_a_group_above_the_published_version_is_held_until_the_publication(tmp_path: Path) -> None:
    engine, service = EngineDouble(version=1), ServiceDouble()
    service.open = 2
    async with started(tmp_path, engine, service):
        await service.until(lambda: len(service.asked) >= 3)
        assert service.appended == []
        await service.change(published=1)
        await service.until(lambda: len(service.groups) == 2)
        assert service.returned == []


def test_the_ticket_of_a_held_group_is_returned_when_it_expires(tmp_path: Path) -> None:
    service = ServiceDouble(prompts=1)
    service.expires_in_s = 0.2
    assert completed(tmp_path, service, EngineDouble(version=1)).reasons == {"t0": "version_above_published"}
    assert service.appended == []


async def test_a_held_group_is_lost_when_the_run_is_rewound(tmp_path: Path) -> None:
    engine, service = EngineDouble(version=6), ServiceDouble(prompts=1)
    service.published, engine.always = 5, sampled_by(6)
    async with started(tmp_path, engine, service) as w:
        await service.until(lambda: len(service.asked) >= 2)
        engine.version = 3  # a trainer that goes back also loads its engines
        await service.change(published=3)
        await w.end()
        assert w.reasons == {"t0": "lost_lineage"}


async def test_a_held_group_is_lost_when_the_engine_loses_its_unpublished_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a trainer died between loading and publishing, the same number comes again and means other weights."""
    monkeypatch.setattr(daemon_module, "_HELD_EVERY_S", 0.01)
    engine, service = EngineDouble(version=1), ServiceDouble()
    service.open = 1
    async with started(tmp_path, engine, service) as w:
        await until(lambda: w.daemon.waiting == "awaiting_publication")
        engine.version = 0
        await service.until(lambda: bool(service.returned))
        assert w.reasons == {"t0": "lost_lineage"}
        engine.version = 1
        await service.change(published=1, open=1)
        await service.until(lambda: bool(service.groups))
        assert w.stored == [1]


async def test_a_group_of_a_version_that_was_taken_back_is_lost(tmp_path: Path) -> None:
    gate, engine, service = Gate(), EngineDouble(version=5), ServiceDouble(prompts=1)
    service.published, engine.always = 5, sampled_by(5, gate)
    async with started(tmp_path, engine, service) as w:
        await gate.requests(1)
        engine.version = 4
        await service.change(published=4)
        gate.open.set()
        await w.end()
        assert w.reasons == {"t0": "lost_lineage"}


async def test_a_group_from_before_a_rewind_is_lost_although_its_version_is_published_again(tmp_path: Path) -> None:
    gate, engine, service = Gate(), EngineDouble(version=5), ServiceDouble(prompts=1)
    service.published, engine.always = 5, sampled_by(5, gate)
    async with started(tmp_path, engine, service) as w:
        await gate.requests(1)
        await service.change(published=4)
        await until(lambda: w.daemon.waiting == "engine_stale")
        engine.version = 5  # of the new history
        await service.change(published=5)
        gate.open.set()
        await service.until(lambda: bool(service.returned))
        assert w.reasons == {"t0": "lost_lineage"}
    assert service.groups == []


# ---------------------------------------------------------------------- rejected groups


@pytest.mark.parametrize(
    ("rejected", "returned", "counts"),
    [("overlong", "rejected_overlong", True), ("lost_lineage", "lost_lineage", False)],
)
def test_the_ticket_of_a_rejected_group_is_returned_with_the_services_reason(
    tmp_path: Path, rejected: str, returned: str, counts: bool
) -> None:
    """Lost lineage is not the prompt's failure, so its reason is forgiven."""
    assert is_forgiven(f"{returned}: detail") is not counts
    service = ServiceDouble(prompts=3)
    service.judge = lambda group: rejected if group.prompt_index == 1 else None
    w = completed(tmp_path, service)
    assert w.reasons == {"t1": returned} and w.stored == [0, 2]


async def test_an_append_that_is_rejected_as_a_whole_is_sent_group_by_group(tmp_path: Path) -> None:
    service = ServiceDouble(prompts=4)
    # No room first, so that all four are ready together; then too large as a whole, and the first one also alone.
    faults: list[ReplaybufError] = [NoRoom("full", retry_after_s=0.3), TooLarge("body"), TooLarge("group")]
    service.faults["groups"] = deque(faults)
    async with gated(tmp_path, service, 4) as (w, gate):
        gate.open.set()
        await w.end()
        assert len(service.groups) + len(service.returned) == 4
        assert 1 <= len(service.returned) <= 2
        assert {text for _, text in service.returned} <= {"append_refused: group", "append_refused: body"}
