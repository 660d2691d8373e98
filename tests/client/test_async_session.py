"""Sessions and readers of asyncio trainers: the blocking ones in threads, and a cancelled wait loses no batch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from replaybuf.client import AsyncBatchReader, AsyncClient, ReaderOptions
from replaybuf.errors import Fenced, Invalid
from tests.conftest import RunClient, ServeProcess, group

QUICK = ReaderOptions(poll_s=0.05)
TIMEOUT_S = 60.0


def attempt(service: ServeProcess, run: RunClient, work: Callable[[AsyncClient], Awaitable[None]]) -> None:
    """Do work with a client of the run, on an event loop."""

    async def main() -> None:
        client = AsyncClient(service.url, run.run)
        try:
            await asyncio.wait_for(work(client), TIMEOUT_S)
        finally:
            await client.aclose()

    asyncio.run(main())


def test_an_asyncio_trainer_trains_publishes_and_records_to_the_end_of_the_run(
    run: RunClient, service: ServeProcess
) -> None:
    run.put(batch={"groups_per_batch": 1}, max_steps=2)
    run.append(group("a"), group("b"))

    async def work(client: AsyncClient) -> None:
        steps = []
        async with client.trainer(reader=QUICK) as session:
            async for batch in session:
                steps.append(batch.meta.step)
                await session.step_done(f"file:///weights/{session.steps_done + 1}", checkpoint=True)
            assert (steps, session.steps_done, session.session.reader.finished) == ([0, 1], 2, True)
        status, policy = await client.get_run(), await client.get_policy()
        assert (status.state, status.checkpoints, policy.weights_uri) == ("finished", [2], "file:///weights/2")

    attempt(service, run, work)


def test_an_asyncio_trainer_reports_step_by_step(run: RunClient, service: ServeProcess) -> None:
    run.put(batch={"groups_per_batch": 1}, max_steps=2)
    run.append(group("a"), group("b"))

    async def work(client: AsyncClient) -> None:
        async with client.trainer(reader=QUICK) as session:
            async for batch in session:
                await session.ack(metrics={"loss": 0.5}, steps=batch.meta.step + 1)
                await session.publish_due()
                await session.checkpoint(written=False)
                assert (await client.get_run()).checkpoints == [batch.meta.step] * (batch.meta.step > 0)
        assert (await client.get_policy()).version == 2

    attempt(service, run, work)


def test_a_cancelled_wait_loses_no_batch_and_the_loop_stays_free(run: RunClient, service: ServeProcess) -> None:
    """The batch comes while nobody waits; the next wait gets it."""
    run.put(batch={"groups_per_batch": 1})

    async def work(client: AsyncClient) -> None:
        async with client.trainer(reader=QUICK) as session:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(session), 0.2)
            await asyncio.to_thread(run.append, group("a"))
            assert (await anext(session)).meta.step == 0

    attempt(service, run, work)


def test_leaving_a_session_ends_a_wait_that_was_cancelled(run: RunClient, service: ServeProcess) -> None:
    run.put(batch={"groups_per_batch": 1})

    async def work(client: AsyncClient) -> None:
        session = client.trainer(reader=QUICK)
        with pytest.raises(Invalid, match="no trainer before `attach`"):
            _ = session.epoch
        async with session:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(session), 0.2)
        with pytest.raises(StopAsyncIteration):
            await anext(session)

    attempt(service, run, work)


def test_an_asyncio_reader_has_the_batches_and_errors_of_the_blocking_one(
    run: RunClient, service: ServeProcess
) -> None:
    run.put(batch={"groups_per_batch": 1})
    run.append(group("a"))

    async def work(client: AsyncClient) -> None:
        attached = await client.attach()
        async with AsyncBatchReader(client, attached.epoch, attached.step, QUICK) as reader:
            with pytest.raises(Invalid, match="ack before the batch"):
                await reader.ack()
            async for batch in reader:
                assert batch.meta.step == 0
                await reader.ack()
                reader.stop()
            assert (await client.get_run()).step == 1
        await client.attach()
        async with client.trainer(reader=QUICK) as session, AsyncBatchReader(client, 1, 1, QUICK) as old:
            await session.confirm()
            with pytest.raises(Fenced):
                await anext(old)

    attempt(service, run, work)
