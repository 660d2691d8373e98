"""No call holds the event loop for all runs: long work takes turns with other calls, and holds are measured."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from replaybuf.service import turns
from replaybuf.service.host import Service
from replaybuf.service.http.call import metrics
from replaybuf.service.http.call.metric_text import MetricText
from replaybuf.service.http.call.metrics import Exposition
from replaybuf.service.http.guard.auth import Tokens
from replaybuf.service.http.routes import application
from replaybuf.service.loop_watch import LoopWatch
from replaybuf.service.run.served_run import Run
from replaybuf.store import EmbeddedServer, Store

RUNS = 12


class Turns:
    """Counts the turns of the loop."""

    def __init__(self) -> None:
        self.count = 0

    @contextlib.asynccontextmanager
    async def counting(self) -> AsyncIterator[None]:
        async def count() -> None:
            while True:
                self.count += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        yield
        counting.cancel()


@contextlib.asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[Service, httpx.AsyncClient]]:
    """Serve `RUNS` runs in this process."""
    server = EmbeddedServer(folder, "relaxed")
    await server.start()
    store = await Store.open(server.url)
    try:
        service = Service(store, url="http://127.0.0.1", embedded=True)
        await service.start()
        transport = httpx.ASGITransport(application(service, Tokens(None)))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            for n in range(RUNS):
                reply = await http.put(f"/v1/runs/r{n}", json={"batch": {}})
                assert reply.status_code == 201
            yield service, http
    finally:
        await store.close()
        await server.stop()


def test_a_scrape_reads_one_run_in_a_turn_of_the_loop(tmp_path: Path) -> None:
    """A scrape of 1,000 runs held every call for 0.8 s."""

    async def main() -> None:
        read, loop_turns = metrics._read_run, Turns()
        read_at: list[int] = []

        def counted(scrape: MetricText, name: str, run: Run) -> None:
            read_at.append(loop_turns.count)
            read(scrape, name, run)

        async with serving(tmp_path / "data") as (service, _), loop_turns.counting():
            with patch.object(metrics, "_read_run", counted):
                text = (await Exposition(service).text()).decode()
        assert len(read_at) == len(set(read_at)) == RUNS
        families = {family.name: family for family in text_string_to_metric_families(text)}
        runs = [sample.labels["run"] for sample in families["replaybuf_groups_stored"].samples]
        assert sorted(runs) == sorted(f"r{n}" for n in range(RUNS))
        assert text.count("# TYPE replaybuf_groups_stored_total counter") == 1

    asyncio.run(main())


def test_scrapes_at_the_same_time_share_one_reading(tmp_path: Path) -> None:
    """One that is cancelled does not end it for the others; a later one reads again."""

    async def main() -> None:
        read, readings = metrics._read, 0

        async def counted(service: Service) -> bytes:
            nonlocal readings
            readings += 1
            return await read(service)

        async with serving(tmp_path / "data") as (service, http):
            exposition = Exposition(service)
            with patch.object(metrics, "_read", counted):
                scrapes = [asyncio.create_task(exposition.text()) for _ in range(4)]
                await asyncio.sleep(0)
                scrapes[0].cancel()
                texts = await asyncio.gather(*scrapes[1:])
                assert readings == 1 and len(set(texts)) == 1
                await http.put("/v1/runs/new", json={"batch": {}})
                assert b'replaybuf_step{run="new"} 0.0' in await exposition.text()
                assert readings == 2

    asyncio.run(main())


def test_the_list_of_runs_is_made_in_turns(tmp_path: Path) -> None:
    async def main() -> None:
        described_at: list[int] = []
        loop_turns, describe = Turns(), Run.describe

        def counted(run: Run) -> object:
            described_at.append(loop_turns.count)
            return describe(run)

        async with serving(tmp_path / "data") as (_, http), loop_turns.counting():
            with patch.object(Run, "describe", counted), patch.object(turns, "TURN_S", 0.0):
                assert len((await http.get("/v1/runs")).json()["runs"]) == RUNS
        assert len(described_at) == len(set(described_at)) == RUNS

    asyncio.run(main())


def test_short_items_share_a_turn_and_a_long_one_ends_it() -> None:
    async def main() -> None:
        loop_turns = Turns()
        seen: list[int] = []
        moments = iter([0.0, 0.001, 0.002, 0.05, 0.05, 0.051])
        async with loop_turns.counting():
            await asyncio.sleep(0)
            with patch.object(turns, "time", SimpleNamespace(monotonic=moments.__next__)):
                async for _ in turns.in_turns(range(4)):
                    seen.append(loop_turns.count)
        assert seen[0] == seen[1] == seen[2] < seen[3]

    asyncio.run(main())


def test_a_hold_of_the_loop_is_recorded() -> None:
    """Only lower bounds: on a busy machine other wake-ups are late too."""

    async def main() -> None:
        watch = LoopWatch()
        watching = asyncio.create_task(watch.run())
        while not watch.holds.count:  # noqa: ASYNC110 - the watch has no event
            await asyncio.sleep(0.001)
        time.sleep(0.15)  # noqa: ASYNC251 - holds the loop, as a slow plug-in would
        before = watch.holds.count
        while watch.holds.count == before:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.001)
        watching.cancel()
        above_100_ms = sum(watch.holds.counts[watch.holds.edges.index(100_000) + 1 :])
        assert above_100_ms >= 1 and watch.holds.sum >= 100_000

    asyncio.run(main())


def test_background_work_that_ends_ends_the_server(tmp_path: Path) -> None:
    """A cancellation that is meant for another wait would end it in silence: nobody would renew leases, say."""

    async def main() -> None:
        async with serving(tmp_path) as (service, _):
            with pytest.raises(ExceptionGroup) as failure:
                async with service.working(), asyncio.timeout(30.0):
                    next(task for task in asyncio.all_tasks() if task.get_name() == "hold").cancel()
                    await asyncio.Event().wait()
            assert failure.group_contains(RuntimeError, match="background work has ended.*: hold")

    asyncio.run(main())
